"""A page as a list of blocks, written as Markdown and as HTML that needs no other file.

The two hold the same. Text is plain; what is code is ``Mono``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from compiled_dsa.graphs.report_style import STYLE


class Mono(str):
    """Text that is code."""


@dataclass(frozen=True)
class Link:
    text: str
    href: str


Inline = str | Mono | Link | tuple  # a tuple is a sequence of them


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: Inline


@dataclass(frozen=True)
class Items:
    """A list; ``important`` ones are set off."""

    items: Sequence[Inline]
    important: bool = False


@dataclass(frozen=True)
class Table:
    """Cells that are ``int`` are numbers; ``total`` sets the last row off."""

    head: Sequence[str]
    rows: Sequence[Sequence[Inline | int]]
    total: bool = False


@dataclass(frozen=True)
class Code:
    text: str
    language: str = "text"


@dataclass(frozen=True)
class Folded:
    """Blocks a click away."""

    summary: Inline
    blocks: Sequence["Block"]
    is_open: bool = False


@dataclass(frozen=True)
class Step:
    """One line of a sequence: what kind of thing, its name, a remark, and source a click away."""

    kind: str
    name: str
    remark: Inline = ""
    source: str = ""
    language: str = "text"


@dataclass(frozen=True)
class Steps:
    steps: Sequence[Step]


@dataclass(frozen=True)
class Strip:
    """Names one after the other, each with its kind."""

    names: Sequence[tuple[str, str]]


Block = Heading | Paragraph | Items | Table | Code | Folded | Steps | Strip


def to_markdown(blocks: Iterable[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return _inline_markdown(text)
        case Items(items):
            return "\n".join(f"- {_inline_markdown(item)}" for item in items)
        case Table(head, rows):
            first = rows[0] if rows else ()
            align = ["---:" if isinstance(cell, int) else "---" for cell in first] or ["---"] * len(head)
            lines = [head, align, *[[_inline_markdown(cell).replace("|", "\\|") for cell in row] for row in rows]]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Code(text, language):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            return f"{fence}{language}\n{text}\n{fence}"
        case Folded(summary, inner, is_open):
            mark = " open" if is_open else ""
            return f"<details{mark}><summary>{_inline_html(summary)}</summary>\n\n{to_markdown(inner)}\n</details>"
        case Steps(steps):
            return "\n\n".join(_step_markdown(step) for step in steps)
        case Strip(names):
            return " → ".join(f"**{name}**" if kind == "cut" else name for name, kind in names)
    raise TypeError(block)


def _step_markdown(step: Step) -> str:
    line = f"{step.kind} {_inline_markdown(Mono(step.name))}"
    if step.source:
        summary = (f"{step.kind} ", Mono(step.name), " ", step.remark)
        return _markdown(Folded(summary, [Code(step.source, step.language)]))
    return f"{line} {_inline_markdown(step.remark)}".rstrip()


def _inline_markdown(text: Inline | int) -> str:
    match text:
        case tuple():
            return "".join(_inline_markdown(part) for part in text)
        case Link(name, href):
            return f"[{name}]({href})"
        case Mono():
            return f"`{text}`" if text else ""
    return re.sub(r"([*<>\[\]`]|\b_|_\b)", r"\\\1", str(text))


def to_html(title: str, blocks: Iterable[Block]) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{_htmls(blocks)}\n</main>\n</body>\n</html>\n"
    )


def _htmls(blocks: Iterable[Block]) -> str:
    return "\n".join(_html(block) for block in blocks)


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            name = f' id="{anchor(text)}"' if level < 3 else ""  # the smaller ones occur once a graph
            return f"<h{level}{name}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_inline_html(text)}</p>"
        case Items(items, important):
            inner = "".join(f"<li>{_inline_html(item)}</li>" for item in items)
            return f'<ul class="{"important" if important else "plain"}">{inner}</ul>'
        case Table():
            return _table_html(block)
        case Code(text):
            return f"<pre><code>{escape(text)}</code></pre>"
        case Folded(summary, inner, is_open):
            mark = " open" if is_open else ""
            return f'<details class="fold"{mark}><summary>{_inline_html(summary)}</summary>{_htmls(inner)}</details>'
        case Steps(steps):
            return f'<ol class="steps">{"".join(f"<li>{_step_html(step)}</li>" for step in steps)}</ol>'
        case Strip(names):
            inner = "".join(f'<li class="{kind}">{escape(name)}</li>' for name, kind in names)
            return f'<ol class="strip">{inner}</ol>'
    raise TypeError(block)


def _table_html(table: Table) -> str:
    first = table.rows[0] if table.rows else [""] * len(table.head)
    number = [' class="number"' if isinstance(cell, int) else "" for cell in first]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.head, number))
    lines = []
    for i, row in enumerate(table.rows):
        cells = "".join(f"<td{kind}>{_inline_html(cell)}</td>" for cell, kind in zip(row, number))
        is_total = table.total and i == len(table.rows) - 1
        lines.append(f'<tr class="total">{cells}</tr>' if is_total else f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _step_html(step: Step) -> str:
    line = (
        f'<span class="line"><span class="kind {step.kind}">{escape(step.kind)}</span> <span><code>{escape(step.name)}'
        f'</code> <span class="remark">{_inline_html(step.remark)}</span></span></span>'
    )
    if not step.source:
        return f'<div class="bare">{line}</div>'
    return f"<details><summary>{line}</summary><pre><code>{escape(step.source)}</code></pre></details>"


def _inline_html(text: Inline | int) -> str:
    match text:
        case tuple():
            return "".join(_inline_html(part) for part in text)
        case Link(name, href):
            return f'<a href="{escape(href)}">{escape(name)}</a>'
        case Mono():
            return f"<code>{escape(text)}</code>" if text else ""
    return escape(str(text))


def anchor(heading: str) -> str:
    """The id of a heading, as GitHub makes it from the text."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")

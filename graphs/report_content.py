"""What a report says, as blocks of a page."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from compiled_dsa.graphs.report_code import EXTERN, KERNEL, OP
from compiled_dsa.graphs.report_layers import Layer, Part
from compiled_dsa.graphs.report_page import (
    Block,
    Code,
    Folded,
    Heading,
    Inline,
    Items,
    Link,
    Mono,
    Paragraph,
    Step,
    Steps,
    Strip,
    Table,
    anchor,
)
from compiled_dsa.graphs.report_record import Graph, Guards, Input

TELLING_GUARDS, GUARD_WIDTH = 40, 200  # shown; the rest is in the file beside the page
KINDS = {KERNEL: "kernel", EXTERN: "library", OP: "op"}
NOTHING_COMPILED = (
    "Nothing was compiled: no code of torch.compile ran inside. Forwards that replay a CUDA graph captured before run "
    "none; use another cache, or a model compiled with graphs='off'."
)
COUNTING = (
    "Kernels are those that Inductor generated, library calls are such as mm, custom ops are counted once however "
    "many kernels they launch themselves. A launch counts in the layer of the last operation that it computes; one of "
    "which Inductor does not say what it computes (its C++ kernels) counts in the layer of the launch after it."
)


def content(
    title: str, graphs: Sequence[Graph], breaks: Mapping[str, int], notes: Sequence[str], bytecode: Sequence[str]
) -> list[Block]:
    """The page: overview, then each graph."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    blocks: list[Block] = [Heading(1, title), Paragraph(f"torch {torch.__version__} on {device}.")]
    if not graphs:
        blocks.append(Items([NOTHING_COMPILED], important=True))
    else:
        blocks.append(_overview(graphs))
    if notes:
        blocks += [Heading(3, "What could not be seen"), Items(notes, important=True)]
    blocks.append(Heading(3, "Graph breaks"))
    if breaks:
        blocks += [
            Folded(f"{count} × {why.strip().splitlines()[0]}", [Code(why.strip())]) for why, count in breaks.items()
        ]
    else:
        blocks.append(Paragraph("None."))
    if bytecode:
        blocks += [Heading(3, "Bytecode"), Paragraph("What Dynamo made of each function, decompiled by depyf:")]
        blocks.append(Items([Link(name, name) for name in bytecode]))
    for graph in graphs:
        blocks += _graph(graph)
    return blocks


def _overview(graphs: Sequence[Graph]) -> Table:
    head = ("graph", "pieces", "cuts", "kernels", "library calls", "custom ops")
    rows: list[Sequence[Inline | int]] = []
    for graph in graphs:
        pieces = len(graph.sequence()) - graph.cuts
        counts = (graph.count(kind) for kind in KINDS)
        rows.append((Link(graph.title, f"#{anchor(graph.title)}"), pieces, graph.cuts, *counts))
    return Table(head, rows)


def _graph(graph: Graph) -> list[Block]:
    files = [Link("traced graph", f"graph_{graph.number}.py")]
    if graph.code:
        files.append(Link("Inductor's output code", f"graph_{graph.number}_inductor.py"))
    blocks: list[Block] = [
        Heading(2, graph.title),
        Paragraph(("Compiled from ", Mono(graph.function), f" as Dynamo's compile {graph.compile_id}.")),
        Paragraph(("In full: ", *_joined(files), ".")),
        Strip(
            [
                (f"cut {n}: {_short(cut)}" if cut else f"piece {n}", "cut" if cut else "piece")
                for n, cut in graph.sequence()
            ]
        ),
        *_cuts(graph),
        Heading(3, "Inputs"),
        *_inputs(graph),
        Heading(3, "Launches by layer"),
        _counts(graph.layers),
        Paragraph(COUNTING),
        Heading(3, "Layer by layer"),
        *_layers(graph),
    ]
    return blocks + ([Heading(3, "Guards"), *_guards(graph.guards, graph.number)] if graph.guards else [])


def _joined(items: Sequence[Inline]) -> list[Inline]:
    return [part for i, item in enumerate(items) for part in ((", ", item) if i else (item,))]


def _short(op: str) -> str:
    return op.split("::")[-1].removesuffix(".default")


def _cuts(graph: Graph) -> list[Block]:
    parts = [part for layer in graph.layers for part in layer.parts if part.cut]
    inside = Counter(op for layer in graph.layers for part in layer.parts for op in part.inside)
    blocks: list[Block] = []
    if parts:
        times, why = Counter(part.cut for part in parts), {part.cut: part.why for part in parts}
        blocks.append(Heading(3, "Where the graph is cut, and why"))
        blocks += [Paragraph((Mono(_short(op)), f" × {times[op]}. ", *_prose(why[op]))) for op in times]
    else:
        blocks.append(Paragraph("Nothing cuts this graph: no op in it is tagged cudagraph_unsafe."))
    if inside:
        listed = [(Mono(_short(op)), f" × {n}") for op, n in inside.items()]
        blocks.append(Paragraph(("Custom ops that stay inside pieces: ", *_joined(listed), ".")))
    return blocks


def _prose(docstring: str) -> list[Inline]:
    """Text whose code stands between double backticks, as in docstrings."""
    return [Mono(part) if i % 2 else part for i, part in enumerate(docstring.split("``"))]


def _inputs(graph: Graph) -> list[Block]:
    blocks: list[Block] = [_tensors(graph.inputs)] if graph.inputs else [Paragraph("No tensors but weights.")]
    if graph.symbols:
        symbols = [(Mono(name), f": {what}") for name, what in graph.symbols.items()]
        blocks += [Paragraph("Symbols in shapes:"), Items(symbols)]
    if graph.weights:
        size = sum(weight.bytes for weight in graph.weights)
        said = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
        summary = f"{len(graph.weights)} weights and buffers, {said}"
        blocks.append(Folded(summary, [_tensors(graph.weights)]))
    return blocks


def _tensors(inputs: Sequence[Input]) -> Table:
    return Table(("input", "dtype", "shape"), [(Mono(i.name), Mono(i.dtype), Mono(i.shape)) for i in inputs])


def _counts(layers: Sequence[Layer]) -> Table:
    def row(name: str, each: Sequence[Layer]):
        counts = [sum(layer.count(kind) for layer in each) for kind in KINDS]
        cuts = sum(layer.cuts for layer in each)
        return (name, *counts, cuts, sum(counts) + cuts)

    head = ("layer", "kernels", "library calls", "custom ops", "cuts", "launches")
    rows = [row(layer.name, [layer]) for layer in layers]
    return Table(head, [*rows, row("all", layers)] if len(layers) > 1 else rows, total=len(layers) > 1)


def _layers(graph: Graph) -> list[Block]:
    kernels = dict(graph.code.kernels) if graph.code else {}
    first_in: dict[str, str] = {}  # kernel -> where its source stands; once on the page is enough
    spans = {
        number: [y.name for y in graph.layers for p in y.parts if p.number == number] for number, _ in graph.sequence()
    }
    first = next((layer for layer in graph.layers if layer.launches), None)
    blocks: list[Block] = []
    for layer in graph.layers:
        inner: list[Block] = []
        for part in layer.parts:
            others = [name for name in spans[part.number] if name != layer.name]
            inner.append(Heading(4, f"{'cut' if part.cut else 'piece'} {part.number}"))
            inner += _cut(part) if part.cut else _piece(part, layer.name, others, kernels, first_in)
        summary = f"{layer.name}: {layer.launches} launches, {layer.cuts} cuts"
        blocks.append(Folded(summary, inner, is_open=layer is first))
    return blocks


def _cut(part: Part) -> list[Block]:
    step = Step("cut", part.cut, f"in {', '.join(part.modules)}" if part.modules else "")
    return [Steps([step]), Paragraph(tuple(_prose(part.why)))]


def _piece(
    part: Part, layer: str, others: Sequence[str], kernels: Mapping[str, str], first_in: dict[str, str]
) -> list[Block]:
    said = f"{part.operations} operations" + (f" of {', '.join(part.modules)}" if part.modules else "")
    said += f". More of the piece: {', '.join(others)}." if others else "."
    if kernels and not part.launches:
        said += " No launch counts here: they are views, or fused into kernels that count elsewhere."
    steps = []
    for placed in part.launches:
        launch = placed.launch
        source, remark = kernels.get(launch.name, ""), placed.module
        if launch.name in first_in:
            source, remark = "", f"{remark} (source: {first_in[launch.name]})".strip()
        elif source:
            first_in[launch.name] = f"piece {part.number}, {layer}"
        language = "cpp" if "#include" in source else "python"
        steps.append(Step(KINDS[launch.kind], launch.name, remark, source, language))
    if not steps and part.inside:
        steps = [Step("op", name) for name in part.inside]
    return [Paragraph(said), *([Steps(steps)] if steps else [])]


def _guards(guards: Guards, number: int) -> list[Block]:
    listed = [line if len(line) <= GUARD_WIDTH else line[:GUARD_WIDTH] + " ..." for line in guards.telling]
    more = len(listed) - TELLING_GUARDS
    text = "\n".join(listed[:TELLING_GUARDS] + ([f"... {more} more"] if more > 0 else []))
    kinds = ", ".join(f"{count} {kind}" for kind, count in guards.kinds.items())
    file = Link("all of them", f"graph_{number}_guards.txt")
    return [
        Paragraph((f"{sum(guards.kinds.values())} guards decide whether a call may use this code (", file, ").")),
        Folded("Those on inputs, sizes and flags", [Code(text)]),
        Folded("Kinds", [Paragraph(kinds)]),
    ]

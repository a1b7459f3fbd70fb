"""report: what torch.compile makes of a run, written down for people.

Example::

    with report("dumps/mine"):
        model.generate(**inputs)

writes ``index.html`` and ``index.md`` with, for every graph, its inputs, and layer by layer the pieces between cuts,
the cuts and why they are there, and the kernels with their source; beside them the traced graphs, Inductor's output
code and the guards in full, and depyf's account of the bytecode.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from compiled_dsa.graphs.report_content import content
from compiled_dsa.graphs.report_depyf import decompile_into
from compiled_dsa.graphs.report_page import to_html, to_markdown
from compiled_dsa.graphs.report_record import Graph, Recorder
from compiled_dsa.graphs.torch_compat import compiling_with, graph_break_reasons

_reporting: ContextVar[bool] = ContextVar("reporting", default=False)


def reporting() -> bool:
    """Whether this thread is inside a ``report``, which wants to see compiled code run and not graphs replayed."""
    return _reporting.get()


@dataclass
class Report:
    """What was seen; complete once the context has ended.

    Attributes:
        folder: where it is written.
        graphs: in the order of compilation.
        breaks: reason of a graph break -> how often.
        notes: what could not be seen, and why.
        bytecode: depyf's files.
    """

    folder: Path
    graphs: list[Graph] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bytecode: list[Path] = field(default_factory=list)

    @property
    def page(self) -> Path:
        return self.folder / "index.html"


@contextmanager
def report(folder: str | Path, title: str = "What torch.compile made") -> Iterator[Report]:
    """Writes down what torch.compile makes of the calls inside.

    A context, so that any code can stand in it: a forward, ``generate()``, a caller's own loop. It works at any time.
    What was compiled before is compiled once more for the report, by Inductor with its default options (from its cache
    of graphs where that has them) and without ``fullgraph``, so that graph breaks are listed; the compiled code, caches
    and counters of the model stay as they were. A CUDA graph captured before is replayed without any compiled code:
    to see that, run it with another cache, or a model compiled with ``graphs="off"``.

    For ``graphs="piecewise"`` too the graph is compiled whole: a kernel may then fuse what lies on both sides of a cut
    and does not depend on it.

    What cannot be seen, a decompiler that fails among it, is a line of the report and never an error; when the run
    fails, what was compiled until then is written. Forward graphs only.

    Args:
        folder: made where it does not exist; files of an earlier report in it are replaced.
        title: heading of the pages.

    Yields:
        The ``Report``, filled when the context ends.

    Raises:
        ValueError: ``folder`` cannot be written, or another report is under way; before anything runs.
    """
    if reporting():
        raise ValueError(f"folder={str(folder)!r}: a report inside another one would see nothing")
    folder = _writable(Path(folder))
    for old in (*folder.glob("graph_*"), *folder.glob("depyf/full_code_for_*")):
        old.unlink()
    result = Report(folder)
    recorder = Recorder(result.notes)
    before = graph_break_reasons()
    token = _reporting.set(True)
    try:
        with compiling_with(recorder):
            yield result
    finally:
        _reporting.reset(token)
        result.graphs = recorder.graphs
        after = graph_break_reasons()
        result.breaks = {why: n - before.get(why, 0) for why, n in after.items() if n > before.get(why, 0)}
        recorder.read_guards()
        frames = [(frame.code, frame.globals) for frame in recorder.frames]
        result.bytecode = decompile_into(folder / "depyf", frames, result.notes)
        _write(result, title)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"folder={str(folder)!r}: nothing can be written there ({error})") from error
    return folder


def _write(result: Report, title: str) -> None:
    for graph in result.graphs:
        for suffix, text in (
            (".py", graph.readable),
            ("_inductor.py", graph.code and graph.code.text),
            ("_guards.txt", graph.guards and graph.guards.text),
        ):
            if text:
                (result.folder / f"graph_{graph.number}{suffix}").write_text(text, encoding="utf-8")
    bytecode = [path.relative_to(result.folder).as_posix() for path in result.bytecode]
    blocks = content(title, result.graphs, result.breaks, result.notes, bytecode)
    result.page.write_text(to_html(title, blocks), encoding="utf-8")
    result.page.with_suffix(".md").write_text(to_markdown(blocks), encoding="utf-8")

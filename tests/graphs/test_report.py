"""report: what is seen of a run, on a toy of two layers with a split op of its own."""

import re
import sys

import pytest
import torch
from torch import Tensor, nn

from compiled_dsa.custom_ops.capture import split_op
from compiled_dsa.graphs import report, report_depyf, report_record
from compiled_dsa.graphs.report_code import EXTERN, KERNEL, OP
from compiled_dsa.graphs.report_layers import AFTER, BEFORE
from compiled_dsa.graphs.report_page import Code, Folded, Items, Link, Mono, Table, to_html, to_markdown
from compiled_dsa.graphs.torch_compat import compile_whole

ROWS = 5
CUT = "report_test::running_sum.default"


@split_op("report_test::running_sum", mutates_args=["out"])
def running_sum(x: Tensor, out: Tensor) -> None:
    """Sums down the rows, ``x`` staying as it is."""
    out.copy_(x.cumsum(0))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.up(self.norm(x)).relu()
        out = torch.empty_like(h)
        torch.ops.report_test.running_sum(h, out)
        return x + out.sin()


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count: int = ROWS) -> Tensor:
    tokens = torch.arange(count)
    torch._dynamo.maybe_mark_dynamic(tokens, 0)
    return tokens


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """(report, html, markdown, output inside, output before) of a toy that was compiled before."""
    compiled = compile_whole(Toy().eval().forward, "inductor")
    folder = tmp_path_factory.mktemp("report")
    with torch.no_grad():
        before = compiled(tokens())
        with report(folder, "A toy") as result:
            inside = compiled(tokens())
        with torch.compiler.set_stance("fail_on_recompile"):  # what was compiled before still serves
            compiled(tokens())
    page = result.page.read_text()
    return result, page, (folder / "index.md").read_text(), inside, before


def test_runs_as_before(seen):
    result, _, _, inside, before = seen
    assert torch.equal(inside, before)
    assert result.notes == [] and result.breaks == {}


def test_pieces_cuts_and_launches_of_each_layer(seen):
    (graph,) = seen[0].graphs
    assert graph.sequence() == [(0, ""), (1, CUT), (2, ""), (3, CUT), (4, "")]
    assert [layer.name for layer in graph.layers] == [BEFORE, "layers.0", "layers.1", AFTER]
    counts = [(layer.count(KERNEL), layer.count(EXTERN), layer.count(OP), layer.cuts) for layer in graph.layers]
    # embedding and norm are one kernel, relu is one, and the sum after the last op is in the head's
    assert counts == [(0, 0, 0, 0), (2, 1, 0, 1), (2, 1, 0, 1), (1, 1, 0, 0)]
    library = [
        p.module for layer in graph.layers for part in layer.parts for p in part.launches if p.launch.kind == EXTERN
    ]
    assert library == ["up", "up", "head"]


def test_inputs_symbols_and_guards(seen):
    (graph,) = seen[0].graphs
    ((name, shape),) = [(each.name, each.shape) for each in graph.inputs]
    (symbol,) = graph.symbols
    assert shape == f"[{symbol}]" and graph.symbols[symbol].startswith(f"{ROWS} when traced")
    assert graph.title.endswith(f"[{symbol}]") and "[0]" in name
    assert len(graph.weights) == 11
    assert graph.guards.kinds["TENSOR_MATCH"] == 12
    (line,) = [line for line in graph.guards.telling if line.startswith("TENSOR_MATCH")]  # the weights' are left out
    assert line == f"TENSOR_MATCH: {name} int64 size=[None], stride=[1]"


def test_cut_gives_its_reason(seen):
    _, page, markdown, _, _ = seen
    assert "Tagged cudagraph_unsafe" in page
    assert "Sums down the rows, <code>x</code> staying as it is." in page
    assert "Sums down the rows, `x` staying as it is." in markdown


def test_pages_hold_every_kernel_once_and_load_nothing(seen):
    result, page, markdown, _, _ = seen
    (graph,) = result.graphs
    assert len(graph.code.kernels) == 4  # relu's serves both layers
    plain = (
        page.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&")
        .replace("&quot;", '"')
        .replace("&#x27;", "'")
    )
    for source in graph.code.kernels.values():
        assert plain.count(source) == markdown.count(source) == 1
    assert not re.search(r"<(script|img|link|iframe)|src=|@import|url\(|href=\"(https?:)?//", page)
    for target in re.findall(r'href="([^"#]+)"', page):
        assert (result.folder / target).is_file(), target
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


def test_bytecode_is_decompiled(seen):
    pytest.importorskip("depyf")
    (path,) = seen[0].bytecode
    assert "def transformed_" in path.read_text()


def small(x):
    return (x.sin() + 1).cos()


def compiled_small():
    compiled = compile_whole(small, "inductor")
    compiled(torch.ones(3))
    return compiled


def test_depyf_that_fails_is_a_line(tmp_path, monkeypatch):
    utils = pytest.importorskip("depyf.explain.utils")

    def fail(self):
        raise KeyError("an opcode")

    monkeypatch.setattr(utils.DynamoOptimizationResult, "to_src", fail)
    compiled = compiled_small()
    with report(tmp_path) as result:
        compiled(torch.ones(3))
    assert [graph.count(KERNEL) for graph in result.graphs] == [1]
    (note,) = result.notes
    assert "depyf could not decompile" in note and "an opcode" in result.page.read_text()


def test_without_depyf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "depyf.explain.utils", None)
    notes: list[str] = []
    assert report_depyf.decompile_into(tmp_path, [(small.__code__, {})], notes) == []
    assert "depyf cannot be imported" in notes[0]


def test_what_cannot_be_read_does_not_end_the_run(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("not this torch")

    for name in ("frame_in_compilation", "read_output_code", "lay_out", "guards_text"):
        monkeypatch.setattr(report_record, name, fail)
    compiled = compiled_small()
    with report(tmp_path) as result:
        assert torch.equal(compiled(torch.ones(3)), compiled_small()(torch.ones(3)))
    assert "not this torch" in result.page.read_text()


def test_graph_breaks_are_listed(tmp_path):
    @torch.compile(backend="eager")
    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with report(tmp_path) as result:
        breaks(torch.ones(3))
    assert len(result.graphs) == 2 and sum(result.breaks.values()) == 1
    assert "graph_break" in (tmp_path / "index.md").read_text()


def test_run_that_fails_is_reported_all_the_same(tmp_path):
    compiled = compiled_small()
    with pytest.raises(KeyError, match="of the caller"), report(tmp_path):
        compiled(torch.ones(3))
        raise KeyError("of the caller")
    assert "Graph 1" in (tmp_path / "index.md").read_text()


def test_nothing_compiled(tmp_path):
    (tmp_path / "graph_2.py").write_text("of an earlier report")
    (tmp_path / "mine.txt").write_text("of the user")
    with report(tmp_path) as result:
        small(torch.ones(3))
    assert "Nothing was compiled" in result.page.read_text()
    assert not (tmp_path / "graph_2.py").exists() and (tmp_path / "mine.txt").exists()


def test_folder_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match="nothing can be written there"), report(folder):
            raise AssertionError("ran")


def test_report_inside_a_report_is_refused(tmp_path):
    with report(tmp_path), pytest.raises(ValueError, match="inside another"), report(tmp_path):
        raise AssertionError("ran")


def test_text_is_escaped():
    blocks = [
        Table(("name",), [(Mono("a|b<c>"),)]),
        Folded("a <b>", [Code("````", "text")]),
        Items([Link("x & y", 'q"r.py')]),
    ]
    page, markdown = to_html("<t>", blocks), to_markdown(blocks)
    assert "<title>&lt;t&gt;</title>" in page and "<code>a|b&lt;c&gt;</code>" in page
    assert "<summary>a &lt;b&gt;</summary>" in page and 'href="q&quot;r.py"' in page
    assert "| `a\\|b<c>` |" in markdown and "`````text\n````\n`````" in markdown

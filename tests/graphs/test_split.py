"""Where graphs are cut, and that the parts compute what the whole did."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from compiled_dsa.graphs.split import CUT, PIECE, split_graph, split_op_of
from tests.graphs.programs import append, prefix_sum, program


def split_and_run(function, *args):
    """(what the parts of ``function`` return, the split graph); token counts are dynamic."""
    graphs = []

    def backend(graph_module, inputs):
        before = str(graph_module.graph)
        graphs.append(split_graph(graph_module))
        assert str(graph_module.graph) == before
        return graphs[-1].forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(*args)
    (graph,) = graphs
    return result, graph


def names(graph: fx.GraphModule) -> list[str]:
    return [name for name, _ in graph.named_children()]


def x_and_buffer(rows: int = 5):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 4, dtype=torch.float64, generator=generator) for _ in range(2)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("ppm", ["piece_0"]),
        ("c", ["cut_0"]),
        ("cc", ["cut_0", "cut_1"]),
        ("cp", ["cut_0", "piece_1"]),
        ("pc", ["piece_0", "cut_1"]),
        ("ppcpp", ["piece_0", "cut_1", "piece_2"]),
        ("cpcmc", ["cut_0", "piece_1", "cut_2", "piece_3", "cut_4"]),
        ("cnc", ["cut_0", "cut_1", "cut_2"]),  # the size between two ops is no piece
        ("wcw", ["cut_0", "cut_1", "cut_2"]),  # nor are views
        ("tcvct", ["piece_0", "cut_1", "piece_2", "cut_3", "piece_4"]),
    ],
)
def test_positions(steps, expected):
    result, graph = split_and_run(program(steps), *x_and_buffer())
    assert names(graph) == expected
    for got, want in zip(result, program(steps)(*x_and_buffer())):
        assert torch.equal(got, want)


@pytest.mark.parametrize("call", [prefix_sum, torch.ops.toy.prefix_sum, torch.ops.toy.prefix_sum.default])
def test_every_way_to_call_a_split_op(call):
    def function(x, out):
        call(x + 1, out)
        return out * 2

    _, graph = split_and_run(function, *x_and_buffer())
    assert names(graph) == ["piece_0", "cut_1", "piece_2"]
    assert [op for op in map(split_op_of, graph.cut_1.graph.nodes) if op] == [torch.ops.toy.prefix_sum.default]


@settings(max_examples=12, deadline=None)
@given(st.text("pmvcwnstga", min_size=1, max_size=14))
def test_any_sequence(steps):
    result, graph = split_and_run(program(steps), *x_and_buffer())
    for got, want in zip(result, program(steps)(*x_and_buffer())):
        assert torch.equal(got, want)
    parts = names(graph)
    assert len([name for name in parts if name.startswith(CUT)]) == sum(step in "cwn" for step in steps)
    assert not [pair for pair in zip(parts, parts[1:]) if all(name.startswith(PIECE) for name in pair)]
    for name, part in graph.named_children():
        inputs = [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")]
        assert not [value for value in inputs if not isinstance(value, (torch.Tensor, torch.SymInt))]
        memory = [value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)]
        assert len(set(memory)) == len(memory)
        if name.startswith(PIECE):
            made = [n.meta.get("example_value") for n in part.graph.nodes if n.op in ("call_function", "call_method")]
            assert [value for value in made if isinstance(value, torch.Tensor)]


def test_modes_over_more_than_ten_parts():
    def function(x, buffer):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for _ in range(6):
                prefix_sum(x, buffer)
                x = x * 0.5 + buffer
        return x, buffer

    result, graph = split_and_run(function, *x_and_buffer())
    assert len(names(graph)) == 12
    assert torch.equal(result[0], function(*x_and_buffer())[0])
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_a_pool_that_an_op_writes_is_read_after_it():
    def function(pool, x):
        append(pool[1], x * 2, torch.arange(x.shape[0]) + 1)
        pool[1].add_(1)
        append(pool[1], pool[1, 1:3] * 3, torch.arange(2))
        return pool.sum(-1)

    pools = [torch.zeros(2, 8, 4) for _ in range(2)]
    result, _ = split_and_run(function, pools[0], torch.ones(5, 4))
    assert torch.equal(result, function(pools[1], torch.ones(5, 4)))
    assert torch.equal(*pools)


def test_attributes_of_the_graph_reach_every_part():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 2, 3, 4]))

        def forward(self, x, out):
            torch.ops.toy.prefix_sum.default(x * self.scale, out)
            return out + self.scale

    layer, x = Layer(), torch.ones(3, 4)
    graph = split_graph(fx.symbolic_trace(layer))
    assert names(graph) == ["piece_0", "cut_1", "piece_2"]
    assert torch.equal(graph(x, torch.zeros(3, 4)), layer(x, torch.zeros(3, 4)))

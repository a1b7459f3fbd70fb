"""Pieces compiled one by one compute what eager code does, for every number of tokens, after one compile."""

import pytest
import torch

from compiled_dsa.graphs.compile_stats import CompileStats, counting_backend
from compiled_dsa.graphs.piecewise import Pieces, piecewise_backend
from tests.graphs.programs import append, prefix_sum, program
from tests.modules.layers import Serving, our_layer, stock_layer

MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def compiled(function, backend, **options):
    """(the compiled function, pieces, compiles of the whole graph)."""
    pieces, stats = Pieces(), CompileStats()
    whole = counting_backend(stats, piecewise_backend(backend, pieces))
    return torch.compile(function, backend=whole, fullgraph=True, **options), pieces, stats


def inputs(rows: int, device: str = "cpu"):
    generator = torch.Generator().manual_seed(rows)
    tensors = [torch.randn(rows, 4, generator=generator).to(device) for _ in range(2)]
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_compile_serves_all_token_counts(backend, mode, fresh_dynamo):
    function = program("pmcstgvcwpnvam")
    run, pieces, stats = compiled(function, backend)
    with mode():
        for rows in (16, 7, 33):
            for got, want in zip(run(*inputs(rows)), function(*inputs(rows))):
                torch.testing.assert_close(got, want)
    assert (pieces.pieces, pieces.cuts) == (4, ["toy::prefix_sum"] * 4)
    assert stats.compiles == 1


def test_inductor(fresh_dynamo):
    """Mutations across cuts, views of a pool as arguments, and a dynamic size inside a piece."""

    def function(x, pool):
        out = torch.zeros_like(x)
        left = out[:, :2]
        prefix_sum(x * 2, out, 3)
        left.sub_(1)
        pool.mul_(0.5)
        append(pool, out + x.shape[0], torch.arange(x.shape[0], device=x.device) + 1)
        pool[0].add_(1)
        return torch.where(out > 0, out, x), pool[: x.shape[0]].sum()

    run, pieces, stats = compiled(function, "inductor")
    mine, theirs = torch.ones(64, 4), torch.ones(64, 4)
    with torch.no_grad():
        for rows in (16, 7, 33):
            x = inputs(rows)[0]
            for got, want in zip(run(x, mine), function(x, theirs)):
                torch.testing.assert_close(got, want)
            torch.testing.assert_close(mine, theirs)
    assert (pieces.pieces, pieces.cuts) == (3, ["toy::prefix_sum", "toy::append"])
    assert stats.compiles == 1


def test_the_pieces_of_a_callable_backend_are_graphs_that_return_tuples(fresh_dynamo):
    seen = []

    def backend(graph_module, example_inputs):
        seen.append([type(value) for value in example_inputs])
        assert isinstance(graph_module.graph.output_node().args[0], tuple)
        return graph_module.forward

    run, pieces, _ = compiled(program("pcp"), backend)
    run(*inputs(5))
    assert pieces.pieces == len(seen) == 2
    assert all(torch.SymInt in types for types in seen)


def test_a_graph_without_split_ops_is_one_piece(fresh_dynamo):
    run, pieces, _ = compiled(program("pp"), "eager")
    assert torch.equal(run(*inputs(5))[0], program("pp")(*inputs(5))[0])
    assert pieces == Pieces(1, [])


def test_a_recompile_adds_to_what_was_cut(fresh_dynamo):
    run, pieces, stats = compiled(program("pc"), "eager", dynamic=False)
    run(*[torch.ones(3, 4)] * 2)
    run(*[torch.ones(4, 4)] * 2)
    assert (stats.compiles, pieces) == (2, Pieces(2, ["toy::prefix_sum"] * 2))


def serving_layer():
    stock = stock_layer("deepseek_v32", torch.float32)
    x = [torch.randn(40, 64, generator=torch.Generator().manual_seed(1))]
    return Serving.of([our_layer(stock)], x, poison=False)


def test_a_layer_of_ours_is_cut_at_its_two_prefill_ops(fresh_dynamo):
    mine, theirs = serving_layer(), serving_layer()
    run, pieces, stats = compiled(mine.layers[0], "aot_eager")
    with torch.no_grad():
        for new in (20, 9, 11):
            x, cos, sin, batch = mine.inputs([new])
            for tensor in (x, cos, sin, batch.positions, batch.slots, batch.req_of_row, batch.visible):
                torch._dynamo.mark_dynamic(tensor, 0)
            out, topk = run(x, cos, sin, batch, mine.pool.layers[0])
            torch.testing.assert_close(out, theirs.step([new])[0])
    assert pieces.cuts == ["compiled_dsa::index_topk_prefill", "compiled_dsa::mla_prefill"]
    assert (pieces.pieces, stats.compiles) == (3, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_on_a_gpu(mode, fresh_dynamo):
    function = program("pmcstgvcwpnvam")
    run, pieces, stats = compiled(function, "inductor")
    with mode():
        for rows in (16, 7, 33):
            for got, want in zip(run(*inputs(rows, "cuda")), function(*inputs(rows, "cuda"))):
                torch.testing.assert_close(got, want)
    assert (pieces.pieces, stats.compiles) == (4, 1)

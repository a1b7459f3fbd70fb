"""Captured calls replay what the callable does: on states that advance, in buckets, whole and broken at split ops."""

import gc
import weakref

import pytest
import torch

from compiled_dsa.graphs.buffers import CaptureError, UnsupportedCallError
from compiled_dsa.graphs.runner import GraphRunner, Step
from tests.graphs.toys import SEEN, Counter, append_and_sum, running_sum, scale_rows_in_place, two_layers

pytestmark = pytest.mark.gpu
WHOLE_AND_CUT = pytest.mark.parametrize("cut", [False, True], ids=["full", "breakable"])


def litter() -> None:
    """Memory that was free is used for something else, and garbage is collected."""
    junk = [torch.empty(size, device="cuda").fill_(torch.nan) for size in (256, 1 << 18, 1 << 22)]
    del junk
    gc.collect()


def row_step(x: torch.Tensor, weight: torch.Tensor, bucket: int) -> Step:
    """``two_layers`` of the rows of x, padded to ``bucket`` rows."""
    rows = x.shape[0]
    idle = (torch.zeros(bucket, 4, device="cuda"), weight), {}
    return Step((x, weight), {}, bucket, lambda: idle, rows, bucket, lambda out: out[:rows])


# ---- states ----------------------------------------------------------------------------------------------------------


@WHOLE_AND_CUT
def test_replays_equal_uncaptured_calls_bitwise_and_are_counted(cut):
    runner, captured_state, plain_state = GraphRunner(append_and_sum, cut=cut), Counter(), Counter()
    for step in range(50):
        captured_state.facts = plain_state.facts = "scaled" if step % 3 else "plain"
        x = torch.randn(1, 4, device="cuda")
        got = runner(Step((x, captured_state), {"scale": 2.0}))
        assert got["state"] is captured_state
        assert torch.equal(got["sum"], append_and_sum(x, plain_state, scale=2.0)["sum"])
        litter()
    assert torch.equal(captured_state.rows, plain_state.rows) and int(captured_state.length) == 50
    assert (runner.stats.captured, runner.stats.replayed, runner.stats.dropped) == (2, 50, 0)
    assert captured_state.facts is None


def test_outputs_stay_when_the_next_replay_comes():
    runner, state = GraphRunner(append_and_sum, cut=False), Counter()
    first = runner(Step((torch.ones(1, 4, device="cuda"), state), {}))["sum"]
    runner(Step((torch.ones(1, 4, device="cuda"), state), {}))
    assert first.tolist() == [1, 1, 1, 1]


def test_a_graph_does_not_keep_its_state_and_goes_with_it():
    runner, state = GraphRunner(append_and_sum, cut=True), Counter()
    runner(Step((torch.ones(1, 4, device="cuda"), state), {}))
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None
    assert runner.stats.dropped == 1


def test_the_call_unused_longest_is_dropped_first():
    runner, states = GraphRunner(append_and_sum, cut=False, max_calls=2), [Counter() for _ in range(3)]
    for state in (*states, states[2], states[0]):
        runner(Step((torch.ones(1, 4, device="cuda"), state), {}))
    assert (runner.stats.captured, runner.stats.dropped) == (4, 2)
    assert [int(s.length) for s in states] == [2, 1, 2]


def test_a_second_state_of_the_same_kind_needs_no_warm_up():
    calls = []

    def counted(x, state):
        calls.append(1)
        return append_and_sum(x, state)

    runner = GraphRunner(counted, cut=False)
    for _ in range(2):
        state = Counter()
        assert runner(Step((torch.ones(1, 4, device="cuda"), state), {}))["sum"].tolist() == [1, 1, 1, 1]
    assert len(calls) == 3 + 1


# ---- split ops -------------------------------------------------------------------------------------------------------


def test_segments_and_breaks_of_two_layers():
    weight = torch.randn(4, 4, device="cuda")
    whole, cut = GraphRunner(two_layers, cut=False), GraphRunner(two_layers, cut=True)
    for _ in range(3):
        x = torch.randn(8, 4, device="cuda")
        assert torch.equal(cut(row_step(x, weight, 8)), two_layers(x, weight))
        assert torch.equal(whole(row_step(x, weight, 8)), two_layers(x, weight))
        litter()
    assert (cut.stats.captured, cut.stats.segments, cut.stats.breaks) == (1, 3, 2)
    assert (cut.stats.replayed, cut.stats.replayed_segments, cut.stats.replayed_breaks) == (3, 9, 6)
    assert (whole.stats.captured, whole.stats.segments, whole.stats.breaks) == (1, 1, 0)


def test_through_inductors_code():
    compiled = torch.compile(two_layers, fullgraph=True)
    weight, runner = torch.randn(4, 4, device="cuda"), GraphRunner(compiled, cut=True)
    for rows in (8, 3, 1, 8):
        step = row_step(torch.randn(rows, 4, device="cuda"), weight, 8)
        assert torch.equal(runner(step), runner.rerun(step))
    assert (runner.stats.captured, runner.stats.segments, runner.stats.breaks) == (1, 3, 2)


def test_split_ops_see_the_real_rows_and_padding_rows_are_defined():
    weight, runner = torch.randn(4, 4, device="cuda"), GraphRunner(two_layers, cut=True)
    runner(row_step(torch.full((5, 4), torch.nan, device="cuda"), weight, 5))  # memory of the pool is now NaN
    SEEN.clear()
    x = torch.randn(3, 4, device="cuda")
    got = runner(row_step(x, weight, 5))
    assert SEEN == [3, 3]
    torch.testing.assert_close(got, two_layers(x, weight))

    def largest(x, weight):
        return two_layers(x, weight).abs().amax().expand(x.shape[0], 1)

    amax = GraphRunner(largest, cut=True)
    amax(row_step(torch.full((5, 4), torch.nan, device="cuda"), weight, 5))
    assert amax(row_step(x, weight, 5)).isfinite().all()  # no NaN of a padding row is reached


def test_buckets_share_a_pool_and_each_replays_its_own():
    weight, runner = torch.randn(4, 4, device="cuda"), GraphRunner(two_layers, cut=True)
    for bucket in (64, 32, 16):
        runner(row_step(torch.randn(bucket, 4, device="cuda"), weight, bucket))
    litter()
    for bucket in (64, 16, 32, 64):
        for rows in (bucket, bucket // 2 + 1):
            x = torch.randn(rows, 4, device="cuda")
            torch.testing.assert_close(runner(row_step(x, weight, bucket)), two_layers(x, weight))
    assert (runner.stats.captured, runner.stats.replayed) == (3, 11)


def test_the_pool_of_many_buckets_is_little_more_than_that_of_the_largest():
    weight = torch.randn(4, 4, device="cuda")
    # together 3.4 times the largest
    sizes = [size << 10 for size in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)]
    pools = []
    for held in (sizes[-1:], sizes):
        runner = GraphRunner(two_layers, cut=True)
        for bucket in reversed(held):
            runner(row_step(torch.randn(bucket, 4, device="cuda"), weight, bucket))
        pools.append(runner.memory.bytes())
    assert 0 < pools[1] < 2 * pools[0]


@WHOLE_AND_CUT
def test_graphs_hold_the_workspaces_of_their_matrix_products(cut):
    weight, runner = torch.randn(512, 512, device="cuda"), GraphRunner(torch.mm, cut=cut)
    x = torch.randn(512, 512, device="cuda")
    before = runner(Step((x, weight), {}))
    torch._C._cuda_clearCublasWorkspaces()  # as mode="reduce-overhead" does between its own graphs
    torch.cuda.empty_cache()
    litter()
    assert torch.equal(runner(Step((x, weight), {})), before)


def test_a_split_op_without_rows_that_mutates_what_others_use():
    def function(x):
        y = x + 1
        scale_rows_in_place(y, 3.0)
        scale_rows_in_place(y, 0.5)  # adjacent: no segment between
        return y - x

    runner = GraphRunner(function, cut=True)
    x = torch.randn(6, 4, device="cuda")
    assert torch.equal(runner(Step((x,), {})), function(x))
    assert (runner.stats.segments, runner.stats.breaks) == (2, 2)


# ---- what cannot be captured -----------------------------------------------------------------------------------------


@WHOLE_AND_CUT
def test_a_call_that_cannot_be_captured_leaves_the_state_as_it_was(cut):
    def synchronising(x, state):
        append_and_sum(x, state)
        return x.sum().item() if torch.cuda.is_current_stream_capturing() else 0.0

    runner, state = GraphRunner(synchronising, cut=cut), Counter()
    state.facts = "plain"
    with pytest.raises(CaptureError):
        runner(Step((torch.ones(1, 4, device="cuda"), state), {}))
    assert int(state.length) == 0 and state.facts == "plain"
    assert torch.isfinite(torch.randn(4, device="cuda")).all()  # the generator is not left in capture mode
    assert (runner.stats.captured, runner.stats.replayed) == (0, 0)


def test_a_split_op_on_a_side_stream_is_refused_by_name():
    side = torch.cuda.Stream()

    def function(x):
        out = torch.empty_like(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            running_sum(x, out)
        torch.cuda.current_stream().wait_stream(side)
        return out

    with pytest.raises(CaptureError, match="running_sum.*side stream"):
        GraphRunner(function, cut=True)(Step((torch.ones(2, 4, device="cuda"),), {}))


def test_a_side_stream_joined_before_a_break_is_part_of_the_segment_and_one_left_open_an_error():
    side = torch.cuda.Stream()

    def function(x, joined: bool):
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.add_(1)
        if joined:
            torch.cuda.current_stream().wait_stream(side)
        out = torch.empty_like(y)
        running_sum(y, out)
        return out * 3

    x = torch.randn(5, 4, device="cuda")
    torch.testing.assert_close(GraphRunner(function, cut=True)(Step((x, True), {})), (x * 2 + 1).cumsum(0) * 3)
    with pytest.raises(CaptureError):
        GraphRunner(function, cut=True)(Step((x, False), {}))
    torch.testing.assert_close(GraphRunner(function, cut=True)(Step((x, True), {})), (x * 2 + 1).cumsum(0) * 3)


def test_an_output_that_no_graph_can_hold_is_refused():
    with pytest.raises(CaptureError, match="an output is a set"):
        GraphRunner(lambda x: {1, 2}, cut=False)(Step((torch.ones(1, device="cuda"),), {}))


def test_tensors_on_the_cpu_are_refused():
    runner, x = GraphRunner(lambda x, scale: x * scale, cut=False), torch.ones(2, device="cuda")
    with pytest.raises(UnsupportedCallError, match="tensors on a GPU"):
        runner(Step((x, torch.tensor(0.7)), {}))
    with pytest.raises(UnsupportedCallError, match="output"):
        GraphRunner(lambda x: torch.ones(2), cut=False)(Step((x,), {}))


def test_autocast_is_part_of_the_kind_of_a_call():
    runner, x = GraphRunner(lambda x: x @ x, cut=False), torch.randn(8, 8, device="cuda")
    assert runner(Step((x,), {})).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert runner(Step((x,), {})).dtype == torch.bfloat16
    assert runner.stats.captured == 2


def test_an_input_that_does_not_fit_is_refused_by_name():
    weight, runner = torch.randn(4, 4, device="cuda"), GraphRunner(two_layers, cut=True)
    runner(row_step(torch.randn(4, 4, device="cuda"), weight, 4))
    with pytest.raises(ValueError, match=r"\[0\]\[0\].*\(5, 4\).*\(4, 4\)"):
        runner(row_step(torch.randn(5, 4, device="cuda"), weight, 4))

"""Full graphs replay what the compiled callable does, on states that advance in place."""

import gc
import weakref

import pytest
import torch

from compiled_dsa.graphs.buffers import CaptureError
from compiled_dsa.graphs.full import FullGraphs

pytestmark = pytest.mark.gpu


class Counter:
    """A toy state: every call appends its input at ``length`` and advances by one."""

    def __init__(self, room: int = 64):
        self.length = torch.zeros((), dtype=torch.int64, device="cuda")
        self.rows = torch.zeros(room, 4, device="cuda")
        self.facts = None

    def advanced_tensors(self):
        return [self.length]

    def trace_facts(self):
        return self.facts

    def set_trace_facts(self, facts):
        self.facts = facts


def append_and_sum(x: torch.Tensor, state: Counter, *, scale: float = 1.0):
    state.rows.index_copy_(0, state.length.unsqueeze(0), x * scale if state.facts == "scaled" else x)
    state.length.add_(1)
    state.set_trace_facts(None)
    return {"sum": state.rows.sum(0), "state": state}


def test_replays_equal_uncaptured_calls_bitwise_and_are_counted():
    graphs, captured_state, plain_state = FullGraphs(append_and_sum), Counter(), Counter()
    results = []
    for step in range(50):
        facts = "scaled" if step % 3 else "plain"
        x = torch.randn(1, 4, device="cuda")
        captured_state.facts = plain_state.facts = facts
        results.append((graphs(captured_state, (x, captured_state), {"scale": 2.0})["sum"], x))
        expected = append_and_sum(x, plain_state, scale=2.0)["sum"]
        assert torch.equal(results[-1][0], expected)
        junk = [torch.empty(1 << 18, device="cuda").fill_(torch.nan) for _ in range(4)]
        del junk
        gc.collect()
    assert torch.equal(captured_state.rows, plain_state.rows) and int(captured_state.length) == 50
    assert (graphs.stats.captured, graphs.stats.replayed, graphs.stats.dropped) == (2, 50, 0)
    assert captured_state.facts is None


def test_outputs_stay_when_the_next_replay_comes():
    graphs, state = FullGraphs(append_and_sum), Counter()
    first = graphs(state, (torch.ones(1, 4, device="cuda"), state), {})["sum"]
    graphs(state, (torch.ones(1, 4, device="cuda"), state), {})
    assert first.tolist() == [1, 1, 1, 1]


def test_a_graph_does_not_keep_its_state_and_goes_with_it():
    graphs, state = FullGraphs(append_and_sum), Counter()
    graphs(state, (torch.ones(1, 4, device="cuda"), state), {})
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None
    assert graphs.stats.dropped == 1


def test_the_graph_unused_longest_is_dropped_first():
    graphs, states = FullGraphs(append_and_sum, max_graphs=2), [Counter() for _ in range(3)]
    for state in (*states, states[2], states[0]):
        graphs(state, (torch.ones(1, 4, device="cuda"), state), {})
    assert (graphs.stats.captured, graphs.stats.dropped) == (4, 2)
    assert [int(s.length) for s in states] == [2, 1, 2]


def test_a_call_that_cannot_be_captured_leaves_the_state_as_it_was():
    def synchronising(x, state):
        append_and_sum(x, state)
        return x.sum().item() if torch.cuda.is_current_stream_capturing() else 0.0

    graphs, state = FullGraphs(synchronising), Counter()
    state.facts = "plain"
    with pytest.raises(CaptureError):
        graphs(state, (torch.ones(1, 4, device="cuda"), state), {})
    assert int(state.length) == 0 and state.facts == "plain"
    assert torch.isfinite(torch.randn(4, device="cuda")).all()  # the generator is not left in capture mode
    assert (graphs.stats.captured, graphs.stats.replayed) == (0, 0)

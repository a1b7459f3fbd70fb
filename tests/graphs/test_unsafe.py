"""Ops that carry torch's tag and nothing else: compiled code runs them, and refuses to be captured."""

import pytest
import torch
from torch import Tensor

from compiled_dsa.compile import CompiledForward
from compiled_dsa.custom_ops.capture import UNCUT, BreakCall, capturing
from compiled_dsa.graphs.buffers import CaptureError
from compiled_dsa.graphs.runner import GraphRunner, Step
from compiled_dsa.graphs.unsafe import unsafe_ops
from tests.graphs.programs import prefix_sum

UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("toy::tagged_sum", mutates_args=["out"], tags=UNSAFE)
def tagged_sum(x: Tensor, out: Tensor) -> None:
    out.copy_(x.cumsum(0))


@torch.library.custom_op("toy::tagged_copy", mutates_args=[], tags=UNSAFE)
def tagged_copy(x: Tensor) -> Tensor:
    return x.clone()


tagged_sum.register_fake(lambda x, out: None)
tagged_copy.register_fake(torch.empty_like)


def with_tagged_op(x: Tensor) -> Tensor:
    y = x + 1
    out = torch.empty_like(y)
    tagged_sum(y, out)
    return out * 2


def with_both(x: Tensor) -> Tensor:
    y = tagged_copy(x + 1)
    out = torch.empty_like(y)
    prefix_sum(y, out)
    return out * 2


def with_split_op(x: Tensor) -> Tensor:
    y = x + 1
    out = torch.empty_like(y)
    prefix_sum(y, out)
    return out * 2


def nested(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(with_tagged_op, x, use_reentrant=False)


class Recorder:
    """Runs split ops at once and notes their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def split(self, call: BreakCall) -> None:
        self.names.append(call.name)
        call.function(*call.args)


RUNTIMES = pytest.mark.parametrize("piecewise", [False, True], ids=["breakable", "piecewise"])


@RUNTIMES
@pytest.mark.parametrize(
    ("function", "op"),
    [(with_tagged_op, "toy::tagged_sum"), (with_both, "toy::tagged_copy"), (nested, "toy::tagged_sum")],
)
def test_a_capture_is_refused_by_the_name_of_the_op(function, op, piecewise, fresh_dynamo):
    compiled, x, recorder = CompiledForward(function, "aot_eager", piecewise=piecewise), torch.ones(4, 2), Recorder()
    for _ in range(2):
        assert torch.equal(compiled(x), function(x))
        for capture in (recorder, UNCUT):
            with pytest.raises(CaptureError, match=f"^{op}: tagged cudagraph_unsafe.*split_op"), capturing(capture):
                compiled(x)
    assert recorder.names == [] and compiled.stats.compiles == 1


@RUNTIMES
def test_split_ops_are_not(piecewise, fresh_dynamo):
    compiled, x, recorder = CompiledForward(with_split_op, "aot_eager", piecewise=piecewise), torch.ones(4), Recorder()
    with capturing(recorder):
        out = compiled(x)
    assert torch.equal(out, with_split_op(x))
    assert recorder.names == ["toy::prefix_sum"]


def test_a_capture_by_somebody_else_is_refused_too(monkeypatch, fresh_dynamo):
    compiled, x = CompiledForward(with_tagged_op, "aot_eager"), torch.ones(4)
    compiled(x)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="toy::tagged_sum"):
        compiled(x)


def test_ops_of_a_graph_are_named_once(fresh_dynamo):
    seen = []

    def backend(graph_module, inputs):
        seen.append(unsafe_ops(graph_module))
        return graph_module.forward

    function = torch.compile(lambda x: with_tagged_op(with_both(with_tagged_op(x))), backend=backend, fullgraph=True)
    function(torch.ones(4))
    assert seen == [["toy::tagged_copy", "toy::tagged_sum"]]


@pytest.mark.gpu
@pytest.mark.parametrize("piecewise", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_a_runner_raises(cut, piecewise, fresh_dynamo):
    runner = GraphRunner(CompiledForward(with_tagged_op, "eager", piecewise=piecewise), cut=cut)
    with pytest.raises(CaptureError, match="toy::tagged_sum"):
        runner(Step((torch.ones(4, device="cuda"),), {}))
    assert runner.stats.captured == 0

"""Split ops: how they are registered, and what they do while something is being captured."""

import pytest
import torch
from torch import Tensor

from compiled_dsa.cli.overview import sample_arguments
from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.capture import UNCUT, BreakCall, capturing, split_op
from compiled_dsa.graphs.torch_compat import release_generator


@split_op("test_capture::blend", mutates_args=["out"], rows={"x": None, "bias": None, "out": 0.5})
def blend(x: Tensor, out: Tensor, factor: float = 2.0, bias: Tensor | None = None) -> None:
    out.copy_(x * factor if bias is None else x * factor + bias)


def test_split_ops_carry_the_tag():
    assert torch.Tag.cudagraph_unsafe in torch.ops.test_capture.blend.default.tags
    for op in OPS.values():
        assert (torch.Tag.cudagraph_unsafe in op.overload.tags) == op.split


def test_a_split_op_keeps_what_torch_asks_of_ops():
    torch.library.opcheck(torch.ops.test_capture.blend.default, (torch.ones(3), torch.zeros(3)))


def test_a_split_op_in_compiled_code(fresh_dynamo):
    def function(x):
        out = torch.empty_like(x)
        blend(x + 1, out, bias=x)
        return out * 3

    x = torch.arange(4.0)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), function(x)) and torch.equal(function(x), 3 * (3 * x + 2))


def returning(x: Tensor) -> Tensor:
    return x.clone()


def keyword_only(x: Tensor, *, factor: float) -> None:
    x.mul_(factor)


def in_place(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (returning, {}, r"test_capture::refused returns something"),
        (keyword_only, {}, r"test_capture::refused takes \['factor'\] by keyword only"),
        (in_place, {"rows": {"y": 0, "z": 0}}, r"rows names \['y', 'z'\]; test_capture::refused has .*\['x'\]"),
    ],
)
def test_what_cannot_be_a_split_op(function, options, message):
    mutates = [] if function is returning else ["x"]
    with pytest.raises(ValueError, match=message):
        split_op("test_capture::refused", mutates_args=mutates, **options)(function)
    assert not hasattr(torch.ops.test_capture, "refused")


def test_one_capture_a_thread():
    with pytest.raises(ZeroDivisionError), capturing(UNCUT):
        raise ZeroDivisionError
    with capturing(UNCUT):
        with pytest.raises(RuntimeError, match="inside another capture"), capturing(UNCUT):
            pass
        with pytest.raises(RuntimeError, match="inside another capture"), capturing(UNCUT):
            pass


class Recorder:
    def __init__(self):
        self.calls: list[BreakCall] = []

    def split(self, call: BreakCall) -> None:
        self.calls.append(call)


@pytest.fixture
def stream_captures(monkeypatch):
    """What a split op asks is answered as during a capture of the current stream."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_outside_of_a_capture_the_op_runs():
    out = torch.zeros(2)
    blend(torch.ones(2), out)
    assert out.tolist() == [2, 2]


def test_an_uncut_capture_runs_the_op(stream_captures):
    out = torch.zeros(2)
    with capturing(UNCUT):
        blend(torch.ones(2), out)
    assert out.tolist() == [2, 2]


def test_any_other_capture_is_refused(stream_captures):
    with pytest.raises(RuntimeError, match="test_capture::blend splits graphs"):
        blend(torch.ones(2), torch.zeros(2))


def test_a_recorder_is_handed_all_arguments(stream_captures):
    x, out, recorder = torch.ones(3), torch.zeros(3), Recorder()
    with capturing(recorder):
        blend(x, out)
        blend(x, out, 3.0, x)
    (short, long), rows = recorder.calls, {0: None, 3: None, 1: 0.5}
    assert out.tolist() == [0, 0, 0]
    assert short == BreakCall("test_capture::blend", short.function, (x, out, 2.0, None), rows)
    assert long.args[2:] == (3.0, x)
    long.function(*long.args)
    assert out.tolist() == [4, 4, 4]


@pytest.mark.gpu
def test_captures_on_a_gpu():
    x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    blend(x, out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="test_capture::blend splits graphs"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        blend(x, out)
    release_generator(stream)
    with capturing(UNCUT), torch.cuda.graph(graph, stream=stream):
        blend(x, out)
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [10, 10, 10]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.split])
def test_an_op_of_ours_refuses_a_plain_capture(name):
    args = sample_arguments(name, torch.bfloat16, torch.device("cuda"))
    OPS[name].overload(*args)
    stream = torch.cuda.Stream()
    with (
        pytest.raises(RuntimeError, match=f"{name} splits graphs"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        OPS[name].overload(*args)
    release_generator(stream)

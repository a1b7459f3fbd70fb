"""Runs a compiled callable through captured graphs, one for each kind of call."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiled_dsa.graphs.buffers import (
    Call,
    CaptureError,
    GraphState,
    StaticInputs,
    UnsupportedCallError,
    describe,
    is_state,
)
from compiled_dsa.graphs.capture import record, run_uncaptured
from compiled_dsa.graphs.torch_compat import keep_pool, non_owning, pool_bytes

MAX_CALLS = 128  # captured calls held by default
WARM_UPS = 2  # compiling, and the work of first calls, must lie before the capture


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Step:
    """One call of the callable, and how it is padded.

    Attributes:
        args, kwargs: as the caller gave them.
        bucket: calls of one bucket share a graph; None when only calls of the same sizes do.
        idle: (args, kwargs) of a call that fills the bucket and in which nothing is to be done; None without bucket.
        rows: real rows, which split ops see; None when they are not the first ones.
        padded_rows: rows of the bucket.
        crop: cuts an output tensor of the padded call to what the caller asked for.
    """

    args: tuple
    kwargs: dict[str, Any]
    bucket: Hashable = None
    idle: Callable[[], tuple[tuple, dict[str, Any]]] | None = None
    rows: int | None = None
    padded_rows: int | None = None
    crop: Callable[[Tensor], Tensor] = unchanged


@dataclass
class RunnerStats:
    """Attributes:
    captured: calls captured.
    segments, breaks: graphs and split ops in the captured calls.
    replayed: calls served by a replay.
    replayed_segments, replayed_breaks: graphs launched and split ops run by replays.
    dropped: captured calls given up, because a state is gone or too many were held.
    """

    captured: int = 0
    segments: int = 0
    breaks: int = 0
    replayed: int = 0
    replayed_segments: int = 0
    replayed_breaks: int = 0
    dropped: int = 0


class DeviceMemory:
    """What captures on the current device share.

    cuBLAS keeps a workspace for each stream. It would be outside of the pool if anything but captures ran on their
    stream, and replays would fault once others let go of the workspaces, as torch's mode="reduce-overhead" does.

    Attributes:
        pool: memory of the graphs.
        warm_up_stream, capture_stream: two, see above.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.warm_up_stream, self.capture_stream = torch.cuda.Stream(), torch.cuda.Stream()
        self._keeper = keep_pool(self.pool, self.capture_stream)


class GraphMemory:
    """What runners share: the memory of their graphs on each device."""

    def __init__(self) -> None:
        self._held: dict[torch.device, DeviceMemory] = {}

    def of_current_device(self) -> DeviceMemory:
        device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._held:
            self._held[device] = DeviceMemory()
        return self._held[device]

    def bytes(self) -> int:
        """Device memory that the pools hold."""
        return sum(pool_bytes(held.pool) for held in self._held.values())


class CapturedCall:
    """One kind of call: its static inputs, what replays it, and its outputs. It holds no reference to the states."""

    def __init__(self, function: Callable, step: Step, call: Call, memory: GraphMemory, *, cut: bool, warm: bool):
        self._function, self._cut = function, cut
        self._inputs = StaticInputs(call if step.idle is None else Call(*step.idle(), bucket=step.bucket))
        self._inputs.fill(call)
        args, kwargs = self._inputs.arguments(call)
        held = memory.of_current_device()
        saved = _Saved(call.states)
        try:
            held.warm_up_stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(held.warm_up_stream):
                    for _ in range(0 if warm else WARM_UPS):
                        function(*args, **kwargs)
                        saved.restore()
            finally:  # what a failed warm-up has launched must end before the states are restored
                torch.cuda.current_stream().wait_stream(held.warm_up_stream)
            self.recording, outputs = record(
                function,
                args,
                kwargs,
                pool=held.pool,
                stream=held.capture_stream,
                cut=cut,
                padded_rows=step.padded_rows,
            )
        finally:
            saved.restore()
        leaves, self._spec = pytree.tree_flatten(outputs)
        for leaf in leaves:
            describe(leaf, "an output", sizes=True)
            if isinstance(leaf, Tensor) and not leaf.is_cuda:
                raise UnsupportedCallError("an output is a tensor on the CPU; a replay would not compute it again")
        # Outputs are copied out right after a replay, so the pool may give their memory to the next capture.
        self._outputs = [
            call.states.index(leaf) if is_state(leaf) else non_owning(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        self._is_state = [is_state(leaf) for leaf in leaves]

    def replay(self, step: Step, call: Call) -> Any:
        """The outputs of the call, as copies: the next replay of any graph of the pool overwrites the graph's own."""
        self._inputs.fill(call)
        self.recording.replay(step.rows)
        for state in call.states:
            state.set_trace_facts(None)
        leaves = [
            call.states[leaf] if is_state else step.crop(leaf).clone() if isinstance(leaf, Tensor) else leaf
            for leaf, is_state in zip(self._outputs, self._is_state)
        ]
        return pytree.tree_unflatten(leaves, self._spec)

    def rerun(self, step: Step, call: Call) -> Any:
        """What a replay computes, by the same callable on the same buffers without a graph: for comparisons."""
        self._inputs.fill(call)
        args, kwargs = self._inputs.arguments(call)
        outputs = run_uncaptured(
            self._function, args, kwargs, cut=self._cut, rows=step.rows, padded_rows=step.padded_rows
        )
        return pytree.tree_map_only(Tensor, step.crop, outputs)


class _Saved:
    """States as they were before a warm-up."""

    def __init__(self, states: list[GraphState]):
        self._states = [(s, s.trace_facts(), [t.clone() for t in s.advanced_tensors()]) for s in states]

    def restore(self) -> None:
        for state, facts, values in self._states:
            for tensor, value in zip(state.advanced_tensors(), values):
                tensor.copy_(value)
            state.set_trace_facts(facts)


class GraphRunner:
    """Captures each kind of call once and replays it from then on.

    A captured call reads and writes the tensors of the states that it was captured with, and is dropped with them. What
    else the callable reads (weights) may change in place, but must stay where it was at the capture. Replays share
    buffers and a memory pool: use a runner, and all that share its memory, from one thread and one stream.

    Args:
        function: the compiled callable. A call must not synchronise with the host, outside of split ops, nor run ops
            that only carry torch's tag ``cudagraph_unsafe``: code of ``CompiledForward`` refuses these by name at a
            capture, of another callable they would be captured like any op.
        cut: break calls at split ops ("breakable"); else calls are captured whole ("full").
        memory: pools; runners of one model share them.
        max_calls: captured calls held at most; the one unused longest is dropped first.
    """

    def __init__(self, function: Callable, *, cut: bool, memory: GraphMemory | None = None, max_calls: int = MAX_CALLS):
        self.function, self.cut, self.max_calls = function, cut, max_calls
        self.memory = memory or GraphMemory()
        self.stats = RunnerStats()
        self._calls: OrderedDict[tuple, CapturedCall] = OrderedDict()
        self._states: set[int] = set()
        self._warm: set[tuple] = set()

    def __call__(self, step: Step) -> Any:
        """The result of ``function(*step.args, **step.kwargs)``.

        Raises:
            CaptureError: the call cannot be captured. The states are as they were before.
            ValueError: an input does not fit what was captured.
        """
        call = Call(step.args, step.kwargs, step.bucket)
        with torch.cuda.device(_device(call)):
            captured = self.captured(step, call)
            outputs = captured.replay(step, call)
        self.stats.replayed += 1
        self.stats.replayed_segments += captured.recording.segments
        self.stats.replayed_breaks += captured.recording.breaks
        return outputs

    def rerun(self, step: Step) -> Any:
        """``__call__`` without a graph but on the graph's buffers, to compare with bit for bit."""
        call = Call(step.args, step.kwargs, step.bucket)
        with torch.cuda.device(_device(call)):
            return self.captured(step, call).rerun(step, call)

    def captured(self, step: Step, call: Call) -> CapturedCall:
        """The captured call that serves this one; captures it when there is none."""
        key = (call.key, _modes())
        captured = self._calls.get(key)
        if captured is None:
            captured = self._calls[key] = self._capture(step, call)
            if len(self._calls) > self.max_calls:
                self._calls.popitem(last=False)
                self.stats.dropped += 1
        self._calls.move_to_end(key)
        return captured

    def _capture(self, step: Step, call: Call) -> CapturedCall:
        kind = _kind(call)
        try:
            captured = CapturedCall(self.function, step, call, self.memory, cut=self.cut, warm=kind in self._warm)
        except CaptureError:
            if kind not in self._warm:
                raise
            # something was not as warm as it looked: a callable that compiles again, say
            captured = CapturedCall(self.function, step, call, self.memory, cut=self.cut, warm=False)
        self._warm.add(kind)
        for state in call.states:
            if id(state) not in self._states:
                self._states.add(id(state))
                weakref.finalize(state, _forget, weakref.ref(self), id(state))
        self.stats.captured += 1
        self.stats.segments += captured.recording.segments
        self.stats.breaks += captured.recording.breaks
        return captured

    def forget(self, state_id: int) -> None:
        """Drops the captured calls of a state."""
        self._states.discard(state_id)
        for key in list(self._calls):  # dropping a call may drop the last reference to another state
            (_, described, *_), _ = key
            if ("state", state_id) in described and self._calls.pop(key, None) is not None:
                self.stats.dropped += 1


def _kind(call: Call) -> tuple:
    """What calls share of which one warm-up is enough: the key, but any state of the same signature."""
    structure, described, facts, bucket = call.key
    kinds = tuple(leaf.signature() if is_state(leaf) else d for leaf, d in zip(call.leaves, described))
    return structure, kinds, facts, bucket, _modes()


def _modes() -> tuple:
    """What of the surroundings of a call a trace depends on."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast


def _device(call: Call) -> torch.device:
    """Where the call runs.

    Raises:
        UnsupportedCallError: a tensor on the CPU (a graph would keep the value it had at the capture), or none at all.
    """
    tensors = call.tensors + [tensor for state in call.states for tensor in state.advanced_tensors()]
    if not tensors or not all(tensor.is_cuda for tensor in tensors):
        raise UnsupportedCallError("CUDA graphs take tensors on a GPU, at least one and no other")
    return tensors[0].device


def _forget(runner: "weakref.ref[GraphRunner]", state_id: int) -> None:
    alive = runner()
    if alive is not None:
        alive.forget(state_id)

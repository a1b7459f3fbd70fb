"""Full CUDA graphs: a whole call in one graph, captured once for each kind of call and then replayed."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiled_dsa.graphs.buffers import STATE, Call, CaptureError, StaticInputs, describe
from compiled_dsa.graphs.torch_compat import release_generator

WARM_UPS = 2  # compiling, and the work of first calls, must lie before the capture


class GraphState(Protocol):
    """What an argument offers whose tensors a call advances in place (a cache).

    A warm-up must not advance it, a capture runs nothing on the device, and a replay runs no Python.

    Attributes:
        decode_shaped: the announced call is one for which full graphs are meant (few tokens a row).
    """

    decode_shaped: bool

    def advanced_tensors(self) -> list[Tensor]:
        """The tensors that a call advances (lengths). What a call writes again in the same place need not be here."""

    def trace_facts(self) -> Hashable:
        """What the host knows of the coming call and its trace depends on; None when nothing was announced."""

    def set_trace_facts(self, facts: Any) -> None:
        """Announces the call again after a warm-up; None once a replay has served it."""


@dataclass
class FullGraphStats:
    """Attributes:
    captured: graphs captured.
    replayed: calls served by a replay.
    dropped: graphs given up, because their state is gone or too many were held.
    """

    captured: int = 0
    replayed: int = 0
    dropped: int = 0


class CapturedCall:
    """One graph: its static inputs and its outputs. It holds no reference to the state."""

    def __init__(self, function: Callable, call: Call, state: GraphState, pool, stream):
        self._inputs = StaticInputs(call)
        self._graph = torch.cuda.CUDAGraph()
        args, kwargs = self._inputs.arguments(call)
        facts = state.trace_facts()
        saved = [tensor.clone() for tensor in state.advanced_tensors()]
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function(*args, **kwargs)
                    self._restore(state, facts, saved)
            torch.cuda.current_stream().wait_stream(stream)
            outputs = self._capture(function, args, kwargs, pool, stream)
        finally:
            self._restore(state, facts, saved)
        leaves, self._spec = pytree.tree_flatten(outputs)
        for leaf in leaves:
            describe(leaf, state, "an output")
        self._outputs = [STATE if leaf is state else leaf for leaf in leaves]

    def _capture(self, function: Callable, args: tuple, kwargs: dict, pool, stream) -> Any:
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=stream):
                return function(*args, **kwargs)
        except RuntimeError as error:
            release_generator(stream)
            raise CaptureError(f"capture failed: {error}") from error

    @staticmethod
    def _restore(state: GraphState, facts: Any, saved: list[Tensor]) -> None:
        for tensor, value in zip(state.advanced_tensors(), saved):
            tensor.copy_(value)
        state.set_trace_facts(facts)

    def replay(self, call: Call, state: GraphState) -> Any:
        """The outputs of the call, as copies: the next replay of any graph of the pool overwrites the graph's own."""
        self._inputs.fill(call)
        self._graph.replay()
        state.set_trace_facts(None)
        leaves = [
            state if leaf is STATE else leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._outputs
        ]
        return pytree.tree_unflatten(leaves, self._spec)


class FullGraphs:
    """Runs a compiled callable through CUDA graphs, one for each kind of call; those of a device share a memory pool.

    A graph reads and writes the tensors of the state that it was captured with, and is dropped with it. What else the
    callable reads (weights) may change in place, but must stay where it was at the capture.

    Args:
        function: the compiled callable. A call must not synchronise with the host.
        max_graphs: graphs held at most; the one unused longest is dropped first.
    """

    def __init__(self, function: Callable, *, max_graphs: int = 32):
        self.function, self.max_graphs = function, max_graphs
        self.stats = FullGraphStats()
        self._graphs: OrderedDict[tuple, CapturedCall] = OrderedDict()
        self._states: set[int] = set()
        self._resources: dict[torch.device, tuple[Any, torch.cuda.Stream]] = {}  # memory pool and capture stream

    def __call__(self, state: GraphState, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of ``function(*args, **kwargs)``, where ``state`` is one of the arguments.

        Raises:
            CaptureError: the call cannot be captured. The state is as it was before.
        """
        call = Call(args, kwargs, state)
        key = (id(state), state.trace_facts(), call.key)
        with torch.cuda.device(state.advanced_tensors()[0].device):
            captured = self._graphs.get(key)
            if captured is None:
                captured = self._capture(key, call, state)
            self._graphs.move_to_end(key)
            self.stats.replayed += 1
            return captured.replay(call, state)

    def _capture(self, key: tuple, call: Call, state: GraphState) -> CapturedCall:
        device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._resources:
            self._resources[device] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        captured = CapturedCall(self.function, call, state, *self._resources[device])
        if id(state) not in self._states:
            self._states.add(id(state))
            weakref.finalize(state, _forget, weakref.ref(self), id(state))
        self._graphs[key] = captured
        self.stats.captured += 1
        if len(self._graphs) > self.max_graphs:
            self._graphs.popitem(last=False)
            self.stats.dropped += 1
        return captured

    def forget(self, state_id: int) -> None:
        """Drops the graphs of a state."""
        self._states.discard(state_id)
        for key in [key for key in self._graphs if key[0] == state_id]:
            del self._graphs[key]
            self.stats.dropped += 1


def _forget(runner: "weakref.ref[FullGraphs]", state_id: int) -> None:
    alive = runner()
    if alive is not None:
        alive.forget(state_id)

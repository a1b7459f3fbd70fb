"""Capturing a call as CUDA graphs: whole, or broken at the split ops that it meets on its way.

A broken call is a list of graphs (segments) and calls of split ops in turn. It is cut at run time: the call goes
through whatever code a compiler made of it, and where that code reaches a split op (custom_ops/capture.py), the segment
ends, the op is noted with its arguments, and the next segment begins on the same stream and memory pool. Nothing of the
compiler's Python is left in a replay.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_dsa.custom_ops.capture import UNCUT, BreakCall, capturing
from compiled_dsa.graphs.buffers import CaptureError
from compiled_dsa.graphs.torch_compat import non_owning, release_generator


class RowCuts:
    """The first ``rows`` rows of tensors, each cut once however many split ops take it."""

    def __init__(self, rows: int):
        self.rows = rows
        self._cut: dict[int, tuple[Tensor, Tensor]] = {}  # of id(tensor): it, its real rows

    def __call__(self, tensor: Tensor) -> Tensor:
        cut = self._cut.get(id(tensor))
        if cut is None:
            cut = self._cut[id(tensor)] = tensor, tensor[: self.rows]
        return cut[1]


class Break:
    """A split op between two segments.

    Args:
        padded_rows: rows of the captured call; arguments with that many rows are cut to the real ones.
        hold: applied to tensor arguments.
    """

    def __init__(self, call: BreakCall, padded_rows: int | None, hold: Callable[[Tensor], Tensor] = lambda t: t):
        args = tuple(hold(a) if isinstance(a, Tensor) else a for a in call.args)
        rows = {
            place: fill
            for place, fill in call.rows.items()
            if isinstance(args[place], Tensor) and args[place].shape[0] == padded_rows
        }
        self.padded = BreakCall(call.name, call.function, args, rows)
        # what it writes, and what padding rows of that hold afterwards; a segment that fills them takes them away here
        self.padding = [(args[place], fill) for place, fill in rows.items() if fill is not None]
        self._cuts: RowCuts | None = None  # what the next one was made with
        self._args: tuple = ()

    def __call__(self, cuts: RowCuts | None) -> None:
        if cuts is None:
            self.padded.function(*self.padded.args)
            return
        if self._cuts is not cuts:
            rows = self.padded.rows
            self._args = tuple(cuts(a) if place in rows else a for place, a in enumerate(self.padded.args))
            self._cuts = cuts
        self.padded.function(*self._args)
        for tensor, fill in self.padding:
            tensor[cuts.rows :].fill_(fill)


class Recording:
    """What a replay runs, in order.

    Args:
        padded_rows: rows of the captured call.
        rows_on_device: int32 [], what segments read the number of real rows from; None when none does.
    """

    def __init__(
        self, parts: list["torch.cuda.CUDAGraph | Break"], padded_rows: int | None, rows_on_device: Tensor | None
    ):
        self.parts = parts
        self.breaks = sum(isinstance(part, Break) for part in parts)
        self.segments = len(parts) - self.breaks
        self._padded_rows, self._rows_on_device = padded_rows, rows_on_device
        self._rows = padded_rows  # of the last replay
        self._cuts: RowCuts | None = None  # of the last replay with padding rows

    def replay(self, rows: int | None) -> None:
        """Args:
        rows: the real rows, which split ops see; None: all.
        """
        rows = self._padded_rows if rows is None else rows
        if rows != self._rows:
            self._rows = rows
            self._cuts = None if rows == self._padded_rows else RowCuts(rows)
            if self._rows_on_device is not None:
                self._rows_on_device.fill_(rows)
        for part in self.parts:
            if isinstance(part, Break):
                part(self._cuts)
            else:
                part.replay()


class _Holder:
    """Tensors as breaks hold them: without owning their memory, which lies in the graphs' pool (where later captures
    may use it again, as replays run one after another) or belongs to the caller (weights, caches)."""

    def __init__(self) -> None:
        self._held: dict[tuple, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in self._held:
            self._held[key] = non_owning(tensor)
        return self._held[key]


class _Recorder:
    """The capture under way, as split ops meet it."""

    def __init__(self, pool, stream: torch.cuda.Stream, padded_rows: int | None):
        self._pool, self._stream, self._padded_rows = pool, stream, padded_rows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hold = _Holder()
        self._rows: Tensor | None = None  # int32 [], where there may be padding rows
        self.parts: list[torch.cuda.CUDAGraph | Break] = []
        if padded_rows is not None:
            from compiled_dsa.graphs.padding import compile_fills

            compile_fills(stream.device)
            with torch.inference_mode(False):  # else it could not be written outside of inference mode
                self._rows = torch.full((), padded_rows, dtype=torch.int32, device=stream.device)

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> None:
        graph, self._graph = self._graph, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        if not any("graph is empty" in str(w.message).lower() for w in caught):  # as between two adjacent split ops
            self.parts.append(graph)

    def split(self, call: BreakCall) -> None:
        if torch.cuda.current_stream() != self._stream:
            raise RuntimeError(f"{call.name} splits graphs but was reached on a side stream; join it before")
        self.end()
        part = Break(call, self._padded_rows, self._hold)
        self.parts.append(part)
        self.begin()
        if part.padding:
            part.padding = self._fill(part.padding)

    def _fill(self, padding: list[tuple[Tensor, float]]) -> list[tuple[Tensor, float]]:
        """Captures the filling of padding rows; returns what is left to do at each replay."""
        from compiled_dsa.graphs.padding import can_fill, fill_padding

        for tensor, value in padding:
            if can_fill(tensor):
                fill_padding(tensor, self._rows, value)
        return [(tensor, value) for tensor, value in padding if not can_fill(tensor)]

    def recording(self) -> Recording:
        return Recording(self.parts, self._padded_rows, self._rows)

    def abandon(self) -> None:
        """Ends a capture that failed."""
        graph, self._graph = self._graph, None
        if graph is not None:
            # the error that made the capture fail, once more; and a capture that failed at once is empty
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.capture_end()


class _RealRows:
    """Runs split ops at once, as a replay would: on the real rows."""

    def __init__(self, rows: int | None, padded_rows: int | None):
        self._cuts = None if rows is None or rows == padded_rows else RowCuts(rows)
        self._padded_rows = padded_rows

    def split(self, call: BreakCall) -> None:
        Break(call, self._padded_rows)(self._cuts)


def run_uncaptured(
    function: Callable, args: tuple, kwargs: dict[str, Any], *, cut: bool, rows: int | None, padded_rows: int | None
) -> Any:
    """``function(*args, **kwargs)`` as a replay of its capture computes it, without a graph."""
    with capturing(_RealRows(rows, padded_rows) if cut else UNCUT):
        return function(*args, **kwargs)


def record(
    function: Callable, args: tuple, kwargs: dict[str, Any], *, pool, stream, cut: bool, padded_rows: int | None
) -> tuple[Recording, Any]:
    """Captures ``function(*args, **kwargs)`` on ``stream``; returns what replays it, and its outputs.

    The kernels of first calls (compiling, tuning, workspaces) must lie before. Split ops are not run.

    Args:
        cut: break the call at split ops; else they are captured like other ops.
        padded_rows: rows of the call, of which a replay may name fewer as real.

    Raises:
        CaptureError: the call did something that no graph can hold; the message has the cause.
    """
    recorder = _Recorder(pool, stream, padded_rows if cut else None)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the pool cannot take cached memory back during a capture
    collecting = gc.isenabled()
    gc.disable()  # collecting may free memory of other graphs, which a capture forbids
    try:
        with torch.cuda.stream(stream), capturing(recorder if cut else UNCUT):
            recorder.begin()
            try:
                outputs = function(*args, **kwargs)
                recorder.end()
            except BaseException:
                recorder.abandon()
                raise
    except BaseException as error:
        release_generator(stream)
        if isinstance(error, RuntimeError):
            raise CaptureError(f"capture failed: {error}") from error
        raise
    finally:
        if collecting:
            gc.enable()
    return recorder.recording(), outputs

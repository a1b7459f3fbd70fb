"""What an op that splits graphs does while a CUDA graph is being captured.

The kernels of a split op cannot lie in a captured graph of padded rows: they work through the real rows, in as many
launches as these need. A capture that knows how to go on after such an op (graphs/capture.py) announces itself here;
under any other capture the op raises instead of being captured by accident.

Legend: rows are the query tokens of a step, real ones first; a captured graph may have padding rows after them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class BreakCall:
    """One call of a split op, to be run between two captured segments at every replay.

    Attributes:
        name: of the op, for messages and counts.
        function: called with ``args``; returns nothing, what it computes it writes into its arguments.
        args: as in the op's schema.
        rows: place in ``args`` of each tensor that has one entry a row in dim 0 -> what padding rows of it hold after
            the call, None for a tensor that is only read.
    """

    name: str
    function: Callable[..., None]
    args: tuple
    rows: dict[int, float | None]


class Recorder(Protocol):
    """A capture under way on this thread, or what stands in for one."""

    def split(self, call: BreakCall) -> None:
        """Ends the segment that is being captured, notes the call, and begins the next segment."""


SPLIT_OPS: set[str] = set()  # ``library::op`` of those that call ``run_or_split``; torch's tag alone does not say so
UNCUT = "uncut"  # a capture of whole calls: split ops are captured like others, with all padded rows
_capture: ContextVar[Recorder | str | None] = ContextVar("capture", default=None)


@contextmanager
def capturing(recorder: Recorder | str) -> Iterator[None]:
    """Announces the capture that is about to begin on this thread: a recorder, or ``UNCUT``.

    Raises:
        RuntimeError: another capture is under way on this thread.
    """
    if _capture.get() is not None:
        raise RuntimeError("a capture inside another capture of the same thread")
    token = _capture.set(recorder)
    try:
        yield
    finally:
        _capture.reset(token)


def under_capture() -> bool:
    """True during a capture that was announced on this thread, or any other one of the current stream."""
    return _capture.get() is not None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def run_or_split(call: BreakCall) -> None:
    """Runs a split op, or hands it to the capture under way.

    Raises:
        RuntimeError: the current stream is being captured by something that does not split graphs.
    """
    recorder = _capture.get()
    if recorder is None and under_capture():
        raise RuntimeError(
            f"{call.name} splits graphs and cannot be captured in a CUDA graph of this kind; "
            "use compile_model(graphs='breakable'), or torch.compile's own mode='reduce-overhead'"
        )
    if recorder is None or isinstance(recorder, str):
        call.function(*call.args)
    else:
        recorder.split(call)


def split_op(
    name: str, *, mutates_args: Sequence[str], rows: dict[str, float | None] | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Decorator: registers a function as a custom op at which graphs are cut.

    Example::

        @split_op("mine::running_sum", mutates_args=["out"], rows={"x": None, "out": 0})
        def running_sum(x: Tensor, out: Tensor) -> None:
            out.copy_(x.cumsum(0))

    Args:
        name: ``library::op``.
        mutates_args: the arguments that it writes; what it computes must lie in them, it returns nothing.
        rows: the tensors with one entry a row in dim 0, which a replay cuts to the real rows -> what their padding rows
            hold after the call, None for one that is only read. Without it the op sees the padding rows.

    Raises:
        ValueError: ``rows`` names what is no argument, or the function returns something by its annotation or takes
            arguments by keyword only.
    """

    def register(function: Callable[..., None]):
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        arguments = torch._C.parse_schema(f"{name}{schema}").arguments
        places = {argument.name: place for place, argument in enumerate(arguments)}
        unknown = set(rows or ()) - set(places)
        if unknown:
            raise ValueError(f"rows names {sorted(unknown)}; {name} has arguments {list(places)}")
        keywords = [argument.name for argument in arguments if argument.kwarg_only]
        if keywords:
            raise ValueError(f"{name} takes {keywords} by keyword only; the arguments of a split op have an order")
        if not schema.endswith("-> ()"):
            raise ValueError(f"{name} returns something ({schema}); a split op writes into its arguments")
        by_place = {places[argument]: fill for argument, fill in (rows or {}).items()}
        defaults = tuple(argument.default_value for argument in arguments)

        @wraps(function)
        def implementation(*args):
            # torch leaves out trailing arguments that have their default values
            run_or_split(BreakCall(name, function, args + defaults[len(args) :], by_place))

        op = torch.library.custom_op(
            name, implementation, mutates_args=mutates_args, schema=schema, tags=(torch.Tag.cudagraph_unsafe,)
        )
        op.register_fake(lambda *args: None)
        SPLIT_OPS.add(name)
        return op

    return register

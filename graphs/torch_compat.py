"""What this project uses of torch that differs between versions or is not a stable interface. Nothing else may."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

# Variants that one callable may need: few or many tokens, one or more rows, padded or not, scores needed or not, and
# one cache size after another.
RECOMPILE_LIMIT = 64


def compile_whole(function: Callable, backend: Callable) -> Callable:
    """torch.compile(fullgraph=True) whose recompiles count for this callable alone.

    Dynamo keeps compiled code, and counts it against its limit, per code object; a method of a model class (or, in
    transformers, one decorator's inner function) is one code object for all models. Tracing therefore starts from a
    code object of its own. torch 2.13 takes the limit as an argument; before, the global one (8) holds.
    """

    def entry(*args, **kwargs):
        return function(*args, **kwargs)

    own_code = entry.__code__.replace(co_name=f"compiled_{id(entry):x}")
    own = types.FunctionType(own_code, entry.__globals__, own_code.co_name, None, entry.__closure__)
    options: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = RECOMPILE_LIMIT
    return torch.compile(own, fullgraph=True, backend=backend, **options)


def graph_breaks() -> int:
    """Graph breaks that Dynamo has met in this process so far."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def mark_tokens_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """The size of ``dim`` is dynamic from the first compile on; a size of 1 stays fixed, as torch specialises it."""
    if tensor.shape[dim] > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def release_generator(stream: torch.cuda.Stream) -> None:
    """Makes random numbers possible again after a capture that failed.

    torch 2.11 leaves the device's default generator marked as capturing when a capture ends in an error, and every
    later use of it raises. The end of any capture that succeeds takes the mark away.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device=stream.device)

"""What this project uses of torch that differs between versions or is not a stable interface. Nothing else may."""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def cause_of_failed_compile(error: Exception) -> Exception:
    """What a backend raised, of an error that torch.compile raised."""
    return getattr(error, "inner_exception", error)


def graph_breaks() -> int:
    """Graph breaks that Dynamo has met in this process so far."""
    return sum(graph_break_reasons().values())


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


def non_owning(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive. CUDA tensors only; others are returned as they are."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    unowned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.inference_mode(False):  # else it could not be written outside of inference mode
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(unowned, tensor.storage_offset(), tensor.shape, tensor.stride())


def keep_pool(pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph that keeps a memory pool: when the last graph of a pool goes, the pool goes, and its handle with it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        torch.zeros(1, device=stream.device)
    return graph


def pool_bytes(pool: Any) -> int:
    """Device memory that a CUDA graphs' memory pool holds."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


def register_dataclass(cls: type) -> None:
    """Lets pytrees look into a dataclass; every field is a child."""
    if cls not in torch.utils._pytree.SUPPORTED_NODES:
        torch.utils._pytree.register_dataclass(cls)


@contextmanager
def compiling_with(backend: Callable) -> Iterator[None]:
    """What torch.compile made is compiled once more inside, with ``backend``; what was compiled before stays in place.

    Dynamo looks compiled code up by its backend too, so that code of another one neither serves a call inside nor is
    touched. ``fullgraph`` is not enforced inside.
    """
    limit = {"recompile_limit": RECOMPILE_LIMIT}
    with torch._dynamo.config.patch(limit), torch.compiler.set_stance("default", force_backend=backend):
        yield


@contextmanager
def output_code_to(codes: list[str]) -> Iterator[None]:
    """Appends the output code of each graph that Inductor compiles inside, or takes from its cache of graphs.

    AOTAutograd's own cache is left out: what it holds does not all pass by Inductor's hook.
    """
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = codes.append
    try:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        GraphLowering.save_output_code = before


def frame_in_compilation() -> tuple[types.CodeType, dict[str, Any], str]:
    """Code, globals and compile id ("0/1": the frame's number / how often it was compiled before) of the frame that
    Dynamo compiles; for backends."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    root = InstructionTranslator.current_tx().output.root_tx
    return root.f_code, root.f_globals, str(torch._guards.CompileContext.current_compile_id())


def source_of_input(placeholder: torch.fx.Node) -> str:
    """Where Dynamo takes an input of a graph from, as an expression: ``L['x']``."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    return source.name() if callable(source.name) else source.name  # a property since torch 2.12


def guards_text(code: types.CodeType, compile_id: str) -> str:
    """The tree of guards of one compile of a code object; "" when nothing holds the compiled code any more."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(code)
    return next((str(e.guard_manager) for e in entries if str(e.compile_id) == compile_id), "")


def graph_break_reasons() -> dict[str, int]:
    """Why Dynamo broke graphs in this process so far, and how often."""
    return dict(torch._dynamo.utils.counters["graph_break"])


def function_of_op(overload: torch._ops.OpOverload) -> Callable | None:
    """The function behind an op of ``torch.library.custom_op``."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(overload._schema.name)
    return None if definition is None else definition._init_fn

"""compile_model: the entry for compiling a model whose attention is compiled_dsa's."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_dsa.graphs.compile_stats import CompileStats, counting_backend
from compiled_dsa.graphs.full import FullGraphs
from compiled_dsa.graphs.torch_compat import compile_whole, mark_tokens_dynamic

GRAPHS = ("auto", "off", "full", "breakable", "piecewise")


def compile_model(model: Any, graphs: str = "auto", *, backend: str | Callable = "inductor") -> Any:
    """Compiles ``model.forward`` as one graph, in place, and returns the model.

    ``generate()`` then runs the compiled forward (``torch.compile(model).generate`` would compile nothing). Token
    counts are dynamic: a model that generates into a ``PagedCache`` compiles once for each combination of (one, few,
    many) new tokens a row, (one, more) rows, padded or not and scores needed or not, as they occur, and never again for
    other lengths.

    Args:
        model: a model after ``replace_attention``, or any module.
        graphs: which CUDA graphs replay the compiled code.
            "off": none.
            "full": decode-shaped forwards into a ``PagedCache`` (at most 8 new tokens a row) are captured whole, once
            for each cache and kind of call, and replayed from then on; other forwards run without a graph. A forward
            that cannot be captured is an error.
            "auto": "full" on a GPU, with a warning in place of the error; "off" on a CPU.
            "breakable" and "piecewise" do not exist yet.
        backend: torch.compile's backend.

    Returns:
        The model, with ``model.graph_stats() -> dict`` added: ``graphs`` (in force), ``compiles`` (graphs compiled so
        far), ``captured``, ``replayed``, ``dropped`` (CUDA graphs), ``uncaptured`` (forwards without one).

    Raises:
        ValueError: an unknown ``graphs``, "full" without a GPU, or a model that is compiled already.
        NotImplementedError: a graph runtime that does not exist yet.
    """
    runtime = _runtime(graphs)
    if hasattr(model, "graph_stats"):
        raise ValueError("model is compiled already; compile_model takes a model once")
    compile_stats = CompileStats()
    eager_forward = model.forward
    compiled = compile_whole(eager_forward, counting_backend(compile_stats, backend))
    forwards = _Forwards(compiled, FullGraphs(compiled) if runtime == "full" else None, strict=graphs == "full")

    @functools.wraps(eager_forward)
    def forward(*args, **kwargs):
        return forwards(args, kwargs)

    def graph_stats() -> dict[str, Any]:
        return {"compiles": compile_stats.compiles, **forwards.stats()}

    model.forward = forward
    model.graph_stats = graph_stats
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.disable_compile = True  # generate() would compile the compiled forward once more
    return model


def _runtime(graphs: str) -> str:
    if graphs not in GRAPHS:
        raise ValueError(f"graphs={graphs!r}; it must be one of {', '.join(GRAPHS)}")
    if graphs in ("breakable", "piecewise"):
        raise NotImplementedError(f"graphs={graphs!r}: this runtime does not exist yet; use 'auto', 'full' or 'off'")
    if graphs == "full" and not torch.cuda.is_available():
        raise ValueError("graphs='full'; CUDA graphs need a GPU, use 'auto' or 'off'")
    return "full" if graphs == "full" or (graphs == "auto" and torch.cuda.is_available()) else "off"


class _Forwards:
    """Sends each forward to a CUDA graph or to the compiled code."""

    def __init__(self, compiled: Callable, graphs: FullGraphs | None, strict: bool):
        self.compiled, self.graphs, self.strict = compiled, graphs, strict
        self.uncaptured = 0

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        args = tuple(_with_dynamic_tokens(a) for a in args)
        kwargs = {name: _with_dynamic_tokens(a) for name, a in kwargs.items()}
        arguments = (*args, *kwargs.values())
        state = next((a for a in arguments if getattr(a, "decode_shaped", False)), None)
        if self.graphs is not None and state is not None and _on_gpu(arguments) and state.trace_facts() is not None:
            try:
                return self.graphs(state, args, kwargs)
            except RuntimeError as error:
                if self.strict:
                    raise RuntimeError("graphs='full': a decode forward cannot be captured; see the cause") from error
                warnings.warn(f"graphs='auto': decode runs without CUDA graphs, capture failed: {error}", stacklevel=3)
                self.graphs = None
        self.uncaptured += 1
        return self.compiled(*args, **kwargs)

    def stats(self) -> dict[str, Any]:
        counts = {"graphs": "off" if self.graphs is None else "full", "uncaptured": self.uncaptured}
        for name in ("captured", "replayed", "dropped"):
            counts[name] = 0 if self.graphs is None else getattr(self.graphs.stats, name)
        return counts


def _on_gpu(arguments: tuple) -> bool:
    return any(isinstance(a, Tensor) and a.is_cuda for a in arguments) and not torch.cuda.is_current_stream_capturing()


def _with_dynamic_tokens(argument: Any) -> Any:
    """The argument, its sizes that count rows or tokens marked dynamic.

    Token tensors are int64 [B, S] (ids, positions); their strides are guarded too, and a slice of a longer prompt
    would differ in them. Masks are bool [B, columns], where the columns are those of the cache and stay fixed; a dict
    has one mask for each type of layer.
    """
    if isinstance(argument, dict):
        return {key: _with_dynamic_tokens(value) for key, value in argument.items()}
    if not isinstance(argument, Tensor) or argument.dim() != 2:
        return argument
    if argument.dtype == torch.int64:
        argument = argument.contiguous()
        for dim in range(2):
            mark_tokens_dynamic(argument, dim)
    elif argument.dtype == torch.bool:
        mark_tokens_dynamic(argument, 0)
    return argument

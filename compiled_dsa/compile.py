"""compile_model: the entry for compiling a model whose attention is compiled_dsa's."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_dsa.graphs.compile_stats import CompileStats, counting_backend
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
        graphs: which CUDA graphs replay the compiled code: "auto" or "off". The runtimes "full", "breakable" and
            "piecewise" do not exist yet, so "auto" means "off".
        backend: torch.compile's backend.

    Returns:
        The model, with ``model.graph_stats() -> dict`` added: ``compiles`` (graphs compiled so far), ``graphs``.

    Raises:
        ValueError: an unknown ``graphs``, or a model that is compiled already.
        NotImplementedError: a graph runtime that does not exist yet.
    """
    if graphs not in GRAPHS:
        raise ValueError(f"graphs={graphs!r}; it must be one of {', '.join(GRAPHS)}")
    if graphs not in ("auto", "off"):
        raise NotImplementedError(f"graphs={graphs!r}: this graph runtime does not exist yet; use 'auto' or 'off'")
    if hasattr(model, "graph_stats"):
        raise ValueError("model is compiled already; compile_model takes a model once")
    stats = CompileStats()
    eager_forward = model.forward
    compiled = compile_whole(eager_forward, counting_backend(stats, backend))

    @functools.wraps(eager_forward)
    def forward(*args, **kwargs):
        for argument in (*args, *kwargs.values()):
            _mark_tokens_dynamic(argument)
        return compiled(*args, **kwargs)

    def graph_stats() -> dict[str, Any]:
        return {"graphs": "off", "compiles": stats.compiles}

    model.forward = forward
    model.graph_stats = graph_stats
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.disable_compile = True  # generate() would compile the compiled forward once more
    return model


def _mark_tokens_dynamic(argument: Any) -> None:
    """Token tensors are int64 [B, S] (ids, positions)."""
    if isinstance(argument, Tensor) and argument.dtype == torch.int64 and argument.dim() == 2:
        for dim in range(2):
            mark_tokens_dynamic(argument, dim)

"""compile_model: the entry for compiling a model whose attention is compiled_dsa's."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from compiled_dsa.graphs.buffers import CaptureError
from compiled_dsa.graphs.compile_stats import CompileStats, counting_backend
from compiled_dsa.graphs.full import FullGraphs
from compiled_dsa.graphs.torch_compat import compile_whole, mark_tokens_dynamic

GRAPHS = ("auto", "off", "full")
PLANNED = ("breakable", "piecewise")


def compile_model(model: Any, graphs: str = "auto", *, backend: str | Callable = "inductor") -> Any:
    """Compiles ``model.forward`` as one graph, in place, and returns the model.

    ``generate()`` then runs the compiled forward (``torch.compile(model).generate`` would compile nothing). Token
    counts are dynamic: a model that generates into a ``PagedCache`` compiles once for each combination of (one, few,
    many) new tokens a row, (one, more) rows, padded or not and scores needed or not, as they occur, and never again for
    other lengths; under another grad mode (``no_grad``, ``inference_mode``) or with a cache of another size it compiles
    once more.

    Args:
        model: a model after ``replace_attention``, or any module. Move, cast and copy it before: CUDA graphs read the
            weights where they were when captured. Their values may change in place.
        graphs: which CUDA graphs replay the compiled code.
            "off": none.
            "full": decode-shaped forwards into a ``PagedCache`` (at most 8 new tokens a row) are captured whole, once
            for each cache and kind of call, and replayed from then on; other forwards run without a graph. A forward
            that cannot be captured is an error.
            "auto": "full" for a model on a GPU, with a warning in place of the error; else "off".
            "breakable" and "piecewise" do not exist yet.
        backend: torch.compile's backend.

    Returns:
        The model, with ``model.graph_stats() -> dict`` added: ``graphs`` (in force), ``compiles`` (graphs compiled so
        far), ``captured``, ``replayed``, ``dropped`` (CUDA graphs), ``uncaptured`` (forwards without one).
        ``model.generation_config.disable_compile`` is set, since generate() would compile the forward once more.

    Raises:
        ValueError: an unknown ``graphs``, "full" for a model that is not on a GPU, or a model that is compiled already.
        NotImplementedError: a graph runtime that does not exist yet.
    """
    runtime = _runtime(graphs, model)
    if hasattr(model, "graph_stats"):
        raise ValueError("model is compiled already; compile_model takes a model once")
    forwards = _Forwards(model.forward, backend, runtime == "full", strict=graphs == "full")

    @functools.wraps(model.forward)
    def forward(*args, **kwargs):
        return forwards(args, kwargs)

    def refuse_copy(memo):
        raise ValueError("a compiled model cannot be copied: its forward belongs to it; copy it before compile_model")

    model.forward = forward
    model.graph_stats = forwards.stats
    model.__deepcopy__ = refuse_copy
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.disable_compile = True
    return model


def _runtime(graphs: str, model: Any) -> str:
    if graphs in PLANNED:
        raise NotImplementedError(f"graphs={graphs!r}: this runtime does not exist yet; use {', '.join(GRAPHS)}")
    if graphs not in GRAPHS:
        raise ValueError(f"graphs={graphs!r}; it must be one of {', '.join(GRAPHS)}")
    parameter = next(model.parameters(), None)
    on_gpu = parameter is not None and parameter.is_cuda
    if graphs == "full" and not on_gpu:
        raise ValueError("graphs='full'; CUDA graphs need a model on a GPU, use 'auto' or 'off'")
    return "full" if on_gpu and graphs != "off" else "off"


class _Forwards:
    """Sends each forward to a CUDA graph or to the compiled code."""

    def __init__(self, eager: Callable, backend: str | Callable, use_graphs: bool, strict: bool):
        self._eager, self._strict = eager, strict
        self._compile_stats = CompileStats()
        self._backend = counting_backend(self._compile_stats, backend)
        self._compiled: dict[Hashable, Callable] = {}
        self._graphs = FullGraphs(self._run)
        self._use_graphs = use_graphs
        self._uncaptured = 0

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = _with_dynamic_tokens(args, kwargs)
        state = next((a for a in (*args, *kwargs.values()) if hasattr(a, "trace_facts")), None)
        graphable = state is not None and state.trace_facts() is not None and state.decode_shaped
        if self._use_graphs and graphable and not torch.cuda.is_current_stream_capturing():
            try:
                return self._graphs(state, args, kwargs)
            except CaptureError as error:
                if self._strict:
                    raise
                warnings.warn(f"graphs='auto': decode runs without CUDA graphs from now on: {error}", stacklevel=3)
                self._use_graphs = False
        self._uncaptured += 1
        return self._run(*args, **kwargs)

    def _run(self, *args, **kwargs) -> Any:
        # Each variant is compiled on its own: before torch 2.13 recompiles count against a fixed limit of 8.
        variant = tuple(_variant(a) for a in (*args, *kwargs.values()))
        if variant not in self._compiled:
            self._compiled[variant] = compile_whole(self._eager, self._backend)
        return self._compiled[variant](*args, **kwargs)

    def stats(self) -> dict[str, Any]:
        return {
            "graphs": "full" if self._use_graphs else "off",
            "compiles": self._compile_stats.compiles,
            "uncaptured": self._uncaptured,
            **dataclasses.asdict(self._graphs.stats),
        }


def _variant(argument: Any) -> Any:
    """What of an argument calls for a trace of its own: sizes of 1, flags, and what a cache's host knows."""
    if isinstance(argument, Tensor):
        return tuple(min(size, 2) for size in argument.shape)
    if isinstance(argument, dict):
        return tuple(_variant(value) for value in argument.values())
    if hasattr(argument, "trace_facts"):
        return argument.trace_facts()
    return argument if isinstance(argument, bool) else type(argument)


TOKENS = ("input_ids", "position_ids", "inputs_embeds")  # [B, S] or [B, S, hidden]
MASK = "attention_mask"


def _with_dynamic_tokens(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments, the sizes of transformers' token arguments that count rows or tokens marked dynamic.

    Strides are guarded too, and a slice of a longer prompt would differ in them: token arguments are made contiguous.
    Masks are bool [B, columns], where the columns are those of the cache and stay fixed; a dict has one mask for each
    type of layer. Other arguments are left alone.
    """
    for argument in args[:1]:
        if isinstance(argument, Tensor) and argument.dim() == 2:
            _mark(argument, 2)
    changed = {}
    for name in TOKENS:
        argument = kwargs.get(name)
        if isinstance(argument, Tensor) and argument.dim() >= 2:
            changed[name] = argument.contiguous()
            _mark(changed[name], 2)
    mask = kwargs.get(MASK)
    for each in mask.values() if isinstance(mask, dict) else (mask,):
        if isinstance(each, Tensor) and each.dim() == 2:
            _mark(each, 1)
    return args, kwargs | changed


def _mark(tensor: Tensor, dims: int) -> None:
    for dim in range(dims):
        mark_tokens_dynamic(tensor, dim)

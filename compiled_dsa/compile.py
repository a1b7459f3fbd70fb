"""compile_model: the entry for compiling a model whose attention is compiled_dsa's."""

import functools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.graphs.buckets import BATCH_SIZES, TOKEN_SIZES, Buckets, is_count
from compiled_dsa.graphs.buffers import CaptureError, UnsupportedCallError
from compiled_dsa.graphs.compile_stats import CompileStats, counting_backend
from compiled_dsa.graphs.piecewise import Pieces, piecewise_backend
from compiled_dsa.graphs.report import reporting
from compiled_dsa.graphs.runner import MAX_CALLS, GraphMemory, GraphRunner, RunnerStats
from compiled_dsa.graphs.torch_compat import cause_of_failed_compile, compile_whole
from compiled_dsa.graphs.unsafe import refusing_backend
from compiled_dsa.packing import PackedProjections, pack_projections
from compiled_dsa.steps import NoBucket, Planner, unpad, variant, with_dynamic_tokens
from compiled_dsa.weights import AdapterWatch

# runtime -> kind of forward -> is it broken at split ops (True) or captured whole (False)
RUNTIMES: dict[str, dict[str, bool]] = {
    "off": {},
    "auto": {DECODE: False, PREFILL: True},
    "full": {DECODE: False, PREFILL: False},
    "breakable": {DECODE: True, PREFILL: True},
    "piecewise": {DECODE: True, PREFILL: True},
}
ON_MISS = ("warn", "raise")


class GraphMissError(RuntimeError):
    """After ``end_warm_up()``, a forward compiled something or ran without the graph that should serve it."""


def compile_model(
    model: Any,
    graphs: str = "auto",
    *,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    token_sizes: Iterable[int] = TOKEN_SIZES,
    max_cache_len: int | None = None,
    on_miss: str = "warn",
    pack: bool = True,
    backend: str | Callable = "inductor",
) -> Any:
    """Compiles ``model.forward`` as one graph, in place, and returns the model.

    ``generate()`` then runs the compiled forward (``torch.compile(model).generate`` would compile nothing). Token
    counts are dynamic: a model that generates into a ``PagedCache`` compiles once for each combination of (one, few,
    many) new tokens a row, (one, more) rows, padded or not and scores needed or not, as they occur, and never again for
    other lengths; under another grad mode (``no_grad``, ``inference_mode``) or with a cache of another size it compiles
    once more.

    On a GPU, CUDA graphs replay the compiled code. Each kind of forward is captured when it first occurs, once for each
    cache. Decode-shaped forwards (at most 8 new tokens a row) are captured at their own size, others padded to a bucket
    of ``token_sizes``; the padding computes and stores nothing that anyone reads. A model of your own, whose forward
    takes a ``Batch`` and the ``PagePool``, is padded to ``batch_sizes`` too. Of its other arguments and outputs,
    tensors with as many entries in dim 0 as the batch has rows (or else requests) are padded and cropped likewise. A
    ``Batch`` without rows runs with a few padding rows, graphs or not; its outputs have none.
    Forwards without a ``PagedCache`` or a ``Batch``, and prefills beyond the largest size, run without a graph.
    A replay does not look at flags of modules that a trace depends on (``model.train()``): set them before. Adapters of
    peft may be trained on between forwards, whatever modules they are on; once they were added, removed, switched,
    disabled, merged or scaled, a forward that graphs would serve is a ValueError. Call a model that has graphs from one
    thread and one stream.

    Args:
        model: a model after ``replace_attention``, or any module. Move, cast and copy it before: CUDA graphs read the
            weights where they were when captured. Their values may change in place.
        graphs: which CUDA graphs replay the compiled code.
            "off": none.
            "full": every forward is one graph, with all rows of its bucket in every op.
            "breakable": a forward is cut, while it is captured, at the ops that graphs are split at (index_topk_prefill
            and mla_prefill); these run between the graphs, on the real rows (of a [B, S] grid with B > 1: on all).
            "piecewise": the same, but cut before compiling, so that each piece is compiled by itself; without a GPU,
            compiled pieces without graphs.
            "auto": "full" for decode-shaped forwards and "breakable" for others on a GPU, else "off".
            A forward with an op that carries torch's tag cudagraph_unsafe, but is no split op (custom_ops/capture.py),
            cannot be captured.
        batch_sizes: requests of a ``Batch`` to which decode is padded.
        token_sizes: new tokens a row, or rows of a ``Batch``, to which prefill is padded.
        max_cache_len: longest request of a ``Batch``, which sets the width of captured page tables. None: that of the
            first page table seen.
        on_miss: after ``model.end_warm_up()``, a compile or a forward without a graph "warn"s once or "raise"s.
        pack: projections that read the same rows become one GEMM, by ``pack_projections``: weights in place, results
            within the rounding of GEMMs. False leaves projections as they are, packed or not.
        backend: torch.compile's backend.

    Returns:
        The model, with these methods added:
        ``graph_stats() -> dict``: ``graphs`` (in force), ``compiles`` (graphs compiled so far), ``recompiles`` (of
        them after the end of the warm-up), ``captured`` and ``replayed`` (forwards), ``segments`` and ``breaks``
        (graphs and split ops in the captured ones), ``replayed_segments``, ``replayed_breaks``, ``dropped`` (captured
        forwards given up with their cache), ``uncaptured`` (forwards without a graph), ``reasons`` (of these,
        counted), ``pool_bytes``, ``pieces`` (compiled by "piecewise").
        ``warm_up(run, sizes) -> dict``: calls ``run(size)`` for each size, largest first, with a progress bar; seconds
        each. ``end_warm_up()``.
        ``run_padded(*args, **kwargs)``: the forward on the buffers of its captured graph, without the graph; a replay
        gives the same bits.
        ``model.generation_config.disable_compile`` is set, since generate() would compile the forward once more.

    Raises:
        ValueError: an argument outside of the above, graphs for a model that is not on a GPU, or a model that is
            compiled already. Later, forwards raise ``CaptureError`` when they cannot be captured and ``graphs`` is not
            "auto" (which warns and goes on without), and ``GraphMissError`` as ``on_miss`` says.
    """
    if not issubclass(type(model), torch.nn.Module):  # isinstance: mypy then refuses the methods added
        raise ValueError(f"model={model!r}; it must be a torch.nn.Module")
    if graphs not in RUNTIMES:
        raise ValueError(f"graphs={graphs!r}; it must be one of {', '.join(RUNTIMES)}")
    if on_miss not in ON_MISS:
        raise ValueError(f"on_miss={on_miss!r}; it must be one of {', '.join(ON_MISS)}")
    if not isinstance(pack, bool):
        raise ValueError(f"pack={pack!r}; it must be True or False")
    if max_cache_len is not None and not is_count(max_cache_len):
        raise ValueError(f"max_cache_len={max_cache_len!r}; it must be an integer of at least 1 or None")
    planner = Planner(Buckets("token_sizes", token_sizes), Buckets("batch_sizes", batch_sizes), max_cache_len)
    parameter = next(model.parameters(), None)
    on_gpu = parameter is not None and parameter.is_cuda
    if graphs not in ("off", "auto", "piecewise") and not on_gpu:
        raise ValueError(f"graphs={graphs!r}; CUDA graphs need a model on a GPU, use 'auto' or 'off'")
    if hasattr(model, "graph_stats"):
        raise ValueError("model is compiled already; compile_model takes a model once")
    if pack and any(isinstance(module, PackedProjections) for module in model.modules()):
        pack_projections(model)
    forwards = _Forwards(model, backend, graphs, on_gpu, planner, on_miss)

    @functools.wraps(model.forward)
    def forward(*args, **kwargs):
        return forwards(args, kwargs)

    def refuse_copy(memo):
        raise ValueError("a compiled model cannot be copied: its forward belongs to it; copy it before compile_model")

    model.forward = forward
    model.graph_stats = forwards.stats
    model.warm_up, model.end_warm_up = forwards.warm_up, forwards.end_warm_up

    def run_padded(*args, **kwargs):
        with forwards.rerunning():
            return model(*args, **kwargs)

    model.run_padded = run_padded
    model.__deepcopy__ = refuse_copy
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.disable_compile = True
    return model


class CompiledForward:
    """A forward compiled as one graph, each variant of it when it first occurs.

    Each variant is compiled on its own: before torch 2.13 recompiles count against a fixed limit of 8. One with an op
    that is tagged ``cudagraph_unsafe`` but is no split op raises ``CaptureError`` under a capture (graphs/unsafe.py).

    Args:
        piecewise: compile the pieces between split ops one by one.
        before_compile: called before each compile; what it raises ends the call.

    Attributes:
        stats: compiles so far.
        pieces: of "piecewise", pieces so far.
    """

    def __init__(
        self,
        eager: Callable,
        backend: str | Callable = "inductor",
        *,
        piecewise: bool = False,
        before_compile: Callable[[], None] = lambda: None,
    ):
        self.stats, self.pieces = CompileStats(), Pieces()
        if piecewise:
            backend = piecewise_backend(backend, self.pieces)
        self._eager, self._backend = eager, counting_backend(self.stats, refusing_backend(backend), before_compile)
        self._variants: dict[Hashable, Callable] = {}

    def __call__(self, *args, **kwargs) -> Any:
        args, kwargs = with_dynamic_tokens(args, kwargs)
        key = tuple(variant(a) for a in (*args, *kwargs.values()))
        if key not in self._variants:
            self._variants[key] = compile_whole(self._eager, self._backend)
        return self._variants[key](*args, **kwargs)


class _Forwards:
    """Sends each forward to a captured graph or to the compiled code."""

    def __init__(self, model: Any, backend, graphs: str, on_gpu: bool, planner: Planner, on_miss: str):
        self._planner, self._on_miss = planner, on_miss
        self._model = model
        self._adapters: AdapterWatch | None = None
        self.run = CompiledForward(
            model.forward,
            backend,
            piecewise=graphs == "piecewise",
            before_compile=lambda: self._miss("compiled after the warm-up"),
        )
        self._graphs = graphs
        self._memory = GraphMemory()
        cuts = RUNTIMES[graphs] if on_gpu else {}
        most = max(MAX_CALLS, planner.batch_kinds)  # with fewer, a loop that meets all kinds would capture for ever
        by_cut = {
            cut: GraphRunner(self.run, cut=cut, memory=self._memory, max_calls=most) for cut in set(cuts.values())
        }
        self._all_runners = list(by_cut.values())
        self.runners = {kind: by_cut[cut] for kind, cut in cuts.items()}  # less those whose capture failed
        self._reasons: Counter[str] = Counter()
        self._warm_compiles: int | None = None  # compiles when the warm-up ended
        self._warned: set[str] = set()
        self._rerun = False

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        filled = self._planner.with_rows(args, kwargs)
        try:
            if filled is None:
                return self._forward(args, kwargs)
            return pytree.tree_map_only(Tensor, filled.crop, self._forward(filled.args, filled.kwargs))
        except Exception as error:
            cause = cause_of_failed_compile(error)
            if isinstance(cause, GraphMissError):
                raise cause from None
            raise

    def _forward(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.runners or torch.cuda.is_current_stream_capturing():
            return self._uncaptured("graphs are off", args, kwargs)
        if reporting():  # a report wants to see the compiled code run
            return self.run(*args, **kwargs)
        try:
            kind, step = self._planner.plan(args, kwargs, self.runners)
        except NoBucket as reason:
            return self._uncaptured(str(reason), args, kwargs)
        runner = self.runners[kind]
        self._refuse_other_adapters()
        try:
            return runner.rerun(step) if self._rerun else runner(step)
        except CaptureError as error:
            if self._graphs != "auto":
                raise
            if not isinstance(error, UnsupportedCallError):
                warnings.warn(f"graphs='auto': {kind} runs without CUDA graphs from now on: {error}", stacklevel=4)
                del self.runners[kind]
            unpad(args, kwargs)
            return self._uncaptured(str(error), args, kwargs)

    def _refuse_other_adapters(self) -> None:
        """Raises ValueError when adapters are not those of the first captured forward, which replays would run."""
        if self._adapters is None:
            self._adapters = AdapterWatch(self._model)
        elif self._adapters.changed():
            raise ValueError(
                "adapters were added, removed, switched, disabled, merged or scaled after forwards were captured; CUDA "
                "graphs replay the old ones. Change them before the first forward, change them back, or use "
                "graphs='off'"
            )

    @contextmanager
    def rerunning(self) -> Iterator[None]:
        """Within it, captured forwards run on the buffers of their graphs without these."""
        self._rerun = True
        try:
            yield
        finally:
            self._rerun = False

    def _uncaptured(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._reasons[reason] += 1
        if self._all_runners:
            self._miss(f"ran without a graph: {reason}")
        return self.run(*args, **kwargs)

    def _miss(self, what: str) -> None:
        if self._warm_compiles is None:
            return
        if self._on_miss == "raise":
            raise GraphMissError(f"a forward {what}")
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"a forward {what}", stacklevel=5)

    def warm_up(self, run: Callable[[int], Any], sizes: Iterable[int], *, progress: bool = True) -> dict[int, float]:
        """Calls ``run(size)`` for each size, the largest first so that smaller graphs find room in its memory.

        Returns:
            Seconds of each size, compiling and capturing included.
        """
        from rich.progress import track  # import compiled_dsa brings in torch alone

        seconds = {}
        for size in track(sorted(set(sizes), reverse=True), "warming up", disable=not progress, transient=True):
            start = time.perf_counter()
            run(size)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[size] = time.perf_counter() - start
        return seconds

    def end_warm_up(self) -> None:
        """From now on a compile or a forward without a graph is a miss."""
        self._warm_compiles = self.run.stats.compiles

    def stats(self) -> dict[str, Any]:
        counts = Counter(asdict(RunnerStats()))
        for runner in self._all_runners:
            counts.update(asdict(runner.stats))
        compiles = self.run.stats.compiles
        return {
            "graphs": self._graphs if self.runners or self._graphs == "piecewise" else "off",
            "compiles": compiles,
            "recompiles": 0 if self._warm_compiles is None else compiles - self._warm_compiles,
            **counts,
            "uncaptured": sum(self._reasons.values()),
            "reasons": dict(self._reasons),
            "pool_bytes": self._memory.bytes(),
            "pieces": self.run.pieces.pieces,
        }

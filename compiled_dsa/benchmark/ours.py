"""Our layer under each graph runtime of ``compile_model``, as benchmarks run it: one step over and over."""

from collections.abc import Callable

from torch import Tensor, nn

from compiled_dsa.attention import SparseAttention
from compiled_dsa.batch import Batch
from compiled_dsa.benchmark.inputs import LayerInputs, Runnable
from compiled_dsa.cache import PagePool
from compiled_dsa.compile import RUNTIMES, CompiledForward
from compiled_dsa.graphs.buckets import Buckets
from compiled_dsa.graphs.buffers import Call
from compiled_dsa.graphs.runner import GraphRunner
from compiled_dsa.steps import Planner


class OneLayer(nn.Module):
    """A layer as ``compile_model`` takes it: a forward over a ``Batch`` and a ``PagePool``."""

    def __init__(self, layer: SparseAttention):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, pool: PagePool) -> tuple[Tensor, Tensor]:
        return self.layer(x, cos, sin, batch, pool.layers[0])


class CompiledLayer:
    """The layer compiled once for all cases, whole and (for "piecewise") in pieces."""

    def __init__(self, layer: SparseAttention, backend: str | Callable = "inductor"):
        model = OneLayer(layer)
        self._whole = CompiledForward(model.forward, backend)
        self._pieces = CompiledForward(model.forward, backend, piecewise=True)

    def runnable(self, mode: str, inputs: LayerInputs) -> Runnable:
        """``inputs`` under a runtime.

        With graphs, ``run`` replays them alone: copies into and out of static buffers, which a model has once and not
        once a layer, are in ``step`` only.

        Args:
            mode: as ``graphs`` of ``compile_model``, "auto" excepted.

        Raises:
            ValueError: no such mode.
        """
        if mode not in RUNTIMES or mode == "auto":
            raise ValueError(f"mode={mode!r}; it must be one of {', '.join(m for m in RUNTIMES if m != 'auto')}")
        forward = self._pieces if mode == "piecewise" else self._whole
        batch, pool = inputs.batch, inputs.caches.pool
        args = (inputs.x, inputs.cos, inputs.sin, batch, pool)
        if mode == "off":
            return Runnable(lambda: forward(*args), lambda: forward(*args))
        T, B = inputs.x.shape[0], batch.kv_len.shape[0]
        planner = Planner(Buckets("token_sizes", (T,)), Buckets("batch_sizes", (B,)), int(batch.kv_len.max()))
        _, step = planner.plan(args, {})
        runner = GraphRunner(forward, cut=RUNTIMES[mode][batch.kind])
        captured = runner.captured(step, Call(step.args, step.kwargs, step.bucket))
        return Runnable(lambda: captured.recording.replay(step.rows), lambda: runner(step), lambda: runner(step))

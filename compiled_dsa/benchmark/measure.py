"""Measures cases one after another, keeping what they share: the compiled layer, the caches and the peers.

A step is repeated over the same caches: it reads 349 MB of weights and more, so that L2 keeps nothing of the caches.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from compiled_dsa.benchmark import timing
from compiled_dsa.benchmark.cases import (
    COMPOSITION,
    DECODE,
    LAYER,
    MODEL,
    MODEL_LAYERS,
    MODEL_STEPS,
    BenchCase,
    layer_config,
)
from compiled_dsa.benchmark.inputs import Caches, LayerInputs, Runnable, random_layer
from compiled_dsa.benchmark.ours import CompiledLayer
from compiled_dsa.benchmark.peers import NotRun, Peers
from compiled_dsa.benchmark.records import Measured
from compiled_dsa.benchmark.reference import Oracle
from compiled_dsa.config import DSAConfig
from compiled_dsa.packing import pack_projections

WARM_UP_STEPS = 3  # of a whole model


@dataclass(frozen=True)
class Clock:
    """How runs are timed; see timing.py."""

    device_us: Callable[..., float] = timing.device_us
    host_us: Callable[..., float] = timing.host_us
    launches: Callable[..., list[timing.Launch]] = timing.launches


class Bench:
    """The cases of one model.

    Args:
        cases: those that will be measured: they say how large the caches are.
        topk: of the composition.
        config: of the layer; None: that of the model.
        backend: of torch.compile, for ours.
    """

    def __init__(
        self,
        model: str,
        cases: Sequence[BenchCase],
        *,
        device: str = "cuda",
        topk: str = "auto",
        clock: Clock | None = None,
        config: DSAConfig | None = None,
        backend: str = "inductor",
    ):
        self._model, self._device, self._backend = model, device, backend
        self._clock = clock or Clock()
        self._config = config or layer_config(model)
        self._tokens = max((case.batch * case.context for case in cases if case.level == LAYER), default=0)
        self._topk = topk
        self._caches: Caches | None = None
        self._models: Any = None

    def measure(self, case: BenchCase) -> Measured:
        """Times, accuracy and launches of ours and the peers of a case. What fails is among ``not_run``, so that the
        other figures of a long run are not lost."""
        measured = Measured()
        if case.level == MODEL:
            self._model_case(case, measured)
        else:
            self._layer_case(case, measured)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return measured

    # ---- one layer ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._caches is None:
            with torch.inference_mode(False):  # parameters made in inference mode cannot be packed
                layer = pack_projections(random_layer(self._config, self._device).requires_grad_(False))
            self._weights = layer.state_dict()
            self._compiled = CompiledLayer(layer, self._backend)
            self._caches = Caches(self._config, self._tokens, self._device)
            self._peers = Peers(self._model, self._config, self._weights, self._topk)

    def _layer_case(self, case: BenchCase, measured: Measured) -> None:
        self._models = None  # frees its memory
        self._prepare()
        inputs = self._caches.inputs(case)
        oracle = Oracle(self._config, self._weights, inputs)
        for mode in case.modes:
            self._one(mode, partial(self._compiled.runnable, mode, inputs), case, inputs, oracle, measured)
        for peer in case.peers:
            self._one(peer, partial(self._peers.runnable, peer, inputs), case, inputs, oracle, measured)
        if COMPOSITION in measured.peers_us:
            measured.notes["composition_libraries"] = self._peers.libraries

    def _one(
        self,
        name: str,
        make: Callable[[], Runnable],
        case: BenchCase,
        inputs: LayerInputs,
        oracle: Oracle,
        measured: Measured,
    ) -> None:
        """Measures one mode or peer."""
        ours = name in case.modes
        times = measured.modes_us if ours else measured.peers_us
        try:
            work = make()
            measured.accuracy[name] = oracle.compare(*work.result())
            times[name] = self._clock.device_us(work.run)
            if work.step is not None:
                measured.host_us[name] = self._clock.host_us(work.step)
            if case.kind == DECODE and name in (case.modes[0], COMPOSITION):
                self._count(name, work, measured)
        except NotRun as reason:
            measured.not_run[name] = str(reason)
        except Exception as error:  # a failure is a result, and what is left is measured
            measured.not_run[name] = first_line(error)
        finally:
            self._caches.restore(inputs.batch.slots)
            gc.collect()

    def _count(self, name: str, work: Runnable, measured: Measured) -> None:
        try:
            measured.launches[name] = self._clock.launches(work.run)
        except RuntimeError as error:  # the times are good without
            measured.notes["launches_not_counted"] = first_line(error)

    # ---- whole models ------------------------------------------------------------------------------------------------

    def _model_case(self, case: BenchCase, measured: Measured) -> None:
        self._caches = None
        for name in (*case.modes, *case.peers):
            try:
                if self._models is None:
                    self._models = self._make_models()
                step = self._models.step(name, case.batch, case.context, self._backend)
                _repeat(step, WARM_UP_STEPS)
                _, seconds = timing.timed(partial(_repeat, step, MODEL_STEPS))
            except Exception as error:
                measured.not_run[name] = first_line(error)
                continue
            times = measured.modes_us if name in case.modes else measured.peers_us
            times[name] = seconds / MODEL_STEPS * 1e6
        if case.modes[0] in measured.modes_us:
            measured.notes["tokens_per_s"] = case.batch * 1e6 / measured.modes_us[case.modes[0]]

    def _make_models(self) -> Any:
        from compiled_dsa.huggingface.benchmark import Models

        return Models(self._model, MODEL_LAYERS, self._device)


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

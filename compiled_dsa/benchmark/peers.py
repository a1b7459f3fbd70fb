"""Who else runs a case: transformers' own layer, and the composition in ``examples/peer_composition.py``."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from compiled_dsa.benchmark.cases import COMPOSITION, HF, HF_COMPILED, HF_EAGER
from compiled_dsa.benchmark.inputs import LayerInputs, Runnable
from compiled_dsa.config import DSAConfig

COMPOSITION_FILE = Path(__file__).parents[2] / "examples" / "peer_composition.py"  # of a checkout


class NotRun(Exception):
    """A peer does not run a case; the message says why."""


def load_composition(path: Path = COMPOSITION_FILE) -> ModuleType:
    """The composition's program as a module, which finds the files beside it; it is no part of the installed package.

    Raises:
        NotRun: there is no such file.
    """
    if not path.is_file():
        raise NotRun(f"{path} is not there: the composition comes with a checkout")
    name = "compiled_dsa_peer_composition"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up by name
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


class Peers:
    """Peers of the layer's level, built when they are first asked for and kept from case to case.

    Args:
        model: model_type.
        weights: of our layer, by transformers' names.
        topk: of the composition, see there.

    Attributes:
        libraries: what the composition calls, by its part; {} before it ran.
    """

    def __init__(self, model: str, config: DSAConfig, weights: Mapping[str, Tensor], topk: str = "auto"):
        self._model, self._config, self._weights, self._topk = model, config, weights, topk
        self._built: dict[str, Any] = {}
        self.libraries: dict[str, str] = {}

    def runnable(self, name: str, inputs: LayerInputs) -> Runnable:
        """Peer ``name`` on a step.

        Raises:
            NotRun: a library is not installed, or the peer is known not to run this size.
            ValueError: no such peer.
        """
        if name not in (COMPOSITION, *HF):
            raise ValueError(f"name={name!r}; it must be one of {', '.join((COMPOSITION, *HF))}")
        if name not in self._built:
            self._built[name] = self._composition() if name == COMPOSITION else self._stock(name)
        built = self._built[name]
        if isinstance(built, NotRun):
            raise built
        if name != COMPOSITION:
            return built.runnable(inputs)
        module, composition = built
        try:
            return module.runnable(composition, inputs)
        except ValueError as error:
            raise NotRun(str(error)) from error

    def _composition(self) -> Any:
        try:
            module = load_composition()
            libraries = module.public_libraries(self._topk)
        except NotRun as reason:
            return reason
        except ImportError as error:
            return NotRun(str(error))
        self.libraries = libraries.names
        return module, module.Composition(self._config, self._weights, libraries)

    def _stock(self, name: str) -> Any:
        try:
            from compiled_dsa.huggingface.benchmark import StockLayer
        except ImportError as error:
            return NotRun(f"transformers is needed: {error}")
        implementation = "eager" if name == HF_EAGER else "sdpa"
        return StockLayer(self._model, self._config, self._weights, implementation, compiled=name == HF_COMPILED)

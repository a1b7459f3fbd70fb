"""What providers share: loading a library, the devices they run on, and what is left to do at a first call."""

import importlib
from collections.abc import Hashable
from types import ModuleType

import torch
from torch import Tensor

HOPPER = (9, 0)


DISTRIBUTIONS = {"deep_gemm": "sgl-deep-gemm", "flash_mla": "sgl-flash-mla", "flashinfer": "flashinfer-python"}


def load(library: str) -> ModuleType:
    """Imports a library.

    Raises:
        ImportError: it is not installed, or was built for another torch, CUDA or system and does not load.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ImportError(f"{error}; {library} is in {DISTRIBUTIONS[library]}") from error
    except Exception as error:  # libraries raise whatever their loader raises
        raise ImportError(f"{library} is installed and does not load: {error}") from error


def refuses_device(pool: Tensor) -> str | None:
    if pool.device.type != "cuda":
        return "needs a CUDA device"
    capability = torch.cuda.get_device_capability(pool.device)
    return None if capability == HOPPER else f"needs compute capability {HOPPER}, this device has {capability}"


def refuses_alignment(pool: Tensor) -> str | None:
    return "the pool is not aligned to 16 bytes" if pool.data_ptr() % 16 else None


class FirstCalls:
    """Which kernels a library has built or loaded in this process, so that a capture never meets that work.

    Args:
        provider: its name, for the message.
    """

    def __init__(self, provider: str):
        self._provider = provider
        self._done: set[Hashable] = set()

    def require(self, key: Hashable) -> None:
        """Raises RuntimeError when a kernel is used for the first time while the current stream is captured."""
        if key in self._done:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._provider} has work to do at its first call with these sizes, which cannot be captured in a "
                f"CUDA graph; call OPS[name].warmup({self._provider!r}, *args), or the op itself, before the capture"
            )

    def done(self, key: Hashable) -> None:
        self._done.add(key)

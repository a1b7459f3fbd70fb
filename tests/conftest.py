"""Fixtures of all tests: which providers of an op run on which devices; ``gpu`` tests are skipped without CUDA."""

import importlib
import os
from dataclasses import dataclass

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before triton is imported


def pytest_collection_modifyitems(items):
    if not CUDA:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors of tests are tiny: more threads only wait for each other, for seconds a generate() on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def one_patch_a_launch():
    """Triton's interpreter patches triton.language again whenever a kernel calls a function: a third of our kernels'
    time. Here once a launch for each module with such functions."""
    interpreter = None if CUDA else importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    patch_lang, patched = interpreter._patch_lang, set()

    def patch_once(function):
        if id(function.__globals__) in patched:
            return interpreter._LangPatchScope()
        launch = not patched
        scope = patch_lang(function)
        patched.add(id(function.__globals__))
        if launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture
def hopper():
    """For tests of kernels that run on Hopper GPUs alone; what serves other GPUs in their place is tested there too."""
    from compiled_dsa.custom_ops.kernels.common import HOPPER

    if not CUDA or torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("its kernel runs on Hopper GPUs alone")


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before, so that compiles can be counted."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclass(frozen=True)
class Backend:
    """A provider and the device on which it runs; calling it runs an op by name."""

    provider: str
    device: str

    @property
    def interpreted(self) -> bool:
        return self.provider == "triton" and self.device == "cpu"

    @property
    def library(self) -> bool:
        """Is it a provider that serves some ops, and of these some sizes, only?"""
        return self.provider in _LIBRARIES

    def __call__(self, name: str, *args) -> None:
        from compiled_dsa.custom_ops import OPS

        reason = OPS[name].refusal(self.provider, *args)
        skipped = self.library or (self.interpreted and "interpreter" in (reason or ""))
        if reason and skipped:
            pytest.skip(f"{self.provider}: {reason}")  # any other refusal is an error, and the call says so
        OPS[name].overload(*args, provider=self.provider)


_GPU = pytest.mark.gpu
_LIBRARIES = ("cublaslt", "deep_gemm", "flash_mla", "flashinfer", "torch")
_BACKENDS = [
    pytest.param(Backend("reference", "cpu"), id="reference-cpu"),
    pytest.param(Backend("reference", "cuda"), id="reference-cuda", marks=_GPU),
    pytest.param(Backend("triton", "cuda"), id="triton-cuda", marks=_GPU),
    *(pytest.param(Backend(name, "cuda"), id=f"{name}-cuda", marks=_GPU) for name in _LIBRARIES),
]
if not CUDA:
    _BACKENDS.insert(1, pytest.param(Backend("triton", "cpu"), id="triton-cpu"))


@pytest.fixture(params=_BACKENDS)
def backend(request) -> Backend:
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_GPU)])
def device(request) -> str:
    return request.param

"""skinny_linear: the product of few rows, against fp64."""

from functools import partial

import pytest
import torch

from compiled_dsa.custom_ops.kernels.common import multiprocessors
from compiled_dsa.custom_ops.providers import cublaslt
from compiled_dsa.testing import poisoned


def multiply(T, N, K, dtype, out_dtype, device, run=torch.ops.compiled_dsa.skinny_linear):
    """(product, the one in fp64, eps of what it was rounded to) of rows and weights that are parts of wider ones."""
    x = torch.randn(T, K + 8, device=device).to(dtype)[:, :K]
    weight = torch.randn(N, K + 16, device=device).to(dtype)[:, :K]
    wide = poisoned(T, N + 8, dtype=out_dtype, device=device)
    run(x, weight, wide[:, :N])
    assert wide[:, N:].isnan().all()
    return wide[:, :N].double(), x.double() @ weight.double().t(), torch.finfo(out_dtype).eps


def tiles_of(device: str, less: int = 0) -> int:
    """Rows of weights that make one tile a multiprocessor, less some."""
    return 64 * multiprocessors(torch.device(device)) - less


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("less", "K"), [(0, 256), (13, 1000), (100, 130)])
@pytest.mark.parametrize("T", [0, 1, 2, 33, 64])
def test_against_fp64(T, less, K, out_dtype, backend):
    """Whole tiles, and rows and columns of weights that end inside one."""
    run = partial(backend, "skinny_linear")
    got, want, eps = multiply(T, tiles_of(backend.device, less), K, torch.float16, out_dtype, backend.device, run)
    library = backend.provider != "triton" and backend.device == "cuda"  # may add partial sums in fp16
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=(1e-4 if library else 4e-6) * K)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("T", "N", "K"), [(1, 5, 0), (1, 0, 3), (0, 3, 3), (65, 70, 64), (2, 100_000, 8), (3, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_the_kernels_leave_to_the_library(T, N, K, dtype, device):
    got, want, eps = multiply(T, N, K, dtype, dtype, device)
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=4e-6 * max(K, 1))


@pytest.mark.parametrize(
    ("T", "N", "dtype", "reason"),
    [
        (65, 512, torch.float16, "x has 65 rows"),
        (2, 64, torch.float16, "weight makes 1 tiles; .* 6.4 to 8"),
        (2, 513, torch.float16, "weight makes 9 tiles"),
        (2, 512, torch.float32, "x has dtype torch.float32; it must be of two bytes"),
    ],
)
def test_reasons(T, N, dtype, reason):
    x, weight, out = (torch.zeros(*shape, dtype=dtype) for shape in ((T, 32), (N, 32), (T, N)))
    with pytest.raises(ValueError, match=reason):
        torch.ops.compiled_dsa.skinny_linear(x, weight, out, provider="triton")


def test_a_preference_is_restored_after_an_error(monkeypatch):
    preferred = ["default"]
    monkeypatch.setattr(
        torch.backends.cuda,
        "preferred_blas_library",
        lambda new=None: preferred.append(new or preferred[-1]) or preferred[-1],
    )
    with pytest.raises(RuntimeError):
        cublaslt.run(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2, 4))
    assert "cublaslt" in preferred and preferred[-1] == "default"


@pytest.mark.gpu
def test_the_preferred_library_stays_what_it_was(recwarn):
    before = torch.backends.cuda.preferred_blas_library()
    x, weight = torch.randn(64, 1024, device="cuda").half(), torch.randn(512, 1024, device="cuda").half()
    out = x.new_empty(64, 512)
    torch.ops.compiled_dsa.skinny_linear(x, weight, out, provider="cublaslt")
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-3, atol=0.1)
    assert torch.backends.cuda.preferred_blas_library() == before
    assert not [warning for warning in recwarn if "blas" in str(warning.message)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_fp32", [False, True])
@pytest.mark.parametrize(("N", "K"), [(7168, 16384), (6144, 16384), (2304, 7168), (8000, 1000)])
@pytest.mark.parametrize("T", [1, 2, 16, 33, 64, 65, 128, 129])
def test_real_sizes(T, N, K, dtype, out_fp32):
    got, want, eps = multiply(T, N, K, dtype, torch.float32 if out_fp32 else dtype, "cuda")
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=1e-6 * K)


@pytest.mark.gpu
def test_rows_do_not_depend_on_their_neighbours():
    x, weight = torch.randn(64, 4096, device="cuda").bfloat16(), torch.randn(7168, 4096, device="cuda").bfloat16()
    together, alone = (torch.empty(64, 7168, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.ops.compiled_dsa.skinny_linear(x, weight, together)
    torch.ops.compiled_dsa.skinny_linear(x[:33], weight, alone[:33])
    assert torch.equal(together[:33], alone[:33])


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        (((3, 32), (24, 31), (3, 24)), torch.float16, "weight has shape"),
        (((3, 32), (24, 32), (24, 3)), torch.float16, "out has shape"),
        (((3, 32), (24, 32), (3, 24)), torch.float64, "out has dtype torch.float64; it must be torch.float16 or"),
    ],
)
def test_refusals(shapes, dtype, message):
    x, weight = (torch.zeros(*shape, dtype=torch.float16) for shape in shapes[:2])
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.skinny_linear(x, weight, torch.zeros(*shapes[2], dtype=dtype))


def test_only_products_of_two_bytes_are_widened():
    x, weight = torch.zeros(3, 32, dtype=torch.float64), torch.zeros(24, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"out has dtype torch.float32; it must be torch.float64$"):
        torch.ops.compiled_dsa.skinny_linear(x, weight, torch.zeros(3, 24))

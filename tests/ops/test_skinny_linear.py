"""skinny_linear: the product of few rows, against fp64."""

from functools import partial

import pytest
import torch

from compiled_dsa.testing import poisoned


def multiply(T, N, K, dtype, out_dtype, device, run=torch.ops.compiled_dsa.skinny_linear):
    """(product, the one in fp64, eps of what it was rounded to) of rows and weights that are parts of wider ones."""
    x = torch.randn(T, K + 8, device=device).to(dtype)[:, :K]
    weight = torch.randn(N, K + 16, device=device).to(dtype)[:, :K]
    wide = poisoned(T, N + 8, dtype=out_dtype, device=device)
    run(x, weight, wide[:, :N])
    assert wide[:, N:].isnan().all()
    return wide[:, :N].double(), x.double() @ weight.double().t(), torch.finfo(out_dtype).eps


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("N", "K"), [(8 * 64, 256), (8 * 64 - 13, 1000), (300, 130), (1, 1), (5, 0), (0, 3)])
@pytest.mark.parametrize("T", [0, 1, 2, 33, 64, 65])
def test_against_fp64(T, N, K, out_dtype, backend):
    """Tiles that end inside, and numbers of tiles and rows that the kernels leave to the library."""
    run = partial(backend, "skinny_linear")
    got, want, eps = multiply(T, N, K, torch.float16, out_dtype, backend.device, run)
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=4e-6 * max(K, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_fp32", [False, True])
@pytest.mark.parametrize(("N", "K"), [(7168, 16384), (6144, 16384), (2304, 7168), (8000, 1000)])
@pytest.mark.parametrize("T", [1, 2, 16, 33, 64, 65])
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
        (((3, 32), (24, 32), (3, 24)), torch.float64, "out has dtype"),
    ],
)
def test_refusals(shapes, dtype, message):
    x, weight = (torch.zeros(*shape, dtype=torch.float16) for shape in shapes[:2])
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.skinny_linear(x, weight, torch.zeros(*shapes[2], dtype=dtype))

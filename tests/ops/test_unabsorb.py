"""unabsorb: one batched product, written row by row."""

import pytest
import torch

from compiled_dsa.testing import poisoned


@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_against_einsum(T, by_head, dtype, device):
    latents = torch.randn(4, T, 32, device=device).transpose(0, 1) if by_head else torch.randn(T, 4, 32, device=device)
    kv_b = torch.randn(4, 40, 32, device=device, dtype=dtype)
    latents, w_uv = latents.to(dtype), kv_b[:, 16:]
    out = poisoned(T, 4, 24, dtype=dtype, device=device)
    torch.ops.compiled_dsa.unabsorb(latents, w_uv, out)
    want = torch.einsum("thl,hvl->thv", latents.double(), w_uv.double())
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("shapes", [(128, 128, 512), (64, 256, 512), (77, 100, 100)])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("T", [1, 2, 33, 64])
def test_few_rows(T, by_head, shapes, backend):
    """Real numbers of heads and sizes, and tiles that end inside."""
    H, V, L = shapes if backend.device == "cuda" else (4, *shapes[1:])  # so many that tiles fill the interpreter's
    latents = torch.randn(H, T, L) if by_head else torch.randn(T, H, L).transpose(0, 1)
    latents = latents.to(backend.device, torch.float16).transpose(0, 1)
    w_uv = torch.randn(H, 16 + V, L, device=backend.device).half()[:, 16:]
    out = poisoned(T, H, V, dtype=torch.float16, device=backend.device)
    backend("unabsorb", latents, w_uv, out)
    want = torch.einsum("thl,hvl->thv", latents.double(), w_uv.double())
    torch.testing.assert_close(out.double(), want, rtol=2.0**-10, atol=4e-6 * L)


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["triton", "reference"])
def test_no_copy(provider):
    """The product goes where it belongs: nothing but the GEMM runs."""
    latents = torch.randn(128, 16, 512, device="cuda").bfloat16().transpose(0, 1)
    w_uv, out = (
        torch.randn(128, 128, 512, device="cuda").bfloat16(),
        torch.empty(16, 128, 128, device="cuda").bfloat16(),
    )
    torch.ops.compiled_dsa.unabsorb(latents, w_uv, out, provider=provider)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.ops.compiled_dsa.unabsorb(latents, w_uv, out, provider=provider)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 4, 32), (4, 24, 31), (3, 4, 24)), "w_uv has shape"),
        (((3, 4, 32), (4, 24, 32), (3, 24, 4)), "out has shape"),
    ],
)
def test_refusals(shapes, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.unabsorb(*(torch.zeros(*shape) for shape in shapes))

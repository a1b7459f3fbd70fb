"""store_tokens: normalised queries and what lies in both pools, against the norms, ropes and stores one by one."""

import pytest
import torch

from compiled_dsa.custom_ops import STORE_TOKENS
from compiled_dsa.custom_ops.layout import FP8, index_pool_shape, latent_pool_shape
from compiled_dsa.testing import dequantised_keys, dequantised_latents

SIZES = [(1536, 512, 64, 128), (96, 128, 32, 64), (60, 160, 16, 32), (32, 128, 0, 64)]  # Q, L, R, D
SLOTS = [5, -1, 191, 0, 192, 64, 2**62]  # of 3 pages: the last, 192 and -1 are outside


def setup(Q, L, R, D, dtype=torch.float32, latents=FP8, product=None, device="cpu"):
    """The op's arguments; q_a, kv and k are columns of one product."""
    T = len(SLOTS)
    torch.manual_seed(1)
    both = torch.randn(T, Q + L + R + D + 7, device=device, dtype=product or dtype) * 3
    q_a, kv, k, _ = both.split([Q, L + R, D, 7], dim=1)
    angle = torch.randn(T, R // 2, device=device)
    shape, storage = latent_pool_shape(3, L, R, latents)
    latent_pool = torch.zeros(shape, dtype=storage, device=device)
    shape, storage = index_pool_shape(3, D, FP8)
    index_pool = torch.zeros(shape, dtype=storage, device=device)

    def weight(n, about=1.0):
        return (torch.randn(n, device=device) * 0.2 + about).to(dtype)

    return [
        latent_pool,
        index_pool,
        torch.full((T, Q), torch.nan, dtype=dtype, device=device),
        q_a,
        kv,
        k,
        weight(Q),
        weight(L),
        weight(D),
        weight(D, 0.0),
        angle.cos(),
        angle.sin(),
        torch.tensor(SLOTS, device=device),
        1e-6,
        1e-5,
    ]


def exact(args, interleaved, index_interleaved):
    """(q_lora, latents, rope, keys) in fp64 of what comes before the norms."""
    q_a, kv, k, q_norm, kv_norm, k_norm, bias, cos, sin = (a.double().cpu() for a in args[3:12])
    L, R = kv_norm.shape[0], 2 * cos.shape[1]

    def rms(x, w):
        return x * (x.pow(2).mean(-1, keepdim=True) + args[13]).rsqrt() * w

    def turned(x, pairs):
        out = x.clone()
        first, second = (slice(0, R, 2), slice(1, R, 2)) if pairs else (slice(0, R // 2), slice(R // 2, R))
        out[:, first] = x[:, first] * cos - x[:, second] * sin
        out[:, second] = x[:, second] * cos + x[:, first] * sin
        return out

    keys = (k - k.mean(-1, keepdim=True)) * (k.var(-1, correction=0, keepdim=True) + args[14]).rsqrt() * k_norm + bias
    return rms(q_a, q_norm), rms(kv[:, :L], kv_norm), turned(kv[:, L:], interleaved), turned(keys, index_interleaved)


def near(got, want, fp8: bool, interpreted: bool, rounding: float = 1e-5):
    """fp8 keeps 3 bits after the leading one; the interpreter's cast to it loses carries of some values."""
    got, want = got.double().cpu(), want.double()
    if not fp8:
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding * float(want.abs().max()))
        return
    off = (got - want).abs() > want.abs() * 2.0**-4 + want.abs().amax(-1, keepdim=True) * (2.0**-9 + rounding)
    assert off.double().mean() < (0.1 if interpreted else 1e-9)
    assert ((got - want).abs() <= want.abs() * 0.6 + want.abs().amax(-1, keepdim=True) * 2.0**-8).all()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("latents", [FP8, torch.float32])
@pytest.mark.parametrize(("interleaved", "index_interleaved"), [(True, False), (False, True)])
def test_against_fp64(backend, sizes, latents, interleaved, index_interleaved):
    _, L, R, _ = sizes
    args = setup(*sizes, latents=latents, device=backend.device)
    backend("store_tokens", *args, interleaved, index_interleaved, False)
    q_lora, want_latents, rope, keys = exact(args, interleaved, index_interleaved)
    near(args[2], q_lora, False, False)
    stored = dequantised_latents(args[0], L, R).flatten(0, 1).cpu()
    stored_keys = dequantised_keys(args[1]).flatten(0, 1).cpu()
    inside = [(row, slot) for row, slot in enumerate(SLOTS) if 0 <= slot < 192]
    rows, slots = (list(x) for x in zip(*inside))
    near(stored[slots, :L], want_latents[rows], latents == FP8, backend.interpreted)
    rounding = 2.0**-7 if latents == FP8 else 1e-5  # rope is bf16 in an fp8 pool
    if R:
        near(stored[slots, L:], rope[rows], False, False, rounding)
    near(stored_keys[slots], keys[rows], True, backend.interpreted)
    untouched = torch.ones(192, dtype=torch.bool)
    untouched[slots] = False
    assert not stored[untouched].any() and not stored_keys[untouched].any()


@pytest.mark.gpu  # triton's interpreter rounds wrongly when it casts fp32 to e4m3 and to bfloat16
@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("latents", [FP8, torch.bfloat16])
@pytest.mark.parametrize("scale_ue8m0", [False, True])
def test_bytes_nearly_equal_the_reference(product, latents, scale_ue8m0):
    """Sums of another order round some codes the other way; nothing else differs."""
    args = setup(1536, 512, 64, 128, torch.bfloat16, latents, product, "cuda")
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    STORE_TOKENS.reference(*want, True, False, scale_ue8m0)
    torch.ops.compiled_dsa.store_tokens(*args, True, False, scale_ue8m0, provider="triton")
    for got, expected in zip(args[:3], want[:3]):
        same = got.view(torch.uint8) == expected.view(torch.uint8)
        assert same.double().mean() > 0.999


def test_products_in_fp32_are_rounded_first(backend):
    if backend.interpreted:
        pytest.skip("triton's interpreter truncates where it casts fp32 to bfloat16")
    args = setup(96, 128, 32, 64, torch.bfloat16, FP8, torch.float32, backend.device)
    rounded = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    for i in (3, 4, 5):
        rounded[i] = rounded[i].bfloat16()
    for a in (args, rounded):
        backend("store_tokens", *a, True, True, True)
    for a, b in zip(args[:3], rounded[:3]):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_no_tokens(backend):
    args = setup(96, 128, 32, 64, device=backend.device)
    pools = [a.clone() for a in args[:2]]
    none = [a[:0] if i in (2, 3, 4, 5, 10, 11, 12) else a for i, a in enumerate(args)]
    backend("store_tokens", *none, True, True, False)
    assert all(torch.equal(a, b) for a, b in zip(args[:2], pools))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (3, lambda a: a[:, 1:], "q_a has shape"),
        (4, lambda a: a[:, :20], "cos has 16 angles"),
        (7, lambda a: a[1:], "kv_norm has shape"),
        (8, lambda a: a[1:], "k_norm has shape"),
        (12, lambda a: a.int(), "slots has dtype"),
        (11, lambda a: a[1:], "sin has shape"),
        (0, lambda a: a[:, :, 1:], "latent_pool has dtype"),
        (1, lambda a: a[:, 1:], "index_pool has dtype torch.uint8 and shape"),
    ],
)
def test_refusals(place, change, message):
    args = setup(96, 128, 32, 64)
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.store_tokens(*args, True, True, False)

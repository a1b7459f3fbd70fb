"""encode_queries: ropes, codes and weights of queries against fp64."""

import pytest
import torch

from compiled_dsa.custom_ops import ENCODE_QUERIES
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.custom_ops.rope import rotate, rotate_part

SIZES = [(128, 128, 64, 64, 128), (5, 16, 32, 3, 64), (33, 24, 16, 9, 32), (4, 16, 0, 8, 64)]  # H, N, R, HI, D


def setup(H, N, R, HI, D, dtype=torch.float32, product=None, device="cpu", T=3):
    torch.manual_seed(2)
    both = torch.randn(T, H * (N + R) + HI * D, device=device, dtype=product or dtype) * 3
    q, index = both.split([H * (N + R), HI * D], dim=1)
    rope, index = q.unflatten(1, (H, N + R))[..., N:], index.unflatten(1, (HI, D))
    if T > 1:
        index[1, 0] = 0.0
    angle = torch.randn(T, R // 2, device=device)
    head_weights = torch.randn(T, HI + 3, device=device)[:, :HI]
    return [
        torch.full((T, H, R), torch.nan, dtype=dtype, device=device),
        torch.zeros(T, HI, D, dtype=torch.uint8, device=device).view(FP8),
        torch.full((T, HI), torch.nan, device=device),
        rope,
        index,
        head_weights,
        angle.cos(),
        angle.sin(),
        0.125,
    ]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("interleaved", "index_interleaved"), [(True, False), (False, True)])
@pytest.mark.parametrize("scale_ue8m0", [False, True])
def test_against_fp64(backend, sizes, interleaved, index_interleaved, scale_ue8m0):
    args = setup(*sizes, device=backend.device)
    backend("encode_queries", *args, interleaved, index_interleaved, scale_ue8m0)
    q_rope, codes, weights, rope, index, head_weights, cos, sin = (a.cpu() for a in args[:8])
    c, s = cos.double()[:, None], sin.double()[:, None]
    torch.testing.assert_close(
        q_rope.double(), rotate(rope.double(), c, s, interleaved=interleaved), rtol=1e-5, atol=1e-5
    )
    want = rotate_part(index.double(), c, s, interleaved=index_interleaved, last=False)
    amax = want.abs().amax(-1).clamp(min=1e-4) / 448
    scale = weights.double() / (head_weights.double() * 0.125)
    if scale_ue8m0:
        assert (scale >= amax * (1 - 1e-5)).all() and (scale < 2 * amax * (1 + 1e-5)).all()
        torch.testing.assert_close(scale.log2().round(), scale.log2(), rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(scale, amax, rtol=1e-5, atol=0)
    got = codes.float().double() * scale[..., None]
    off = (got - want).abs() > want.abs() * 2.0**-4 + amax[..., None] * 448 * 2.0**-9
    assert off.double().mean() < (0.1 if backend.interpreted else 1e-9)
    assert ((got - want).abs() <= want.abs() * 0.6 + amax[..., None] * 2).all()


@pytest.mark.gpu  # triton's interpreter rounds wrongly when it casts fp32 to e4m3 and to bfloat16
@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("T", [1, 200])
def test_nearly_equal_to_the_reference(product, T):
    args = setup(*SIZES[0], torch.bfloat16, product, "cuda", T)
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    ENCODE_QUERIES.reference(*want, True, False, True)
    torch.ops.compiled_dsa.encode_queries(*args, True, False, True, provider="triton")
    for got, expected in zip(args[:2], want[:2]):
        assert (got.view(torch.uint8) == expected.view(torch.uint8)).double().mean() > 0.999
    torch.testing.assert_close(args[2], want[2], rtol=1e-6, atol=0)


def test_no_rows(backend):
    args = setup(*SIZES[1], device=backend.device)
    backend("encode_queries", *(a[:0] if isinstance(a, torch.Tensor) else a for a in args), True, True, False)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda a: a[..., 1:], "q_rope has shape"),
        (1, lambda a: a.view(torch.uint8), "index_q has dtype"),
        (2, lambda a: a.double(), "weights has dtype"),
        (5, lambda a: a[:, 1:], "head_weights has shape"),
        (6, lambda a: a[1:], "cos has shape"),
    ],
)
def test_refusals(place, change, message):
    args = setup(*SIZES[1])
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.encode_queries(*args, True, True, False)

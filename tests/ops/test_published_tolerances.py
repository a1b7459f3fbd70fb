"""The tolerances that FlashMLA and DeepGEMM publish for their kernels hold for every provider of ours, theirs included.

An element is right within the absolute or the relative bound; on top, the tensors as a whole may differ by a bound on
1 - 2<x, y> / (|x|^2 + |y|^2). Inputs are of the size that FlashMLA's tests use, a tenth of a unit.
"""

import pytest
import torch

from compiled_dsa.custom_ops import INDEX_TOPK_DECODE, SPARSE_MLA_DECODE
from compiled_dsa.custom_ops.layout import FP8, PAGE, latent_pool_shape
from compiled_dsa.custom_ops.store_latents import store_latents
from compiled_dsa.testing import (
    attention_oracle,
    dequantised_keys,
    index_scores_oracle,
    poisoned,
    random_index_pool,
    random_page_table,
)

pytestmark = pytest.mark.gpu

K = 2048
OUT = {FP8: (1e-3, 2.01 / 128, 5e-6), torch.bfloat16: (8e-4, 3.01 / 128, 7e-6)}  # absolute, relative, whole
LSE = {FP8: (1e-6, 8.01 / 65536), torch.bfloat16: (1e-6, 2.01 / 65536)}


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


def check(got, want, absolute: float, relative: float) -> None:
    error = (got.double() - want).abs()
    wrong = (error > absolute) & (error > relative * want.abs())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements, the largest off by {float(error.max())}"


def tenth(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") / 10).bfloat16()


@pytest.mark.parametrize("provider", SPARSE_MLA_DECODE.providers)
@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("T", [1, 33])
def test_attention(provider, dtype, H, T):
    pages = 200
    shape, storage = latent_pool_shape(pages, 512, 64, dtype)
    pool = torch.zeros(shape, dtype=storage, device="cuda")
    slots = torch.arange(pages * PAGE, device="cuda")
    store_latents(pool, tenth(pages * PAGE, 512), tenth(pages * PAGE, 64), slots)
    topk = torch.stack([torch.randperm(pages * PAGE, device="cuda")[:K] for _ in range(T)]).int()
    count = torch.full((T,), K, dtype=torch.int32, device="cuda")
    args = (tenth(T, H, 512), tenth(T, H, 64), pool, topk, count, topk[:, :1], count * 0, 576**-0.5, None)
    out = poisoned(T, H, 512, dtype=torch.bfloat16, device="cuda")
    lse = poisoned(T, H, dtype=torch.float32, device="cuda")
    reason = SPARSE_MLA_DECODE.refusal(provider, *args, out, lse)
    if reason:
        pytest.skip(reason)
    SPARSE_MLA_DECODE.overload(*args, out, lse, provider=provider)
    want, want_lse = attention_oracle(*args)
    check(out, want, *OUT[dtype][:2])
    check(lse, want_lse, *LSE[dtype])
    assert difference(out.double(), want) < OUT[dtype][2]


def triton_scores(q, weights, pool, table, requests, visible, rows_per_request=1):
    from compiled_dsa.custom_ops.kernels.index_scores import write_scores

    scores = poisoned(q.shape[0], table.shape[1] * PAGE, dtype=torch.float32, device="cuda")
    write_scores(q, weights, pool, table, requests, visible, scores, scores, 0, 0, rows_per_request)
    return scores


def prefill_scores(*args):
    return triton_scores(*args, rows_per_request=64)


def deep_gemm_scores(q, weights, pool, table, requests, visible):
    chosen = torch.empty(q.shape[0], K, dtype=torch.int32, device="cuda")
    reason = INDEX_TOPK_DECODE.refusal("deep_gemm", q, weights, pool, table, requests, visible, chosen, False)
    if reason:
        pytest.skip(reason)
    from compiled_dsa.custom_ops.providers.deep_gemm import decode_scores

    return decode_scores(q, weights, pool, table, requests, visible, 0)


@pytest.mark.parametrize("scores_of", [triton_scores, prefill_scores, deep_gemm_scores])
@pytest.mark.parametrize("HI", [32, 64])
def test_scores(scores_of, HI):
    """Against the same quantised numbers in fp64, by each row's own keys."""
    table = random_page_table(5, 64, 400, "cuda")
    pool = random_index_pool(400, 128, FP8, "cuda")
    assert dequantised_keys(pool).isfinite().all()
    q, weights = torch.randn(5, HI, 128, device="cuda").to(FP8), torch.randn(5, HI, device="cuda")
    requests = torch.arange(5, dtype=torch.int32, device="cuda")
    visible = torch.tensor([4096, 1, 64, 2000, 4095], dtype=torch.int32, device="cuda")
    scores = scores_of(q, weights, pool, table, requests, visible)
    want, _, _ = index_scores_oracle(q, weights, pool, table, requests, visible)
    inside = torch.arange(4096, device="cuda") < visible[:, None]
    assert difference(scores[inside].double(), want[inside]) < 5e-6

"""One small call of every kernel of ours, for compute-sanitizer. On a GPU, from the top of the checkout:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m pytest -m gpu tests/ops/test_sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m pytest -m gpu tests/ops/test_sanitize.py

Without torch's caching every tensor is an allocation of its own, so that reads past its end are seen; no size here is a
multiple of a kernel's block.
"""

import pytest
import torch

from compiled_dsa.cli.overview import sample_arguments
from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.kernels.common import HOPPER, multiprocessors
from compiled_dsa.custom_ops.kernels.index_scores import on_hopper
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.testing import (
    check_topk,
    index_scores_oracle,
    random_index_pool,
    random_latent_pool,
    random_page_table,
)

pytestmark = pytest.mark.gpu

T = 5
ops = torch.ops.compiled_dsa


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.fixture(autouse=True)
def finished():
    """Errors of a kernel come up in the test that launched it."""
    yield
    torch.cuda.synchronize()


def random(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
def test_stores(pool_dtype):
    slots = torch.tensor([0, -1, 191, 192, 64], device="cuda")
    latents, keys = random_latent_pool(3, 512, 64, pool_dtype, "cuda"), random_index_pool(3, 128, pool_dtype, "cuda")
    ops.store_latents(latents, random(T, 512), random(T, 64), slots)
    ops.store_index_keys(keys, random(T, 128), slots, False)


@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
def test_between_gemms(pool_dtype):
    """Odd numbers of heads, a rank of queries and groups of latents that are padded."""
    Q, L, R, D, H, HI = 1000, 448, 48, 96, 35, 11
    slots = torch.tensor([0, -1, 191, 192, 64], device="cuda")
    pools = random_latent_pool(3, L, R, pool_dtype, "cuda"), random_index_pool(3, D, FP8, "cuda")
    products, norms = (random(T, Q), random(T, L + R), random(T, D)), (random(Q), random(L), random(D), random(D))
    angles, q_lora = (random(T, R // 2, dtype=torch.float32), random(T, R // 2, dtype=torch.float32)), random(T, Q)
    ops.store_tokens(*pools, q_lora, *products, *norms, *angles, slots, 1e-6, 1e-6, True, False, False)
    codes, weights = random(T, HI, D, dtype=FP8), random(T, HI, dtype=torch.float32)
    ops.encode_queries(
        random(T, H, R), codes, weights, random(T, H, R), random(T, HI, D), random(T, HI), *angles, 1.0, True, False,
        True,
    )  # fmt: skip
    ops.unabsorb(random(T, H, L), random(H, D, L), random(T, H, D))


@pytest.mark.parametrize("T", [1, 5])
def test_skinny_linear(T):
    """Rows and columns of weights that end inside a tile."""
    N = 64 * multiprocessors(torch.device("cuda")) - 13
    ops.skinny_linear(random(T, 1000), random(N, 1000), random(T, N))


def test_batch_metadata():
    ops.batch_metadata(*sample_arguments("batch_metadata", torch.bfloat16, torch.device("cuda")))


@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["index_topk_decode", "index_topk_prefill"])
@pytest.mark.parametrize("columns", [3, 300])
@pytest.mark.parametrize("deterministic", [False, True])
def test_index_topk(pool_dtype, name, columns, deterministic):
    """Short rows, and rows so long that they are narrowed down by maxima first; keys as they come and in order."""
    table = random_page_table(2, columns, 2 * columns + 1, "cuda")
    pool = random_index_pool(2 * columns + 1, 64, pool_dtype, "cuda")
    longest = 64 * columns
    rows = (table, int32(0, 0, 1, 1, 1), int32(longest, 0, 7, longest - 3, 100))
    q, weights, chosen = random(T, 24, 64, dtype=pool_dtype), random(T, 24, dtype=torch.float32), int32(*[0] * 33 * T)
    chosen = chosen.view(T, 33)
    args = (q, weights, pool, *rows, chosen, deterministic)
    OPS[name].overload(*args, *([1 << 20] if name == "index_topk_prefill" else []), provider="triton")
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_index_topk_on_hopper():
    """A tile of two requests, the last of five rows, pages outside the pool at the end and in front of it."""
    table, rows = random_page_table(2, 20, 40, "cuda"), 133
    table[0, 3], table[1, 5] = -1, 40
    requests = (torch.arange(rows, device="cuda") >= 70).int()
    visible = torch.arange(rows, device="cuda", dtype=torch.int32) + 1100
    pool, q = random_index_pool(40, 128, FP8, "cuda"), random(rows, 64, 128, dtype=FP8)
    weights, chosen = random(rows, 64, dtype=torch.float32), int32(*[0] * 33 * rows).view(rows, 33)
    assert on_hopper(q, pool, 0, rows // 2, 0, None) == (torch.cuda.get_device_capability() == HOPPER)
    ops.index_topk_prefill(q, weights, pool, table, requests, visible, chosen, False, 1 << 20, provider="triton")
    check_topk(chosen, visible, *index_scores_oracle(q, weights, pool, table, requests, visible))


def test_select_and_absorb():
    """Products beside the selection; of the kernel's sizes only the rows may be odd."""
    pool, rows = random_index_pool(7, 64, FP8, "cuda"), (random_page_table(2, 3, 7, "cuda"), int32(0, 0, 1, 1, 1))
    q, weights, chosen = random(T, 24, 64, dtype=FP8), random(T, 24, dtype=torch.float32), int32(*[0] * 33 * T)
    select = (q, weights, pool, *rows, int32(192, 0, 7, 189, 100), chosen.view(T, 33), False)
    q_latent, kv_b = random(T, 9, 128), random(9, 107, 128)
    ops.select_and_absorb(*select, random(T, 9, 64), kv_b[:, :64], q_latent, provider="triton")
    assert q_latent.isfinite().all()


def selection(pages: int, paged: bool) -> tuple:
    topk = torch.stack([torch.randperm(pages * 64, device="cuda")[:135] for _ in range(T)]).int()
    topk[:, 7], topk[1, 20:] = -1, 2**31 - 1
    table = random_page_table(2, 3, pages, "cuda")
    return None if paged else topk, int32(135, 20, 0, 64, 129), table, int32(0, 1, 1, 0, 1)


@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("H", "sinks"), [(9, True), (64, False)])
def test_attention(pool_dtype, paged, H, sinks):
    """On Hopper all of these are Gluon kernels', cut into splits of a block, but the prefill of 9 heads."""
    pool = random_latent_pool(6, 512, 64, pool_dtype, "cuda")
    args = (pool, *selection(6, paged))
    sink = random(H, dtype=torch.float32) if sinks else None
    out, lse = random(T, H, 512), random(T, H, dtype=torch.float32)
    ops.sparse_mla_decode(random(T, H, 512), random(T, H, 64), *args, 0.05, sink, out, lse, provider="triton")
    assert out.isfinite().all()
    kv_b, values = random(H, 72, 512) * 0.05, random(T, H, 40)
    ops.mla_prefill(random(T, H, 32), random(T, H, 64), *args, kv_b, 0.05, sink, values, 1 << 24, provider="triton")
    assert values.isfinite().all()


@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("H", [9, 17, 64])
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_in_steps_of_two_blocks(pool_dtype, H, splits):
    """The Gluon kernels as longer selections have them, with more tiles than programs."""
    from compiled_dsa.custom_ops.kernels import sparse_mla_hopper

    pool, rows = random_latent_pool(6, 512, 64, pool_dtype, "cuda"), 30 * T
    topk, count, table, requests = (x.repeat(30, *[1] * (x.dim() - 1)) for x in selection(6, False))
    q, rope, out, lse = random(rows, H, 512), random(rows, H, 64), random(rows, H, 512), torch.zeros(rows, H).cuda()
    if reason := sparse_mla_hopper.refuses(q, rope, pool, 0.05, out):
        pytest.skip(reason)
    args = (q, rope, pool, topk, count, table[:2], requests, 0.05, random(H, dtype=torch.float32), out, lse)
    sparse_mla_hopper.launch(*args, sparse_mla_hopper.Cut(splits, 2), topk.shape[1])
    assert out.isfinite().all()


def test_index_keys_laid_end_to_end():
    from compiled_dsa.custom_ops.kernels.gather_index_keys import gather_index_keys, mark_weights

    pool, table = random_index_pool(3, 64, FP8, "cuda"), int32(2, -1, 0, 3)[None]
    keys, scales = gather_index_keys(pool, table)
    assert keys.shape == (256, 64) and scales.isnan().view(4, 64).all(1).tolist() == [False, True, False, True]
    weights = random(T, 7, dtype=torch.float32)
    assert torch.equal(mark_weights(random(T, 7, 64).to(FP8), weights), weights)


def test_fp8_pages_dequantised():
    """Whole pools, and the pages of a table with entries outside the pool."""
    from compiled_dsa.custom_ops.kernels.dequantise import dequantise, dequantise_pages, renumber

    pool, table = random_latent_pool(3, 512, 64, FP8, "cuda"), int32(2, -1, 0, 3)[None]
    whole = dequantise(pool, 512, 64)
    assert whole.isfinite().all()
    pages, places = dequantise_pages(pool, table, 512, 64)
    assert torch.equal(pages[[0, 2]], whole[[2, 0]]) and places.tolist() == [2, -1, 0]
    ids = int32(130, 64, 5, -1, 192)[None]
    assert renumber(ids, places, 64, torch.empty_like(ids)).tolist() == [[2, -1, 133, -1, -1]]


def test_what_stands_around_libraries():
    """The adapters' kernels, which the providers of libraries launch."""
    from compiled_dsa.custom_ops.kernels import adapters

    table = random_page_table(2, 5, 11, "cuda")
    table[1, 2] = 11
    rows = (table, int32(0, 0, 1, 1, 1), int32(320, 0, 7, 317, 100))
    adapters.rows_of_pages(*rows, 11, 33)
    for group in (0, 4):
        scores, maxima = random(T, 320, dtype=torch.float32), random(T, 80, dtype=torch.float32)
        adapters.mark_pages(scores, maxima, *rows, 11, 33, group)
    adapters.order_scores(scores, rows[2], 33)
    chosen = torch.zeros(T, 33, dtype=torch.int32, device="cuda")
    adapters.write_positions(scores.topk(33).indices, scores, *rows, chosen, 11)
    adapters.write_positions(scores.topk(33).indices, scores, *rows, None, 11, chosen)
    topk, count, _, _ = selection(6, False)
    adapters.clean_ids(topk, count, 6, 64)
    adapters.write_attention(
        random(T, 64, 512), random(T, 64, dtype=torch.float32), random(T, 9, 512), random(T, 9, dtype=torch.float32)
    )

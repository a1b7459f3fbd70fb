"""Scores of prefills that have a kernel of their own on Hopper, against the kernel that everything else takes."""

import pytest
import torch

from compiled_dsa.custom_ops.index_topk import INDEX_TOPK_PREFILL
from compiled_dsa.custom_ops.kernels import index_scores
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import check_topk, index_scores_oracle, poisoned, random_index_pool
from tests.ops.index_cases import prefill_batch, queries

D, K = 128, 40


def on_hopper(q, pool, rows_per_request=1000, group=0, forced=0, zeroed=None):
    return index_scores.on_hopper(q, pool, group, rows_per_request, forced, zeroed)


def hard_batch(extend, prefix, HI):
    """(q, weights, pool, page table, requests, visible): pages outside the pool, keys that are NaN, weights whose rows
    lie apart, one of them NaN."""
    (table, requests, visible), pages = prefill_batch(extend, prefix, "cuda")
    table[0, 1], table[-1, 2], table[-1, 3] = -1, pages, 2**31 - 1
    pool = random_index_pool(pages, D, FP8, "cuda")
    pool[table[0, 0], 5 * D] = 0x7F  # an element of a key
    q, weights = queries(len(requests), HI, D, FP8, "cuda")
    apart = poisoned(len(requests), HI + 3, dtype=torch.float32, device="cuda")[:, :HI].copy_(weights)
    apart[2, 1] = torch.nan
    return q, apart, pool, table, requests, visible


@pytest.mark.gpu
@pytest.mark.parametrize("HI", index_scores.HOPPER_HEADS)
@pytest.mark.parametrize(
    ("extend", "prefix"),
    [
        ([64], [9000]),  # few tiles: many programs share the keys of one
        ([70, 1, 130, 3, 190], [0, 300, 1000, 37, 64]),  # tiles of several requests, rows of at most K keys
        ([1500], [0]),
        ([700, 900], [5000, 0]),
    ],
)
def test_the_same_bits(hopper, monkeypatch, HI, extend, prefix):
    q, weights, pool, *rows = hard_batch(extend, prefix, HI)
    rows_per_request = len(q) // len(extend)

    def scores():
        out = poisoned(len(q), rows[0].shape[1] * PAGE, dtype=torch.float32, device="cuda")
        index_scores.write_scores(q, weights, pool, *rows, out, out, K, 0, rows_per_request)
        return out

    assert on_hopper(q, pool, rows_per_request)
    found = scores()
    monkeypatch.setattr(index_scores, "on_hopper", lambda *args: False)
    seen = torch.arange(found.shape[1], device="cuda") < rows[2][:, None]
    seen &= rows[2][:, None] > K
    found, want = found[seen], scores()[seen]
    assert want.isnan().any() and want.isfinite().any()
    assert torch.equal(found.nan_to_num(nan=-1e30), want.nan_to_num(nan=-1e30))


@pytest.mark.gpu
@pytest.mark.parametrize("HI", index_scores.HOPPER_HEADS)
@pytest.mark.parametrize(("deterministic", "together"), [(False, 100), (True, 100), (True, 1)])
def test_choices(hopper, HI, deterministic, together):
    """Of rows in several slices, down to one of one row, long enough for lists."""
    q, weights, pool, *rows = hard_batch([150, 90], [8500, 700], HI)
    chosen = poisoned(len(q), K, dtype=torch.int32, device="cuda")
    scratch = together * 4 * PAGE * rows[0].shape[1]
    assert on_hopper(q, pool, len(q) // 2)
    INDEX_TOPK_PREFILL.overload(q, weights, pool, *rows, chosen, deterministic, scratch, provider="triton")
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


@pytest.mark.gpu
def test_what_copies_of_tiles_cannot_take(hopper):
    """Goes to the other kernel: queries with gaps, pools that are views, other sizes, tokens that are always chosen."""
    q, pool = torch.zeros(100, 64, D, device="cuda").to(FP8), random_index_pool(3, D, FP8, "cuda")
    assert on_hopper(q, pool)
    shifted = torch.zeros(q.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(FP8).view(q.shape)
    apart = torch.zeros(100, 2, 64, D, device="cuda").to(FP8)[:, 0]
    for other in (shifted, apart, q[:, :24].contiguous(), q[..., :64].contiguous()):
        assert not on_hopper(other, pool)
    wide = torch.zeros(3, 2, *pool.shape[1:], dtype=torch.uint8, device="cuda")[:, 0]
    for other in (wide, random_index_pool(3, D, torch.bfloat16, "cuda")):
        assert not on_hopper(q, other)
    assert not on_hopper(q, pool, rows_per_request=index_scores.HOPPER_ROWS - 1)
    assert not on_hopper(q, pool, group=4) and not on_hopper(q, pool, forced=1) and not on_hopper(q, pool, zeroed=q)


@pytest.mark.gpu
def test_queries_with_gaps_are_scored(hopper):
    q, weights, pool, *rows = hard_batch([100], [500], 64)
    apart = torch.zeros(100, 2, 64, D, device="cuda").to(FP8)
    apart[:, 0] = q
    chosen = [poisoned(100, K, dtype=torch.int32, device="cuda") for _ in range(2)]
    for queries_of, out in zip((q, apart[:, 0]), chosen):
        INDEX_TOPK_PREFILL.overload(queries_of, weights, pool, *rows, out, True, 1 << 20, provider="triton")
    assert torch.equal(*chosen)


def test_programs_that_share_the_keys_of_a_tile():
    from compiled_dsa.custom_ops.kernels.index_scores_gluon import MOST_SPLITS, splits_of_tiles

    assert splits_of_tiles(tiles=512, rows=8, requests=1, pages=512, programs=132) == 1
    assert splits_of_tiles(tiles=8, rows=8, requests=1, pages=512, programs=132) == 16  # 128 of 132 programs
    # a tile of decode rows beside a prefill: 8 requests' keys, one after the other
    alone, mixed = (splits_of_tiles(257, 8, requests, 2048, 132) for requests in (1, 9))
    assert alone < mixed <= MOST_SPLITS

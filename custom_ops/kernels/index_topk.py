"""index_topk in Triton: scores of a slice of rows into scratch, then an exact selection, one program a row.

The scores kernel multiplies a block of keys with all index heads of up to ``128 / HI`` rows at once, so that rows of a
request share the loads of its keys. The selection finds the K-th largest score by its bits, eight at a time, and then
writes slots in the order of positions: of equal scores the lowest positions win, with and without ``deterministic``.
Rows that see at most K keys take them all; their scores are neither computed nor read.

Legend: HI index heads, D index head dim, P pages, W columns of the page table.
"""

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import (
    dot_precision,
    multiprocessors,
    paged_slots,
    refuses_device,
    refuses_dot,
    refuses_dtype,
    refuses_strides,
)
from compiled_dsa.custom_ops.layout import PAGE, split_index_pool

_PAGE = tl.constexpr(PAGE)
_DIGIT_BITS = tl.constexpr(8)
_BINS = tl.constexpr(256)

SELECT_BLOCK = 4096  # at most 2^15: counts of a block share an int32
SELECT_WARPS = 8
TILE_COLUMNS = 128  # rows * index heads of one tile of scores
WAVES = 4  # programs a multiprocessor, where the rows are too few to fill the device


def refuses(q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, scratch_bytes=0) -> str | None:
    model_dtype = {} if pool.dtype == torch.uint8 else {"q": q}
    return (
        refuses_device(pool)
        or refuses_dtype(weights=weights, **model_dtype)
        or refuses_dot(q.dtype)
        or refuses_strides(
            q=q,
            weights=weights,
            page_table=page_table,
            req_of_row=req_of_row,
            visible=visible,
            topk_out=topk_out,
        )
    )


@triton.jit(do_not_specialize=["rows", "columns", "pages", "K"])
def _scores(
    q,  # [rows, HI, D]
    weights,  # [rows, HI]
    keys,  # [P, 64, D]
    key_scales,  # [P, 64], for an fp8 pool
    page_table,  # [B, W]
    req_of_row,  # [rows]
    visible,  # [rows]
    scores,  # [rows, 64 W]
    rows,
    columns,
    pages,
    K,
    q_row,
    q_head,
    weights_row,
    keys_page,
    scales_page,
    table_row,
    scores_row,
    HI: tl.constexpr,
    HI_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    lane = tl.arange(0, ROWS)
    row = first + lane
    request = tl.load(req_of_row + row, mask=row < rows, other=-1)
    seen = tl.minimum(tl.load(visible + row, mask=row < rows, other=0), columns)
    seen = tl.where(seen > K, seen, 0)
    if tl.max(seen, axis=0) == 0:
        return

    # one column of the tile is one head of one row
    column = tl.arange(0, ROWS * HI_PADDED)
    head = column % HI_PADDED
    column_row = first + column // HI_PADDED
    real = (column_row < rows) & (head < HI)
    d = tl.arange(0, D_PADDED)
    q_offsets = column_row.to(tl.int64) * q_row + head * q_head
    q_tile = tl.load(q + q_offsets[None, :] + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0)
    w = tl.load(weights + column_row.to(tl.int64) * weights_row + head, mask=real, other=0.0)

    # Pass r serves the rows of the tile that belong to the request of row r. Nearly always pass 0 serves them all.
    for r in range(ROWS):
        this = tl.sum(tl.where(lane == r, request, 0), axis=0)
        same = request == this
        served = tl.sum((same & (lane < r)).to(tl.int32), axis=0) > 0
        last = tl.where(served, 0, tl.max(tl.where(same, seen, 0), axis=0))
        table = page_table + this.to(tl.int64) * table_row
        for start in range(tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
            position = start + tl.arange(0, BLOCK)
            slot = paged_slots(table, position, position < last, pages)
            there = slot >= 0
            page = tl.where(there, slot // _PAGE, 0)
            offset = position % _PAGE
            key_offsets = page * keys_page + offset * D
            key = tl.load(keys + key_offsets[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
            dots = tl.dot(key, q_tile, input_precision=PRECISION)
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if HI != HI_PADDED:  # a padded head of zeros times an infinite key is NaN
                dots = tl.where(real[None, :], dots, 0.0)
            score = tl.sum(tl.reshape(dots * w[None, :], [BLOCK, ROWS, HI_PADDED]), axis=2)
            if FP8:
                score *= tl.load(key_scales + page * scales_page + offset, mask=there, other=0.0)[:, None]
            score = tl.where(there[:, None], score, float("nan"))
            wanted = same[None, :] & (position[:, None] < seen[None, :])
            tl.store(scores + row.to(tl.int64)[None, :] * scores_row + position[:, None], score, mask=wanted)


@triton.jit
def _order_keys(line, position, inside):
    """Scores -> uint32 in the same order; -0.0 equals 0.0; NaN becomes 0, which no other score does."""
    score = tl.load(line + position, mask=inside, other=float("nan"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score != score, tl.zeros_like(key), key)


@triton.jit
def _kth_key(line, n, K, BLOCK: tl.constexpr):
    """(the K-th largest order key of n > K scores, how many of the K largest equal it)."""
    threshold = tl.full([], 0, tl.uint32)
    wanted = K
    bins = tl.arange(0, _BINS)
    for shift in tl.static_range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = tl.zeros([_BINS], tl.int32)
        for start in range(0, n, BLOCK):
            position = start + tl.arange(0, BLOCK)
            key = _order_keys(line, position, position < n)
            candidate = position < n
            if shift < 32 - _DIGIT_BITS:
                candidate = candidate & ((key ^ threshold) >> (shift + _DIGIT_BITS) == 0)
            counts += tl.histogram(((key >> shift) & (_BINS - 1)).to(tl.int32), _BINS, mask=candidate)
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        digit = tl.max(tl.where(at_least >= wanted, bins, 0), axis=0)
        wanted -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
        threshold = threshold | (digit.to(tl.uint32) << shift)
    return threshold, wanted


@triton.jit(do_not_specialize=["columns", "pages", "K"])
def _select(
    scores,  # [rows, 64 W]
    page_table,
    req_of_row,
    visible,
    topk_out,  # [rows, K]
    columns,
    pages,
    K,
    table_row,
    scores_row,
    out_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(visible + row), columns)
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    out = topk_out + row * out_row
    lane = tl.arange(0, BLOCK)
    if n <= K:
        for start in range(0, K, BLOCK):
            position = start + lane
            slot = paged_slots(table, position, position < n, pages)
            tl.store(out + position, slot.to(tl.int32), mask=position < K)
    else:
        line = scores + row * scores_row
        threshold, ties = _kth_key(line, n, K, BLOCK)
        above = 0
        equal = 0
        for start in range(0, n, BLOCK):
            position = start + lane
            key = _order_keys(line, position, position < n)
            is_above = key > threshold
            is_equal = (key == threshold) & (key != 0)
            both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)  # one prefix sum counts both
            before = tl.cumsum(both, axis=0) - both
            total = tl.sum(both, axis=0)
            equal_before = equal + (before >> 16)
            taken = is_above | (is_equal & (equal_before < ties))
            place = above + (before & 0xFFFF) + tl.minimum(equal_before, ties)
            slot = paged_slots(table, position, taken, pages)
            tl.store(out + place, slot.to(tl.int32), mask=taken)
            above += total & 0xFFFF
            equal += total >> 16
        # short when fewer than K scores are numbers
        found = above + tl.minimum(equal, ties)
        for start in range(0, K, BLOCK):
            position = start + lane
            tl.store(out + position, tl.full([BLOCK], -1, tl.int32), mask=(position >= found) & (position < K))


def _write_scores(q, weights, pool, page_table, req_of_row, visible, scores, K: int) -> None:
    rows, HI, D = q.shape
    keys, key_scales = split_index_pool(pool)
    fp8 = key_scales is not None
    exact = q.dtype == torch.float32
    HI_padded = max(16, triton.next_power_of_2(HI))
    # as many rows of a tile as requests have on average, so that decoding one token a request wastes none
    rows_per_request = max(1, rows // page_table.shape[0])
    tile_rows = 1 if exact else max(1, min(TILE_COLUMNS // HI_padded, 1 << (rows_per_request.bit_length() - 1)))
    block = 16 if exact else 128
    tiles = triton.cdiv(rows, tile_rows)
    splits = min(triton.cdiv(scores.shape[1], block), triton.cdiv(WAVES * multiprocessors(q.device), tiles))
    _scores[(tiles, splits)](
        q,
        weights,
        keys,
        key_scales if fp8 else weights,
        page_table,
        req_of_row,
        visible,
        scores,
        rows,
        scores.shape[1],
        pool.shape[0],
        K,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        keys.stride(0),
        key_scales.stride(0) if fp8 else 0,
        page_table.stride(0),
        scores.stride(0),
        HI=HI,
        HI_PADDED=HI_padded,
        D=D,
        D_PADDED=max(32, triton.next_power_of_2(D)),
        ROWS=tile_rows,
        BLOCK=block,
        FP8=fp8,
        PRECISION=dot_precision(q.dtype),
        num_warps=8 if tile_rows * HI_padded > 64 else 4,
        num_stages=1 if exact else 3,
    )


def run(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, scratch_bytes: int | None = None
) -> None:
    """Rows are cut so that their scores fit into ``scratch_bytes``; without a bound they are scored together."""
    T, K = topk_out.shape
    if T == 0 or K == 0:
        return
    columns = page_table.shape[1] * PAGE
    scored = columns > K and page_table.shape[0] > 0
    rows_at_once = T
    if scored and scratch_bytes is not None:
        rows_at_once = min(T, scratch_bytes // (4 * columns))
    scores = torch.empty(rows_at_once if scored else 0, columns, dtype=torch.float32, device=q.device)
    for start in range(0, T, rows_at_once):
        part = slice(start, min(start + rows_at_once, T))
        line = (page_table, req_of_row[part], visible[part])
        if scored:
            _write_scores(q[part], weights[part], pool, *line, scores, K)
        _select[(part.stop - part.start,)](
            scores,
            *line,
            topk_out[part],
            columns,
            pool.shape[0],
            K,
            page_table.stride(0),
            scores.stride(0),
            topk_out.stride(0),
            BLOCK=min(SELECT_BLOCK, triton.next_power_of_2(max(columns, 128))),
            num_warps=SELECT_WARPS,
        )

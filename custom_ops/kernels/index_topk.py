"""index_topk in Triton: scores of a slice of rows into scratch, then an exact selection, one program a row.

The scores kernel multiplies a block of keys with all index heads of up to ``128 / HI`` rows at once, so that rows of a
request share the loads of its keys. The selection finds the K-th largest score by counting, and then writes slots in
the order of positions: of equal scores the lowest positions win, with and without ``deterministic``.
Rows that see at most K keys take them all; their scores are neither computed nor read.

Legend: HI index heads, D index head dim, P pages, W columns of the page table.
"""

from typing import NamedTuple

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

HELD_SCORES = 1 << 15  # scores that a program of 32 warps holds in registers
WRITE_PER_THREAD = 8
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
    PAGE: tl.constexpr,
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

    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(1) * BLOCK
    begin = tl.program_id(1) * BLOCK
    # Pass r serves the rows of the tile that belong to the request of row r. Nearly always pass 0 serves them all.
    for r in range(ROWS):
        this = tl.sum(tl.where(lane == r, request, 0), axis=0)
        same = request == this
        served = tl.sum((same & (lane < r)).to(tl.int32), axis=0) > 0
        last = tl.where(served, 0, tl.max(tl.where(same, seen, 0), axis=0))
        table = page_table + this.to(tl.int64) * table_row
        page = tl.load(table + begin // PAGE, mask=begin < last, other=-1)
        for start in range(begin, last, step):
            ahead = start + step  # the page of the next block is read while this one is worked on
            page_ahead = tl.load(table + ahead // PAGE, mask=ahead < last, other=-1)
            good = (page >= 0) & (page < pages)
            page = tl.where(good, page, 0).to(tl.int64)
            offset = start % PAGE
            key_offsets = (lanes * D)[:, None] + d[None, :]
            # unmasked: the page is one of the pool, and what is no key of the row is not stored
            if D == D_PADDED:
                key = tl.load(keys + page * keys_page + offset * D + key_offsets)
            else:
                key = tl.load(keys + page * keys_page + offset * D + key_offsets, mask=(d < D)[None, :], other=0.0)
            dots = tl.dot(key, q_tile, input_precision=PRECISION)
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if HI != HI_PADDED:  # a padded head of zeros times an infinite key is NaN
                dots = tl.where(real[None, :], dots, 0.0)
            score = tl.sum(tl.reshape(dots * w[None, :], [BLOCK, ROWS, HI_PADDED]), axis=2)
            if FP8:
                score *= tl.load(key_scales + page * scales_page + offset + lanes)[:, None]
            score = tl.where(good, score, float("nan"))
            position = start + lanes
            wanted = same[None, :] & (position[:, None] < seen[None, :])
            tl.store(scores + row.to(tl.int64)[None, :] * scores_row + position[:, None], score, mask=wanted)
            page = page_ahead


@triton.jit
def _to_key(score):
    """fp32 -> uint32 in the same order."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _to_score(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_scores(line, lane, n):
    return tl.load(line + lane, mask=lane < n, other=float("nan"))


@triton.jit
def _bounds(line, held, n, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """(smallest, largest, how many) of n scores, without those that are NaN; ``held`` has them all if HELD."""
    smallest = tl.min(tl.where(held == held, held, float("inf")), axis=0)
    largest = tl.max(tl.where(held == held, held, float("-inf")), axis=0)
    numbers = tl.sum((held == held).to(tl.int32), axis=0)
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            more = _load_scores(line, start + tl.arange(0, BLOCK), n)
            smallest = tl.minimum(smallest, tl.min(tl.where(more == more, more, float("inf")), axis=0))
            largest = tl.maximum(largest, tl.max(tl.where(more == more, more, float("-inf")), axis=0))
            numbers += tl.sum((more == more).to(tl.int32), axis=0)
    return smallest, largest, numbers


@triton.jit
def _count(line, held, bound, n, BLOCK: tl.constexpr, HELD: tl.constexpr, STRICT: tl.constexpr):
    """How many of n scores are >= bound, or > bound if STRICT."""
    total = tl.sum(((held > bound) if STRICT else (held >= bound)).to(tl.int32), axis=0)
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            more = _load_scores(line, start + tl.arange(0, BLOCK), n)
            total += tl.sum(((more > bound) if STRICT else (more >= bound)).to(tl.int32), axis=0)
    return total


@triton.jit
def _threshold(line, n, K, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """(threshold, ties): the K best of n scores are those above the threshold and ``ties`` of those equal to it.

    Searches for a bound that exactly K scores reach, or failing that (ties) the largest that at least K reach, by
    counting scores that stay in registers. Guesses interpolate between the counts of both ends, every other one halves
    the interval of bit patterns, so that no distribution takes more than 64.
    """
    held = _load_scores(line, tl.arange(0, BLOCK), n)
    smallest, largest, reached = _bounds(line, held, n, BLOCK, HELD)  # ``reached`` scores are at or above low
    low = _to_key(smallest)
    high = _to_key(largest) + 1
    beyond = 0  # scores at or above high
    guess = 0
    while (reached > K) & (high - low > 1):
        gap = high - low
        share = (reached - K + 0.5) / (reached - beyond)
        step = tl.where(guess % 2 == 0, (gap.to(tl.float32) * share).to(tl.uint32), gap >> 1)
        middle = low + tl.minimum(tl.maximum(step, 1), gap - 1)
        count = _count(line, held, _to_score(middle), n, BLOCK, HELD, False)
        enough = count >= K
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle)
        beyond = tl.where(enough, beyond, count)
        guess += 1
    threshold = _to_score(low)
    return threshold, K - _count(line, held, threshold, n, BLOCK, HELD, True)


@triton.jit
def _places(score, threshold, ties, above, equal):
    """(taken, place, above, equal): which scores of a block are taken and where to, in the order of their lanes.

    ``above`` and ``equal`` count the scores above and at the threshold, before and then with this block.
    """
    is_above = score > threshold
    is_equal = score == threshold
    both = is_above.to(tl.int32) | (is_equal.to(tl.int32) << 16)  # one prefix sum counts both
    before = tl.cumsum(both, axis=0) - both
    total = tl.sum(both, axis=0)
    equal_before = equal + (before >> 16)
    taken = is_above | (is_equal & (equal_before < ties))
    place = above + (before & 0xFFFF) + tl.minimum(equal_before, ties)
    return taken, place, above + (total & 0xFFFF), equal + (total >> 16)


@triton.jit(do_not_specialize=["columns", "K", "segment"])
def _shortlist(
    scores,  # [rows, 64 W]
    visible,
    list_scores,  # [rows, segments, K]
    list_positions,
    columns,
    K,
    segment,
    scores_row,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
):
    """One program a row and segment of it: the segment's K best scores and their positions, NaN where it has fewer."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(visible + row), columns)
    if n <= K:
        return
    first = tl.program_id(1) * segment
    n = tl.maximum(tl.minimum(n - first, segment), 0)
    line = scores + row * scores_row + first
    mine = (row * tl.num_programs(1) + tl.program_id(1)) * K
    threshold, ties = _threshold(line, n, K, BLOCK, True)
    above = 0
    equal = 0
    for start in range(0, n, WRITE):
        lane = start + tl.arange(0, WRITE)
        score = _load_scores(line, lane, n)
        taken, place, above, equal = _places(score, threshold, ties, above, equal)
        tl.store(list_scores + mine + place, score, mask=taken)
        tl.store(list_positions + mine + place, first + lane, mask=taken)
    for start in range(0, K, WRITE):
        lane = start + tl.arange(0, WRITE)
        missing = (lane >= above + tl.minimum(equal, ties)) & (lane < K)
        tl.store(list_scores + mine + lane, tl.full([WRITE], float("nan"), tl.float32), mask=missing)


@triton.jit(do_not_specialize=["columns", "candidates", "pages", "K"])
def _select(
    scores,  # [rows, candidates]
    positions,  # of the candidates, if SHORTLISTED; else they are the row's keys in order
    page_table,
    req_of_row,
    visible,
    topk_out,  # [rows, K]
    columns,
    candidates,
    pages,
    K,
    table_row,
    scores_row,
    out_row,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    HELD: tl.constexpr,
    SHORTLISTED: tl.constexpr,
):
    """One program a row: the positions of its K best keys, lowest first among equal scores, then their slots."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(visible + row), columns)
    out = topk_out + row * out_row
    written = 0
    if n > K:
        line = scores + row * scores_row
        if SHORTLISTED:
            n = candidates
        threshold, ties = _threshold(line, n, K, BLOCK, HELD)
        above = 0
        equal = 0
        for start in range(0, n, WRITE):
            lane = start + tl.arange(0, WRITE)
            taken, place, above, equal = _places(_load_scores(line, lane, n), threshold, ties, above, equal)
            position = lane
            if SHORTLISTED:
                position = tl.load(positions + row * scores_row + lane, mask=taken, other=0)
            tl.store(out + place, position, mask=taken)
        written = above + tl.minimum(equal, ties)  # less than K where fewer scores are numbers
        n = written
    tl.debug_barrier()  # positions that other threads wrote are read back
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    for start in range(0, K, WRITE):
        lane = start + tl.arange(0, WRITE)
        position = tl.where(lane < written, tl.load(out + lane, mask=lane < written, other=0), lane)
        slot = paged_slots(table, position, lane < n, pages)
        tl.store(out + lane, slot.to(tl.int32), mask=lane < K)


def _write_scores(q, weights, pool, page_table, req_of_row, visible, scores, K: int) -> None:
    rows, HI, D = q.shape
    keys, key_scales = split_index_pool(pool)
    fp8 = key_scales is not None
    exact = q.dtype == torch.float32
    HI_padded = max(16, triton.next_power_of_2(HI))
    # as many rows of a tile as requests have on average, so that decoding one token a request wastes none
    rows_per_request = max(1, rows // page_table.shape[0])
    tile_rows = 1 if exact else max(1, min(TILE_COLUMNS // HI_padded, 1 << (rows_per_request.bit_length() - 1)))
    block = 16 if exact else PAGE  # divides a page
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
        PAGE=PAGE,
        FP8=fp8,
        PRECISION=dot_precision(q.dtype),
        num_warps=4,
        num_stages=1 if exact else 3,
    )


class Segments(NamedTuple):
    """How long rows are cut, so that each part stays in the registers of one program: ``count`` parts of ``size``."""

    count: int
    size: int

    @staticmethod
    def of(columns: int, K: int) -> "Segments":
        """One segment where cutting would leave more than half of the keys as candidates."""
        count = triton.cdiv(columns, HELD_SCORES)
        if count <= 1 or 2 * count * K > columns:
            return Segments(1, columns)
        return Segments(count, triton.cdiv(columns, count))

    def row_bytes(self, columns: int, K: int) -> int:
        """Scratch of a row: its scores, and scores and positions of its candidates."""
        return 4 * columns + (8 * self.count * K if self.count > 1 else 0)


def _launch(size: int) -> tuple[dict[str, int], bool]:
    """(tiles and warps of a program that selects among ``size`` scores, do they stay in registers): 32 a thread."""
    block = min(HELD_SCORES, max(1024, triton.next_power_of_2(size)))
    warps = max(4, min(32, block // 1024))
    return {"BLOCK": block, "WRITE": min(block, warps * 32 * WRITE_PER_THREAD), "num_warps": warps}, size <= block


def _write_slots(scores, page_table, req_of_row, visible, topk_out, pages: int, segments: Segments) -> None:
    rows, K = topk_out.shape
    columns = candidates = page_table.shape[1] * PAGE
    positions = scores
    if segments.count > 1:
        candidates = segments.count * K
        all_scores, scores = scores, scores.new_empty(rows, candidates)
        positions = torch.empty(rows, candidates, dtype=torch.int32, device=scores.device)
        launch, _ = _launch(segments.size)
        _shortlist[(rows, segments.count)](
            all_scores, visible, scores, positions, columns, K, segments.size, all_scores.stride(0), **launch
        )
    launch, held = _launch(candidates)
    _select[(rows,)](
        scores,
        positions,
        page_table,
        req_of_row,
        visible,
        topk_out,
        columns,
        candidates,
        pages,
        K,
        page_table.stride(0),
        scores.stride(0),
        topk_out.stride(0),
        HELD=held,
        SHORTLISTED=segments.count > 1,
        **launch,
    )


def run(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, scratch_bytes: int | None = None
) -> None:
    """Rows are cut so that their scratch fits into ``scratch_bytes``; without a bound they are scored together."""
    T, K = topk_out.shape
    if T == 0 or K == 0:
        return
    if pool.shape[0] == 0 or page_table.shape[0] == 0:
        topk_out.fill_(-1)
        return
    columns = page_table.shape[1] * PAGE
    scored = columns > K
    segments = Segments.of(columns, K)
    rows_at_once = T
    if scored and scratch_bytes is not None:
        if scratch_bytes < segments.row_bytes(columns, K):
            segments = Segments(1, columns)
        rows_at_once = min(T, scratch_bytes // segments.row_bytes(columns, K))
    scores = torch.empty(rows_at_once if scored else 0, columns, dtype=torch.float32, device=q.device)
    for start in range(0, T, rows_at_once):
        part = slice(start, min(start + rows_at_once, T))
        rows = (page_table, req_of_row[part], visible[part])
        if scored:
            _write_scores(q[part], weights[part], pool, *rows, scores, K)
        _write_slots(scores, *rows, topk_out[part], pool.shape[0], segments)

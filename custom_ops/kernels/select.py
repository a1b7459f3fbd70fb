"""The selection of index_topk in Triton: from rows of scores to the slots of their K best keys.

One program a row finds the K-th largest score by counting scores that it holds in registers, and then writes slots in
the order of positions: of equal scores the lowest positions win. A long row is cut into segments first; each leaves its
K best as candidates, in order, and the row is chosen from these.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import paged_slots
from compiled_dsa.custom_ops.layout import PAGE

HELD_SCORES = 1 << 15  # scores that a program of 32 warps holds in registers
SHORT_SEGMENT = 1 << 13  # below this a second launch costs more than it saves
WRITE_PER_THREAD = 8  # of at most 1024 threads: the two counts of a block then fit into one int32


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


class Segments(NamedTuple):
    """How long rows are cut, so that each part stays in the registers of one program: ``number`` parts of ``size``."""

    number: int
    size: int

    @staticmethod
    def of(columns: int, K: int) -> "Segments":
        """So many that they have about as many scores each as they leave candidates together, which takes least time;
        one where cutting would leave more than half of the keys."""
        balanced = 1 << max(0, math.isqrt(columns // K).bit_length() - 1)
        number = max(triton.cdiv(columns, HELD_SCORES), min(balanced, columns // SHORT_SEGMENT))
        if number <= 1 or 2 * number * K > columns:
            return Segments(1, columns)
        return Segments(number, triton.cdiv(columns, number))

    def row_bytes(self, columns: int, K: int) -> int:
        """Scratch of a row: its scores, and scores and positions of its candidates."""
        return 4 * columns + (8 * self.number * K if self.number > 1 else 0)


def _launch(size: int) -> tuple[dict[str, int], bool]:
    """(tiles and warps of a program that selects among ``size`` scores, do they stay in registers): 32 a thread."""
    block = min(HELD_SCORES, max(1024, triton.next_power_of_2(size)))
    warps = max(4, min(32, block // 1024))
    return {"BLOCK": block, "WRITE": min(block, warps * 32 * WRITE_PER_THREAD), "num_warps": warps}, size <= block


def write_slots(scores, page_table, req_of_row, visible, topk_out, pages: int, segments: Segments) -> None:
    """Writes ``topk_out`` [rows, K] whole, from scores [rows, 64 W] of which a row's first ``visible`` are read."""
    rows, K = topk_out.shape
    columns = candidates = page_table.shape[1] * PAGE
    positions = scores
    if segments.number > 1:
        candidates = segments.number * K
        all_scores, scores = scores, scores.new_empty(rows, candidates)
        positions = torch.empty(rows, candidates, dtype=torch.int32, device=scores.device)
        launch, _ = _launch(segments.size)
        _shortlist[(rows, segments.number)](
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
        SHORTLISTED=segments.number > 1,
        **launch,
    )

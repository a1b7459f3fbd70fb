"""The selection of index_topk in Triton: from rows of scores to the slots of their K best keys.

The kernel here takes every kind of row; those of select_split.py and select_listed.py share its parts.

One program a row finds the K-th largest score by counting scores that stay in its registers, and takes what is above it
and, of what equals it, the lowest positions. A long row is narrowed down first: the scores kernel leaves the maximum of
every group of neighbouring scores, and the K best scores lie in the K groups with the best maxima (of equal ones, the
leftmost). For each of these has a score that beats any score outside them, or equals it and lies further left.
"""

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import early_start, outputs, paged_slots, wait_for_kernel_in_front
from compiled_dsa.custom_ops.layout import PAGE

DIRECT_SCORES = 1 << 14  # rows up to here are not narrowed down
# Higher where the scores kernel is bound by arithmetic: maxima cost it more there than they save. On an H200, 4096 rows
# x 32768 keys take 2,212 us for the scores and 635 for the selection; with maxima 2,500 and 385.
DIRECT_SCORES_PREFILL = 1 << 15
NARROWED_MAXIMA = 1 << 14  # groups grow with the row, so that it has at most so many
GROUPS = (4, 8, 16)  # sizes of groups; the scores kernel's blocks are multiples of each
SMALLEST_TILE = 1 << 9
LOAD = 4  # neighbouring scores that a thread loads together
SCORES_PER_THREAD = 32
MOST_WARPS = 32


@triton.jit
def to_key(score):
    """fp32 -> uint32 in the same order."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def to_score(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile_index(SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """0 .. SIZE in a [WIDTH, SIZE / WIDTH] tile whose rows lie across threads: neighbours are on the first axis."""
    return tl.arange(0, SIZE // WIDTH)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]


@triton.jit
def _count(chosen):
    # those of a thread in fp32: sums of bits become long chains of logic
    return tl.sum(tl.sum(tl.sum(tl.where(chosen, 1.0, 0.0), axis=2), axis=1).to(tl.int32), axis=0)


@triton.jit
def _log2(count):
    """To about 0.01: that of the library takes as long as a count."""
    bits = count.to(tl.float32).to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return (bits >> 23) - 127 + fraction * (1.3465 - 0.3465 * fraction)


@triton.jit
def _smallest(score):
    return tl.min(tl.min(tl.min(score, axis=2), axis=1), axis=0)


@triton.jit
def start_search(score, bound):
    """(low, high, reached, beyond) of all scores >= bound, as ``search`` takes them; of all numbers if that is -inf."""
    if bound == float("-inf"):
        bound = _smallest(score)
    # no -0.0: 0.0 reaches it, but has a higher key
    high = to_key(tl.max(tl.max(tl.max(score, axis=2), axis=1), axis=0) + 0.0) + 1
    return to_key(bound), high, _count(score >= bound), 0


@triton.jit
def search(score, low, high, reached, beyond, least, most):
    """(low, reached, beyond): between ``least`` and ``most`` scores reach ``low``, ``reached`` of them.

    More only where too many are equal to ``low``; ``beyond`` of them are above it then. Fewer only where there are not
    so many.

    Counts how many scores reach a guess. Every other guess interpolates, as if the logarithm of the count were linear;
    the next halves the interval of bit patterns, so that no distribution takes more than 64; and some try the next
    larger score, which ends the search among many equal ones. Random scores take about 10.

    Args:
        low, high: keys. The score sought is not below ``low``, and it is below ``high``.
        reached, beyond: how many scores are at or above ``low``, and ``high``.
    """
    aim = _log2(0.5 * (least + most) + 0.25)
    guess = 0
    while (reached > most) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        if guess % 8 == 7:
            low = to_key(_smallest(tl.where(score >= to_score(low), score, float("nan"))))
            middle = low + 1
        elif guess % 2 == 0:
            share = (_log2(reached) - aim) / (_log2(reached) - _log2(tl.maximum(beyond, 0.5)))
            middle = to_key(to_score(low) + (to_score(high) - to_score(low)) * share)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        count = _count(score >= to_score(middle))
        enough = count >= least
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle)
        beyond = tl.where(enough, beyond, count)
        guess += 1
    return low, reached, beyond


@triton.jit
def cut(score, position, end, low, reached, beyond, least, most):
    """(sure, threshold, last): the best scores are those >= sure, and of those equal to the threshold the ones at
    positions before ``last``, where that is not 0. From what ``search`` found.
    """
    sure = to_score(low)
    last = 0
    if reached > most:  # too many are equal to the threshold
        sure = to_score(low + 1)
        last = end
        first = 0
        right = end
        ties = reached - beyond
        while ties != least - beyond:
            last = (first + right) // 2
            ties = _count((score == to_score(low)) & (position < last))
            few = ties < least - beyond
            first = tl.where(few, last, first)
            right = tl.where(few, right, last)
    return sure, to_score(low), last


@triton.jit
def threshold_of(score, position, end, bound, least, most):
    """``cut`` so that the best scores are between ``least`` and ``most`` of those >= bound; fewer where there are not
    so many.
    """
    low, high, reached, beyond = start_search(score, bound)
    low, reached, beyond = search(score, low, high, reached, beyond, least, most)
    return cut(score, position, end, low, reached, beyond, least, most)


@triton.jit
def places(taken, first):
    """(a place for each that is taken, from ``first`` on and in no order of positions; the end of these places).

    Sums along the second and third axis stay in registers.
    """
    one = taken.to(tl.int32)
    column = tl.sum(one, axis=1, keep_dims=True)
    total = tl.sum(tl.sum(column, axis=2), axis=1)
    before = first + tl.cumsum(total, axis=0) - total
    place = before[:, None, None] + (tl.cumsum(column, axis=2) - column - 1) + tl.cumsum(one, axis=1)
    return place, first + tl.sum(total, axis=0)


@triton.jit
def store_all(
    out, out_positions, table, n, pages, K, WIDTH: tl.constexpr, SLOTS: tl.constexpr, POSITIONS: tl.constexpr
):
    """The lanes of a row that sees ``n`` <= K keys."""
    for start in range(0, K, WIDTH):
        lane = start + tl.arange(0, WIDTH)
        slot = paged_slots(table, lane, lane < n, pages).to(tl.int32)
        if SLOTS:
            tl.store(out + lane, slot, mask=lane < K)
        if POSITIONS:
            tl.store(out_positions + lane, tl.where(slot >= 0, lane, -1), mask=lane < K)


@triton.jit
def store_chosen(
    out,
    out_positions,
    slot,
    position,
    score,
    sure,
    threshold,
    last,
    K,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """The lanes of a row by what ``threshold_of`` says of its scores. Without SLOTS, ``slot`` has no use, and the
    compiler drops its loads."""
    place, count = places(score >= sure, 0)
    if SLOTS:
        tl.store(out + place, slot, mask=score >= sure)
    if POSITIONS:
        tl.store(out_positions + place, position, mask=score >= sure)
    if last > 0:
        ties = (score == threshold) & (position < last)
        place, count = places(ties, count)
        if SLOTS:
            tl.store(out + place, slot, mask=ties)
        if POSITIONS:
            tl.store(out_positions + place, position, mask=ties)
    for start in range(0, K, WIDTH):
        lane = start + tl.arange(0, WIDTH)
        if SLOTS:
            tl.store(out + lane, tl.full([WIDTH], -1, tl.int32), mask=(lane >= count) & (lane < K))
        if POSITIONS:
            tl.store(out_positions + lane, tl.full([WIDTH], -1, tl.int32), mask=(lane >= count) & (lane < K))


@triton.jit
def select_row(
    scores,  # of the row, as are the other tensors
    maxima,
    groups,
    table,
    out,
    out_positions,
    n,
    pages,
    K,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    LOAD: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """A row that sees ``n`` > K keys: K groups by their maxima if it has more, then the K best scores of these."""
    inside = tl.arange(0, LOAD)[None, None, :]
    quad = tile_index(TILE // LOAD, WIDTH // LOAD)  # each LOAD neighbouring scores of a group
    count = tl.cdiv(n, GROUP)
    group = quad // (GROUP // LOAD)
    good = group < count
    bound = float("-inf")
    if BLOCK:  # noqa: SIM102 (decided when compiled)
        if count > TILE // GROUP:
            lane = tile_index(BLOCK // LOAD, WIDTH // LOAD)[:, :, None] * LOAD + inside
            # read to a multiple of 16, within the row's memory, so that LOAD of them are loaded together
            best = tl.load(maxima + lane, mask=lane < tl.cdiv(count, 16) * 16, other=float("nan"))
            # the window may end inside the last group
            tail = (count - 1) * GROUP + tl.arange(0, GROUP)
            tail = tl.load(scores + tail, mask=tail < n, other=float("nan"))
            best = tl.where(lane < count - 1, best, tl.where(lane == count - 1, tl.max(tail, axis=0), float("nan")))
            sure, bound, last = threshold_of(best, lane, count, bound, K, TILE // GROUP)
            chosen = groups
            tl.debug_barrier()  # all maxima are in registers: their memory takes the groups
            place, count = places(best >= sure, 0)
            tl.store(chosen + place, lane, mask=best >= sure)
            if last > 0:
                ties = (best == bound) & (lane < last)
                place, count = places(ties, count)
                tl.store(chosen + place, lane, mask=ties)
            tl.debug_barrier()
            if count < K:  # so few groups have a number: all are taken, and scores below their maxima too
                bound = float("-inf")
            good = group < count
            group = tl.load(chosen + group, mask=good, other=0)

    first = group * GROUP + quad % (GROUP // LOAD) * LOAD
    slot = paged_slots(table, first, good, pages).to(tl.int32)
    position = first[:, :, None] + inside
    score = tl.load(scores + position, mask=good[:, :, None], other=float("nan"))
    score = tl.where(position < n, score, float("nan"))
    sure, threshold, last = threshold_of(score, position, n, bound, K, K)
    slot = slot[:, :, None] + inside
    store_chosen(out, out_positions, slot, position, score, sure, threshold, last, K, WIDTH, SLOTS, POSITIONS)


@triton.jit(do_not_specialize=["columns", "pages", "K"])
def _select(
    scores,  # [rows, 64 W]
    maxima,  # [rows, at least 64 W / GROUP], if BLOCK
    groups,  # int32, the memory of maxima
    page_table,
    req_of_row,
    visible,
    topk_out,  # [rows, K], if SLOTS
    positions_out,  # [rows, K], if POSITIONS
    columns,
    pages,
    K,
    table_row,
    scores_row,
    maxima_row,
    out_row,
    positions_row,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # maxima of a row; 0 where TILE has all of its scores
    TILE: tl.constexpr,  # scores of the groups that are left
    WIDTH: tl.constexpr,
    LOAD: tl.constexpr,
    EARLY: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(visible + row), columns)
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    out = topk_out + row * out_row
    out_positions = positions_out + row * positions_row
    if EARLY:
        wait_for_kernel_in_front()  # which writes the scores; what the one behind may do is in select_and_absorb.py
    if n <= K:
        store_all(out, out_positions, table, n, pages, K, WIDTH, SLOTS, POSITIONS)
        return
    best = maxima + row * maxima_row
    select_row(
        scores + row * scores_row, best, groups + row * maxima_row, table, out, out_positions, n, pages, K,
        GROUP, BLOCK, TILE, WIDTH, LOAD, SLOTS, POSITIONS,
    )  # fmt: skip


def group_size(columns: int, K: int, prefill: bool) -> int:
    """How many scores share a maximum; 0 where a row is not narrowed down, because it is short or K is large."""
    if columns <= (DIRECT_SCORES_PREFILL if prefill else DIRECT_SCORES):
        return 0
    group = next((g for g in GROUPS if columns // g <= NARROWED_MAXIMA), GROUPS[-1])
    return group if group * triton.next_power_of_2(K) < columns else 0


def maxima_of(columns: int, group: int) -> int:
    """Maxima of a row in scratch, padded to whole loads."""
    return triton.cdiv(columns, 16 * group) * 16 if group else 0


def row_tiles(columns: int, K: int, group: int) -> tuple[int, int]:
    """(BLOCK, TILE) of ``select_row``."""
    if not group:
        return 0, triton.next_power_of_2(columns)
    block = triton.next_power_of_2(columns // group)
    # so wide, however small K is, that maxima lie across all threads: other layouts go through too much shared memory
    return block, max(SMALLEST_TILE, group * triton.next_power_of_2(K), min(block, LOAD * 32 * MOST_WARPS))


def write_slots(
    scores,
    maxima,
    page_table,
    req_of_row,
    visible,
    topk_out: torch.Tensor | None,
    pages: int,
    group: int,
    early: bool,
    positions_out: torch.Tensor | None = None,
) -> None:
    """Writes ``topk_out``, ``positions_out`` or both, [rows, K] and whole, from scores [rows, 64 W] and the maxima of
    groups, of which there are none with ``group`` 0.

    Of a row, only the scores of its first ``visible`` keys are used. Overwrites ``maxima``. With ``early`` the launch
    does not wait for the end of the kernel before, which must be the one that writes the scores.
    """
    slots, positions = outputs(topk_out, positions_out)
    rows, K = slots.shape
    columns = page_table.shape[1] * PAGE
    block, tile = row_tiles(columns, K, group)
    warps = max(4, min(MOST_WARPS, max(block, tile) // (32 * SCORES_PER_THREAD)))
    _select[(rows,)](
        scores,
        maxima,
        maxima.view(torch.int32),
        page_table,
        req_of_row,
        visible,
        slots,
        positions,
        columns,
        pages,
        K,
        page_table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        slots.stride(0),
        positions.stride(0),
        GROUP=group or LOAD,
        BLOCK=block,
        TILE=tile,
        WIDTH=min(LOAD * 32 * warps, tile, block or tile),
        LOAD=LOAD,
        SLOTS=topk_out is not None,
        POSITIONS=positions_out is not None,
        num_warps=warps,
        **early_start(early),
    )

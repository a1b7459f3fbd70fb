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

from compiled_dsa.custom_ops.kernels.common import (
    early_start,
    multiprocessors,
    outputs,
    paged_slots,
    slots_in,
    wait_for_kernel_in_front,
)
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
MOST_REGISTERS = 1 << 7  # a thread, of rows that are more than multiprocessors: two programs of 8 warps share one


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
def _counts(chosen):
    """Those of a thread in fp32: sums of bits become long chains of logic."""
    return tl.sum(tl.sum(tl.where(chosen, 1.0, 0.0), axis=2), axis=1).to(tl.int32)


@triton.jit
def count_of(chosen):
    return tl.sum(_counts(chosen), axis=0)


@triton.jit
def _two_counts(chosen, others):
    """In the time of little more than one."""
    return tl.split(tl.sum(tl.join(_counts(chosen), _counts(others)), axis=0))


@triton.jit
def log2(count):
    """To about 0.01, of 0.5 for 0: that of the library takes as long as a count."""
    bits = tl.maximum(count, 0.5).to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return (bits >> 23) - 127 + fraction * (1.3465 - 0.3465 * fraction)


@triton.jit
def _log_odds(count, all):
    return log2(count) - log2(all - count)


@triton.jit
def smallest(score):
    return tl.min(tl.min(tl.min(score, axis=2), axis=1), axis=0)


@triton.jit
def _extremes(opposite, largest, count, opposite_, largest_, count_):
    return tl.maximum(opposite, opposite_), tl.maximum(largest, largest_), count + count_


@triton.jit
def start_search(score, bound):
    """(low, high, reached, beyond, all) of all scores >= bound, as ``search`` takes them; of all numbers if that is
    -inf.
    """
    largest = tl.max(tl.max(score, axis=2), axis=1)
    opposite = largest
    if bound == float("-inf"):
        opposite = tl.max(tl.max(-score, axis=2), axis=1)
    opposite, highest, reached = tl.reduce((opposite, largest, _counts(score >= bound)), 0, _extremes)
    all = tl.where(bound == float("-inf"), reached, score.shape[0] * score.shape[1] * score.shape[2])
    bound = tl.where(bound == float("-inf"), -opposite, bound)
    # no -0.0: 0.0 reaches it, but has a higher key
    return to_key(bound), to_key(highest + 0.0) + 1, reached, 0, all


@triton.jit
def search(score, low, high, reached, beyond, all, least, most):
    """(low, reached, beyond): between ``least`` and ``most`` scores reach ``low``, ``reached`` of them.

    More only where too many are equal to ``low``; ``beyond`` of them are above it then. Fewer only where there are not
    so many.

    Counts how many scores reach two guesses at a time. They are on both sides of where the count, if it were linear
    between ``low`` and ``high``, would be the one sought: as far as it strays from that among scores drawn at random,
    so that often the next interval is what is between them, and holds but the square root of so many scores. An end
    that stays counts half as much the next time. Where both counts were known before, the next larger score is tried,
    which ends the search among many equal ones. Every sixth time, and while an end is infinite, the interval of bit
    patterns loses at least a third, so that no distribution takes more than 330. Random scores take 4 to 6, the hardest
    of many kinds 39.

    Args:
        low, high: keys. The score sought is not below ``low``, and it is below ``high``.
        reached, beyond: how many scores are at or above ``low``, and ``high``.
        all: how many there are. First the log of the odds is taken as linear, not the count.
    """
    aim = 0.5 * (least + most)
    slope = 0.6931 * aim * (1.0 - aim / all)
    # how far the counts at both ends are from the one sought
    above = slope * (_log_odds(reached, all) - _log_odds(aim, all))
    under = slope * (_log_odds(aim, all) - _log_odds(beyond, all))
    curved = 0.7 / aim
    guess = 0
    stuck = reached < 0
    while (reached > most) & (high - low > 1):
        first = low + (high - low) // 3
        second = high - (high - low) // 3
        within = reached - beyond
        span = to_score(high) - to_score(low)
        if stuck:
            low = to_key(smallest(tl.where(score >= to_score(low), score, float("nan"))))
            first = low + 1
        elif (guess % 6 != 5) & (span < float("inf")):
            root = tl.rsqrt(above + under)
            share = above * root * root  # in half the time of a division
            variance = tl.maximum(share * (1.0 - share), 0.0)
            # the second part is for what is not linear
            stray = 0.6 * tl.rsqrt(within.to(tl.float32)) * tl.sqrt(variance) + variance * tl.minimum(
                within * curved, 0.3
            )
            first = to_key(to_score(low) + span * (share - stray))
            second = to_key(to_score(low) + span * (share + stray))
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        many, few = _two_counts(score >= to_score(first), score >= to_score(second))
        low = tl.where(few >= least, second, tl.where(many >= least, first, low))
        reached = tl.where(few >= least, few, tl.where(many >= least, many, reached))
        high = tl.where(many < least, first, tl.where(few < least, second, high))
        beyond = tl.where(many < least, many, tl.where(few < least, few, beyond))
        above = tl.where(many >= least, reached - aim, 0.5 * above)
        under = tl.where(few < least, aim - beyond, 0.5 * under)
        stuck = (stuck == 0) & (reached - beyond == within)
        guess += 1
    return low, reached, beyond


@triton.jit
def last_of_ties(score, position, end, low, reached, beyond, least, most):
    """The position before which as many scores are equal to ``low`` as are wanted, 0 where all are wanted."""
    last = 0
    if reached > most:
        last = end
        first = 0
        right = end
        ties = reached - beyond
        while ties != least - beyond:
            last = (first + right) // 2
            ties = count_of((score == to_score(low)) & (position < last))
            few = ties < least - beyond
            first = tl.where(few, last, first)
            right = tl.where(few, right, last)
    return last


@triton.jit
def cut(score, position, end, low, reached, beyond, least, most):
    """(score, number): as many scores reach ``low``, from what ``search`` found. Where too many are equal to it, those
    at the highest positions become NaN.
    """
    last = last_of_ties(score, position, end, low, reached, beyond, least, most)
    if last > 0:
        score = tl.where((score == to_score(low)) & (position >= last), float("nan"), score)
    return score, tl.where(last > 0, least, reached)


@triton.jit
def best_of(score, position, end, bound, least, most):
    """(score, threshold, number): as many scores reach the threshold, the best ones. They are between ``least`` and
    ``most`` of those >= bound; fewer where there are not so many. Some that are equal to it may have become NaN.
    """
    low, high, reached, beyond, all = start_search(score, bound)
    low, reached, beyond = search(score, low, high, reached, beyond, all, least, most)
    score, number = cut(score, position, end, low, reached, beyond, least, most)
    return score, to_score(low), number


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
    threshold,
    number,
    K,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """The lanes of a row by what ``best_of`` says of its scores. Without SLOTS, ``slot`` has no use, and the compiler
    drops its loads."""
    chosen = score >= threshold
    place, end = places(chosen, 0)
    if SLOTS:
        tl.store(out + place, slot, mask=chosen)
    if POSITIONS:
        tl.store(out_positions + place, position, mask=chosen)
    for start in range(number // WIDTH * WIDTH, K, WIDTH):
        lane = start + tl.arange(0, WIDTH)
        unused = (lane >= number) & (lane < K)
        if SLOTS:
            tl.store(out + lane, tl.full([WIDTH], -1, tl.int32), mask=unused)
        if POSITIONS:
            tl.store(out_positions + lane, tl.full([WIDTH], -1, tl.int32), mask=unused)


@triton.jit
def end_with_nan(scores, n, LOAD: tl.constexpr):
    """A row of n scores can be read in whole loads then, which are within its memory."""
    tail = n // LOAD * LOAD + tl.arange(0, LOAD)
    tl.store(scores + tail, float("nan"), mask=(tail >= n) & (tail < tl.cdiv(n, LOAD) * LOAD))
    tl.debug_barrier()


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
    PAGE: tl.constexpr,
):
    """A row that sees ``n`` > K keys, ``end_with_nan``: K groups by their maxima if it has more, then the K best scores
    of these.
    """
    inside = tl.arange(0, LOAD)[None, None, :]
    quad = tile_index(TILE // LOAD, WIDTH // LOAD)  # each LOAD neighbouring scores of a group
    count = tl.cdiv(n, GROUP)
    group = quad // (GROUP // LOAD)
    good = group < count
    bound = float("-inf")
    if BLOCK:
        # Conditions of whole loads, none of which is known here. With one for each maximum, or some loads sure to be
        # needed, the compiler waits for a load before the next.
        load = tile_index(BLOCK // LOAD, WIDTH // LOAD)
        lane = load[:, :, None] * LOAD + inside
        last = (count - 1) // LOAD
        best = tl.load(maxima + lane, mask=(load < last)[:, :, None], other=float("nan"))
        if count > TILE // GROUP:
            rest = last * LOAD + inside
            end = tl.load(maxima + rest, mask=rest < count - 1, other=float("nan"))
            # the window may end inside the last group
            tail = (count - 1) * GROUP + tl.arange(0, GROUP)
            tail = tl.load(scores + tail, mask=tail < n, other=float("nan"))
            end = tl.where(rest == count - 1, tl.max(tail, axis=0), end)
            best = tl.where((load == last)[:, :, None], end, best)
            best, bound, number = best_of(best, lane, count, bound, K, TILE // GROUP)
            chosen = groups + 1  # not aligned: loads of several would leave them with other threads than their scores
            tl.debug_barrier()  # all maxima are in registers: their memory takes the groups
            place, end = places(best >= bound, 0)
            tl.store(chosen + place, lane, mask=best >= bound)
            tl.debug_barrier()
            count = number
            if count < K:  # so few groups have a number: all are taken, and scores below their maxima too
                bound = float("-inf")
            good = group < count
            group = tl.load(chosen + group, mask=good, other=0)

    first = group * GROUP + quad % (GROUP // LOAD) * LOAD
    # used once the search is over, but loaded at the same time as the scores
    natural = first.to(tl.uint32)  # whose remainders are cheaper
    page = tl.load(table + natural // PAGE, mask=good, other=-1)
    position = first[:, :, None] + inside
    score = tl.load(scores + position, mask=(good & (first < n))[:, :, None], other=float("nan"))
    score, threshold, number = best_of(score, position, n, bound, K, K)
    slot = slots_in(page, natural, pages).to(tl.int32)[:, :, None] + inside
    store_chosen(out, out_positions, slot, position, score, threshold, number, K, WIDTH, SLOTS, POSITIONS)


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
    PAGE: tl.constexpr,
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
    scores += row * scores_row
    end_with_nan(scores, n, LOAD)
    select_row(
        scores, maxima + row * maxima_row, groups + row * maxima_row, table, out, out_positions, n, pages, K,
        GROUP, BLOCK, TILE, WIDTH, LOAD, SLOTS, POSITIONS, PAGE,
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

    Of a row, only the scores of its first ``visible`` keys are used. Overwrites up to 3 after them, and ``maxima``.
    With ``early`` the launch does not wait for the end of the kernel before, which must be the one that writes the
    scores.
    """
    slots, positions = outputs(topk_out, positions_out)
    rows, K = slots.shape
    columns = page_table.shape[1] * PAGE
    block, tile = row_tiles(columns, K, group)
    warps = max(4, min(MOST_WARPS, max(block, tile) // (32 * SCORES_PER_THREAD)))
    capped = {"maxnreg": min(MOST_REGISTERS, 65536 // (32 * warps))} if rows > multiprocessors(scores.device) else {}
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
        PAGE=PAGE,
        SLOTS=topk_out is not None,
        POSITIONS=positions_out is not None,
        num_warps=warps,
        **capped,
        **early_start(early),
    )

"""The selection of index_topk for long rows of a prefill: every score is read once, and few are looked at again.

One program a row, several programs a multiprocessor. A sample of the row's scores gives a bound that about
``AIM * (LIST - K)`` more scores than K should reach. The row is then read from left to right, and what reaches the
bound goes into a list of ``LIST`` scores and positions. A list that overflows is cut down to its K best (of equal ones,
the leftmost), and the bound becomes the K-th of these: any later score has to beat it. The K best of the last list are
the result. If it has fewer than K, the bound was too high, and the row is read again without one.

So any order of any scores gives the exact choice, and costs at most two readings and a cut every ``LIST - K`` scores.
"""

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import early_start, multiprocessors, outputs
from compiled_dsa.custom_ops.kernels.select import (
    LOAD,
    count_of,
    end_with_nan,
    last_of_ties,
    log2,
    smallest,
    store_all,
    tile_index,
    to_key,
    to_score,
)
from compiled_dsa.custom_ops.layout import PAGE

LISTED_SCORES = 1 << 13  # rows up to here stay in registers whole (select.py)
SMALLEST_LIST = 1 << 12
SAMPLE = 1 << 11
SAMPLE_LOAD = 2  # neighbouring scores of the sample: memory is read by 8 of them
CHUNK = 1 << 12  # scores read at a time
AIM = tl.constexpr(0.6)
_BITS = tl.constexpr(0x4B000000)  # of 2^23 in fp32
WARPS = 8
PROGRAMS = 4  # a multiprocessor: 64 registers a thread
LARGEST_LIST = 1 << 12  # longer ones do not stay in registers
LISTS_SHARE = 8  # of the scratch budget, lists take at most this part


@triton.jit
def _above(score):
    """The next larger number; NaN above +inf, which no score reaches."""
    return to_score(to_key(score) + 1)


@triton.jit
def _search(score, least, most):
    """(low, reached, beyond) of all numbers, as select.py's ``search`` finds them, with one guess at a time.

    That takes twice as many rounds and half the instructions, which bound several programs a multiprocessor: 4096 rows
    of 32,768 keys took 2,415 us with their scores, and 2,494 with two guesses (H200, 2026-12-01).

    Every other guess interpolates, as if the logarithm of the count were linear; the next halves the interval of bit
    patterns, so that no distribution takes more than 64; and some try the next larger score, which ends the search
    among many equal ones. Random scores take about 10.
    """
    least_of_all = smallest(score)
    low = to_key(least_of_all)
    # no -0.0: 0.0 reaches it, but has a higher key
    high = to_key(tl.max(tl.max(tl.max(score, axis=2), axis=1), axis=0) + 0.0) + 1
    reached = count_of(score >= least_of_all)
    beyond = 0
    aim = log2(0.5 * (least + most) + 0.25)
    guess = 0
    while (reached > most) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        if guess % 8 == 7:
            low = to_key(smallest(tl.where(score >= to_score(low), score, float("nan"))))
            middle = low + 1
        elif guess % 2 == 0:
            share = (log2(reached) - aim) / (log2(reached) - log2(beyond))
            middle = to_key(to_score(low) + (to_score(high) - to_score(low)) * share)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        count = count_of(score >= to_score(middle))
        enough = count >= least
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle)
        beyond = tl.where(enough, beyond, count)
        guess += 1
    return low, reached, beyond


@triton.jit
def _sampled_bound(line, n, K, LIST: tl.constexpr, SAMPLE: tl.constexpr, WIDTH: tl.constexpr, LOAD: tl.constexpr):
    """A score that perhaps K + AIM * (LIST - K) of the row's n scores reach, n > LIST.

    One load in every ``n / SAMPLE * LOAD`` scores, at a place that differs from one to the next.
    """
    load = tile_index(SAMPLE // LOAD, WIDTH // LOAD)
    loads = n // LOAD
    stride = loads // (SAMPLE // LOAD)
    jitter = ((((load * 40503) & 0xFFFF).to(tl.uint32) * stride.to(tl.uint32)) >> 16).to(tl.int32)
    at = load * stride + (load * (loads % (SAMPLE // LOAD))) // (SAMPLE // LOAD) + jitter
    score = tl.load(line + (at[:, :, None] * LOAD + tl.arange(0, LOAD)[None, None, :]))
    # of so many scores: a tenth more or fewer saves guesses; the sample's own error is a sixteenth at 32768 scores
    rank = tl.maximum(SAMPLE * (K + AIM * (LIST - K)) / n, 1.0).to(tl.int32)
    low, reached, beyond = _search(score, rank - rank // 10, rank + rank // 10)
    return to_score(low)


@triton.jit
def _read_list(listed, count, LIST: tl.constexpr, WIDTH: tl.constexpr, LOAD: tl.constexpr):
    """(scores, positions) of a list; NaN past its end."""
    lane = tile_index(LIST // LOAD, WIDTH // LOAD)[:, :, None] * LOAD + tl.arange(0, LOAD)[None, None, :]
    packed = tl.load(listed + lane, mask=lane < count, other=0)
    score = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(lane < count, score, float("nan")), packed.to(tl.int32)


@triton.jit
def _pack(score, position):
    high = score.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    return (high | position.to(tl.uint32).to(tl.uint64)).to(tl.int64)


@triton.jit
def _places(taken, first):
    """(a place for each that is taken, from ``first`` on; the end of these places).

    Sums of fp32, in registers of a thread as far as it goes: those of bits become long chains of logic. With 2^23
    added, the bits of the sum are a place.
    """
    one = tl.where(taken, 1.0, 0.0)
    column = tl.sum(one, axis=1, keep_dims=True)
    total = tl.sum(tl.sum(column, axis=2), axis=1).to(tl.int32)
    before = (tl.cumsum(total, axis=0) - total + first + _BITS).to(tl.float32, bitcast=True)
    until = (before[:, None, None] + (tl.cumsum(column, axis=2) - column)) + tl.cumsum(one, axis=1)
    return until.to(tl.int32, bitcast=True) - (_BITS + 1), first + tl.sum(total, axis=0)


@triton.jit
def _k_best(score, position, n, K):
    """(scores, NaN instead of those equal to the threshold that are too many; the threshold, which K of them reach)"""
    low, reached, beyond = _search(score, K, K)
    threshold = to_score(low)
    last = last_of_ties(score, position, n, low, reached, beyond, K, K)
    if last > 0:
        score = tl.where((score == threshold) & (position >= last), float("nan"), score)
    return score, threshold


@triton.jit
def _cut(listed, count, bound, n, K, LIST: tl.constexpr, WIDTH: tl.constexpr, LOAD: tl.constexpr):
    """Leaves the K best of a list. (their number, the bound for scores further right)"""
    tl.debug_barrier()  # what other threads have listed
    score, position = _read_list(listed, count, LIST, WIDTH, LOAD)
    score, threshold = _k_best(score, position, n, K)
    place, left = _places(score >= threshold, 0)
    tl.debug_barrier()  # all of the list is in registers
    tl.store(listed + place, _pack(score, position), mask=score >= threshold)
    return left, tl.where(left >= K, _above(threshold), bound)


@triton.jit(do_not_specialize=["rows", "columns", "pages", "K"])
def _select_listed(
    scores,  # [rows, 64 W]
    lists,  # int64 [programs, LIST]
    page_table,
    req_of_row,
    visible,
    topk_out,  # [rows, K], if SLOTS
    positions_out,  # [rows, K], if POSITIONS
    rows,
    columns,
    pages,
    K,
    table_row,
    scores_row,
    out_row,
    positions_row,
    LIST: tl.constexpr,
    SAMPLE: tl.constexpr,
    SAMPLE_LOAD: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,  # LOAD scores a thread
    LOAD: tl.constexpr,
    EARLY: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    listed = lists + tl.program_id(0).to(tl.int64) * LIST
    thread = tl.arange(0, WIDTH // LOAD)[:, None, None] * LOAD
    load = tl.arange(0, CHUNK // WIDTH)[None, :, None] * WIDTH
    inside = tl.arange(0, LOAD)[None, None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until the scores are written
    for earlier in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = (rows - 1 - earlier).to(tl.int64)  # the last ones are longer, and perhaps still in the L2 cache
        n = tl.minimum(tl.load(visible + row), columns)
        table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
        out = topk_out + row * out_row
        out_positions = positions_out + row * positions_row
        if n <= K:
            store_all(out, out_positions, table, n, pages, K, WIDTH, SLOTS, POSITIONS)
        else:
            line = scores + row * scores_row
            end_with_nan(line, n, LOAD)
            bound = float("-inf")
            if n > LIST:
                bound = _sampled_bound(line, n, K, LIST, SAMPLE, WIDTH // LOAD * SAMPLE_LOAD, SAMPLE_LOAD)
            sampled = bound
            count = 0
            begin = 0
            stop = CHUNK
            while begin < n:
                quad = (begin // CHUNK * CHUNK + thread) + load
                within = (quad >= begin) & (quad < tl.minimum(n, stop))
                part = tl.load(line + (quad + inside), mask=within, other=float("nan"))
                place, end = _places(part >= bound, count)
                if end <= LIST:
                    tl.store(listed + place, _pack(part, quad + inside), mask=part >= bound)
                    count = end
                    begin = stop
                    stop = (begin // CHUNK + 1) * CHUNK
                else:  # room is made for half a list at least
                    count, bound = _cut(listed, count, bound, n, K, LIST, WIDTH, LOAD)
                    stop = tl.minimum(begin + LIST // 2, stop)
                if (begin >= n) & (count < K) & (sampled != float("-inf")):
                    begin = 0
                    stop = CHUNK
                    count = 0
                    bound = float("-inf")
                    sampled = bound

            tl.debug_barrier()  # what other threads have listed
            score, position = _read_list(listed, count, LIST, WIDTH, LOAD)
            score, threshold = _k_best(score, position, n, K)
            place, count = _places(score >= threshold, 0)
            if SLOTS:
                # a score that is a number is of a page of the pool
                page = tl.load(table + (position.to(tl.uint32) // PAGE).to(tl.int32), mask=score >= threshold, other=0)
                slot = page * PAGE + (position.to(tl.uint32) % PAGE).to(tl.int32)
                tl.store(out + place, slot, mask=score >= threshold)
            if POSITIONS:
                tl.store(out_positions + place, position, mask=score >= threshold)
            for at in range(count // WIDTH * WIDTH, K, WIDTH):
                rest = at + tl.arange(0, WIDTH)
                nothing = tl.full([WIDTH], -1, tl.int32)
                if SLOTS:
                    tl.store(out + rest, nothing, mask=(rest >= count) & (rest < K))
                if POSITIONS:
                    tl.store(out_positions + rest, nothing, mask=(rest >= count) & (rest < K))
            tl.debug_barrier()  # the next row's list takes this memory


def list_size(columns: int, K: int, prefill: bool) -> int:
    """Scores of a program's list; 0 where rows are not selected so: because they are short, or K is large."""
    size = max(SMALLEST_LIST, 2 * triton.next_power_of_2(K))
    return size if prefill and columns > max(LISTED_SCORES, size) and size <= LARGEST_LIST else 0


def programs_of(rows: int, row_bytes: int, size: int, scratch_bytes: int | None, device: torch.device) -> int:
    """Programs, and lists, for so many rows: at least 1, and 0 where the scratch does not hold a row and its list."""
    programs = min(rows, PROGRAMS * multiprocessors(device)) if size else 0
    if size and scratch_bytes is not None:
        lists_bytes = min(scratch_bytes - row_bytes, max(8 * size, scratch_bytes // LISTS_SHARE))
        programs = min(programs, max(0, lists_bytes) // (8 * size))
    return programs


def write_slots_listed(
    scores,
    lists,
    page_table,
    req_of_row,
    visible,
    topk_out: torch.Tensor | None,
    pages: int,
    early: bool,
    positions_out: torch.Tensor | None = None,
) -> None:
    """``select.write_slots`` by way of int64 lists [programs, LIST], which it overwrites.

    Of a row, only the scores of its first ``visible`` keys are used, and up to 3 after them are overwritten. With
    ``early`` the launch does not wait for the end of the kernel before, which must be the one that writes the scores.
    """
    slots, positions = outputs(topk_out, positions_out)
    rows, K = slots.shape
    size = lists.shape[1]
    width = LOAD * 32 * WARPS
    _select_listed[(min(rows, lists.shape[0]),)](
        scores,
        lists,
        page_table,
        req_of_row,
        visible,
        slots,
        positions,
        rows,
        page_table.shape[1] * PAGE,
        pages,
        K,
        page_table.stride(0),
        scores.stride(0),
        slots.stride(0),
        positions.stride(0),
        LIST=size,
        SAMPLE=min(SAMPLE, size),
        SAMPLE_LOAD=SAMPLE_LOAD,
        CHUNK=min(CHUNK, size),
        WIDTH=min(width, CHUNK, size),
        LOAD=LOAD,
        PAGE=PAGE,
        SLOTS=topk_out is not None,
        POSITIONS=positions_out is not None,
        num_warps=WARPS,
        maxnreg=min(255, 65536 // (32 * WARPS * PROGRAMS) // 8 * 8),
        **early_start(early),
    )

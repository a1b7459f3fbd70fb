"""The selection of index_topk where rows are long and few: several programs a row.

Each program of a row finds, from the same maxima, the same bound that the K-th best score does not fall below, and
writes those of its share of the scores that reach it, the candidates, to its segment of a list. Whichever program of
the row ends last selects among the candidates of all. They are counted in fine bins between the bound and the largest
maximum, so that hardly any search is left to it; without bins it counts as select.py does. Segments are mostly less
than half full, and it looks at their other halves only where one is not. Where a segment is too small, that program
selects from the scores of the whole row as select.py does.

No program waits for another. The order of chosen keys depends on the segments only, never on which program ends last;
with ``deterministic`` it becomes that of their positions (in_order.py).

The bound needs K disjoint groups of scores whose maxima reach it. ``PIECES`` maxima that lie far apart make one group,
so that a run of neighbouring good keys, which fill few groups, loosens it little. Where a row has too few maxima for
that, its scores take their place.
"""

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import (
    early_start,
    multiprocessors,
    outputs,
    paged_slots,
    wait_for_kernel_in_front,
)
from compiled_dsa.custom_ops.kernels.select import (
    LOAD,
    cut,
    end_with_nan,
    places,
    row_tiles,
    search,
    select_row,
    start_search,
    store_all,
    store_chosen,
    tile_index,
    to_key,
    to_score,
)
from compiled_dsa.custom_ops.layout import PAGE

LEAST_SPLITS = 2  # with fewer programs a row, select.py's one
CHUNK = 1 << 12  # scores that a program takes at once, and the fewest of one; a multiple of a page
CANDIDATES = 4  # a row's list has room for so many times K
GROUPS = 2  # the bound is sought among the best scores of so many times K groups
SLACK = 4  # and is reached by those of at most K + K / SLACK
LOG_BINS = 11
LARGEST_K = 1 << 11
SMALLEST_LIST = 1 << 11
WARPS = 16

# what programs add to the counter of those that have ended: candidates fill more than half of a segment, or do not fit
_LONG = tl.constexpr(1 << 10)
_OVERFLOW = tl.constexpr(1 << 20)
_NONE = tl.constexpr(-(1 << 31))
_ABOVE_ALL = tl.constexpr(0xFF800001)  # the key after that of +inf


@triton.jit
def _best_of_groups(
    scores,
    maxima,
    n,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOAD: tl.constexpr,
):
    """Maxima of up to PIECE disjoint groups of a row's scores, NaN where there is no group."""
    source = maxima
    count = n // GROUP  # the window may end inside the last group
    if count < PIECE:
        source = scores
        count = n
    lane = tile_index(PIECE // LOAD, WIDTH // LOAD)[:, :, None] * LOAD + tl.arange(0, LOAD)[None, None, :]
    best = tl.full(lane.shape, float("nan"), tl.float32)
    for piece in tl.static_range(PIECES):
        at = piece * PIECE + lane
        # read to a multiple of LOAD, within the row's memory, so that so many are loaded together
        some = tl.load(source + at, mask=at < tl.cdiv(count, LOAD) * LOAD, other=float("nan"))
        best = tl.maximum(best, tl.where(at < count, some, float("nan")))
    return best


@triton.jit
def _binning(bound, highest, LOG_BINS: tl.constexpr):
    """(lowest key, shift): (key - lowest) >> shift is below 2 ** LOG_BINS for the keys from bound to ``highest``."""
    lowest = to_key(bound)
    spread = tl.where(highest > lowest, highest - lowest, 1)
    # fp32 may round up to the next power of two
    bits = (spread.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return lowest, tl.maximum(bits - LOG_BINS, 0).to(tl.uint32)


@triton.jit
def _bracket(bins, lowest, shift, K, BINS: tl.constexpr):
    """(low, high, reached, beyond), as ``search`` takes them, of the bin in which the K-th best candidate is."""
    bin = BINS - 1 - tl.arange(0, BINS)  # the highest first: a scan in reverse moves all of them twice
    count = tl.cumsum(tl.load(bins + bin), axis=0)  # how many are in a bin or in higher ones
    enough = count >= K
    # one reduction: the highest bin that has enough and its count, the smallest, and the count of the next higher one
    some = tl.join(tl.where(enough, bin, 0), tl.where(enough, 0, count))
    most = tl.max(tl.join(some, tl.where(enough, -count, _NONE)[:, None] + tl.zeros([1, 2], tl.int32)), axis=0)
    some, fewest = tl.split(most)
    bin, beyond = tl.split(some)
    fewest, again = tl.split(fewest)
    reached = tl.where(fewest == _NONE, beyond, -fewest)
    low = lowest + (bin.to(tl.uint32) << shift)
    high = tl.where(bin == BINS - 1, _ABOVE_ALL, lowest + ((bin + 1).to(tl.uint32) << shift))
    return low, high, reached, beyond


@triton.jit
def _select_candidates(
    scores,  # of the row, as are the other tensors
    positions,
    slots,
    bins,
    bound,
    lowest,
    shift,
    out,
    out_positions,
    n,
    K,
    gap,
    SIZE: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOAD: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """The K best of SIZE candidates in a row's list, NaN where there is none: after each ``gap`` loads as many are left
    out, if it is not 0. It is a power of two.
    """
    load = tile_index(SIZE // LOAD, min(WIDTH, SIZE) // LOAD)
    lane = (load + (load & -gap))[:, :, None] * LOAD + tl.arange(0, LOAD)[None, None, :]
    score = tl.load(scores + lane)
    # of candidates not chosen too, and not only once these are known: all loads take the time of one
    slot = tl.load(slots + lane)
    position = tl.load(positions + lane)
    if BINS:
        low, high, reached, beyond = _bracket(bins, lowest, shift, K, BINS)
    else:
        low, high, reached, beyond, all = start_search(score, bound)
    low, reached, beyond = search(score, low, high, reached, beyond, SIZE, K, K)
    score, number = cut(score, position, n, low, reached, beyond, K, K)
    store_chosen(out, out_positions, slot, position, score, to_score(low), number, K, WIDTH, SLOTS, POSITIONS)


@triton.jit(do_not_specialize=["columns", "pages", "K", "most", "splits"])
def _select_split(
    scores,  # [rows, 64 W]
    maxima,  # [rows, at least 64 W / GROUP]
    groups,  # int32, the memory of maxima
    counters,  # int32 [rows, 2 ** LOG_BINS + 16] of zeros: bins, then the programs that have ended; if SHARED
    list_scores,  # [rows, SIZE]; one segment a program
    list_positions,
    list_slots,  # if SLOTS
    page_table,
    req_of_row,
    visible,
    topk_out,  # [rows, K], if SLOTS
    positions_out,  # [rows, K], if POSITIONS
    columns,
    pages,
    K,
    most,
    splits,
    table_row,
    scores_row,
    maxima_row,
    out_row,
    positions_row,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # these two and WIDTH of select_row
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,  # several programs a row
    LOG_BINS: tl.constexpr,
    LOAD: tl.constexpr,
    PAGE: tl.constexpr,
    EARLY: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    BINS: tl.constexpr = 1 << LOG_BINS
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    n = tl.minimum(tl.load(visible + row), columns)
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    out = topk_out + row * out_row
    out_positions = positions_out + row * positions_row
    scores += row * scores_row
    maxima += row * maxima_row
    groups += row * maxima_row
    counters += row * (BINS + 16)
    if EARLY:
        wait_for_kernel_in_front()  # which writes the scores; what the one behind may do is in select_and_absorb.py
    if n <= K:
        if split == 0:
            store_all(out, out_positions, table, n, pages, K, WIDTH, SLOTS, POSITIONS)
        return

    end_with_nan(scores, n, LOAD)
    # every ``splits``-th page is this program's, so that all have about as many candidates
    inside = tl.arange(0, LOAD)[None, None, :]
    quad = tile_index(CHUNK // LOAD, min(WIDTH, CHUNK) // LOAD)
    first = (split + quad // (PAGE // LOAD) * splits) * PAGE + quad % (PAGE // LOAD) * LOAD
    ahead = tl.load(scores + first[:, :, None] + inside, mask=(first < n)[:, :, None], other=float("nan"))
    slot_ahead = paged_slots(table, first, first < n, pages).to(tl.int32)

    best = _best_of_groups(scores, maxima, n, GROUP, PIECE, PIECES, min(WIDTH, PIECE), LOAD)
    low, high, reached, beyond, all = start_search(best, float("-inf"))
    highest = high - 1
    low, reached, beyond = search(best, low, high, reached, beyond, all, K, most)
    bound = tl.where(reached < K, float("-inf"), to_score(low) + 0.0)  # no -0.0, whose key differs from that of 0.0
    lowest, shift = _binning(bound, highest, LOG_BINS)

    room = SIZE // splits
    segment = row * SIZE + split * room
    count = 0
    for _ in range(split * PAGE, n, CHUNK * splits):
        score = ahead
        slot = slot_ahead[:, :, None] + inside
        here = first
        first += CHUNK * splits
        ahead = tl.load(scores + first[:, :, None] + inside, mask=(first < n)[:, :, None], other=float("nan"))
        slot_ahead = paged_slots(table, first, first < n, pages).to(tl.int32)
        position = here[:, :, None] + inside
        candidate = score >= bound
        place, count = places(candidate, count)
        stored = candidate & (place < room)
        tl.store(list_scores + segment + place, score, mask=stored)
        tl.store(list_positions + segment + place, position, mask=stored)
        if SLOTS:
            tl.store(list_slots + segment + place, slot, mask=stored)
        if LOG_BINS > 0:
            bin = tl.minimum((to_key(score + 0.0) - lowest) >> shift, BINS - 1).to(tl.int32)
            tl.atomic_add(counters + bin, 1, mask=candidate, sem="relaxed")
    for start in range(count // WIDTH * WIDTH, room, WIDTH):
        lane = start + tl.arange(0, WIDTH)
        unused = (lane >= count) & (lane < room)
        tl.store(list_scores + segment + lane, tl.full([WIDTH], float("nan"), tl.float32), mask=unused)

    gap = room // 2 // LOAD  # the loads of half a segment
    overflow = count > room
    long = count > gap * LOAD
    tl.debug_barrier()
    if SHARED:
        ended = tl.atomic_add(
            counters + BINS, 1 + tl.where(long, _LONG, 0) + tl.where(overflow, _OVERFLOW, 0), sem="acq_rel"
        )
        if ended % _LONG != splits - 1:
            return
        long = long | (ended % _OVERFLOW >= _LONG)
        overflow = overflow | (ended >= _OVERFLOW)

    if overflow:
        select_row(
            scores, maxima, groups, table, out, out_positions, n, pages, K,
            GROUP, BLOCK, TILE, WIDTH, LOAD, SLOTS, POSITIONS, PAGE,
        )  # fmt: skip
        return
    list_scores += row * SIZE
    list_positions += row * SIZE
    list_slots += row * SIZE
    if long:
        _select_candidates(
            list_scores, list_positions, list_slots, counters, bound, lowest, shift, out, out_positions, n, K,
            0, SIZE, BINS if LOG_BINS > 0 else 0, WIDTH, LOAD, SLOTS, POSITIONS,
        )  # fmt: skip
    else:
        _select_candidates(
            list_scores, list_positions, list_slots, counters, bound, lowest, shift, out, out_positions, n, K,
            gap, SIZE // 2, BINS if LOG_BINS > 0 else 0, WIDTH, LOAD, SLOTS, POSITIONS,
        )  # fmt: skip


def splits_of(rows: int, columns: int, K: int, group: int, device: torch.device) -> int:
    """Programs a row, a power of two, so that all rows fill the device; 0 where select.py's one shall take it."""
    most = min(multiprocessors(device) // rows, columns // CHUNK)
    if not group or K > LARGEST_K or most < LEAST_SPLITS:
        return 0
    return 1 << (most.bit_length() - 1)


def empty_counters(rows: int, splits: int, device: torch.device) -> torch.Tensor | None:
    """What ``write_slots_split`` needs zeroed."""
    return torch.empty(rows, (1 << LOG_BINS) + 16, dtype=torch.int32, device=device) if splits > 1 else None


def write_slots_split(
    scores,
    maxima,
    counters,
    page_table,
    req_of_row,
    visible,
    topk_out: torch.Tensor | None,
    pages: int,
    group: int,
    splits: int,
    early: bool,
    positions_out: torch.Tensor | None = None,
) -> None:
    """``write_slots`` of select.py by ``splits`` programs a row, with maxima of groups and with zeroed counters."""
    slots, positions = outputs(topk_out, positions_out)
    rows, K = slots.shape
    columns = page_table.shape[1] * PAGE
    block, tile = row_tiles(columns, K, group)
    K_padded = triton.next_power_of_2(K)
    piece = max(SMALLEST_LIST, GROUPS * K_padded)
    size = max(SMALLEST_LIST, CANDIDATES * K_padded)
    listed = torch.empty(2 if topk_out is None else 3, rows, size, dtype=torch.int32, device=scores.device)
    _select_split[(rows, splits)](
        scores,
        maxima,
        maxima.view(torch.int32),
        maxima if counters is None else counters,
        listed[0].view(torch.float32),
        listed[1],
        listed[-1],
        page_table,
        req_of_row,
        visible,
        slots,
        positions,
        columns,
        pages,
        K,
        K + K // SLACK,
        splits,
        page_table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        slots.stride(0),
        positions.stride(0),
        GROUP=group,
        BLOCK=block,
        TILE=tile,
        WIDTH=min(LOAD * 32 * WARPS, tile, block),
        PIECE=piece,
        PIECES=max(group, triton.cdiv(columns // group, piece)),  # of scores or of maxima
        CHUNK=CHUNK,
        SIZE=size,
        SHARED=splits > 1,
        LOG_BINS=LOG_BINS if splits > 1 else 0,
        LOAD=LOAD,
        PAGE=PAGE,
        SLOTS=topk_out is not None,
        POSITIONS=positions_out is not None,
        num_warps=WARPS,
        **early_start(early),
    )

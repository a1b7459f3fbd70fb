"""Which rows of mla_prefill attend the first tokens of their request, one after another, and are worth expanded keys.

Such a row is *short*: without ``topk`` every row is, with it a row whose lanes hold exactly the slots of positions
0, 1, .. of its request, as index_topk writes them where all visible keys are selected. That is looked at, lane by lane,
so whoever made the selection need promise nothing; a long row differs within its first lanes, and no more is read.
A request whose short rows repay the expansion of the tokens they attend is *dense*. Both are decided on the device.
The host knows shapes alone, and from them how many requests can be dense at most: each gets a *place* in scratch.

Legend: T rows, B requests, W columns of the page table, H heads, N nope dim, R rope dim, V value dim, L latent dim.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import multiprocessors, paged_slots
from compiled_dsa.custom_ops.kernels.mla_prefill_dense import Tiling
from compiled_dsa.custom_ops.layout import PAGE

# Times for each FLOP beside those of the absorbed attention of the Gluon kernel (540 TFLOP/s on an H200). Not measured:
# a tensor-core kernel in plain Triton is taken to do 450, a GEMM with gathered rows 500. An infinite cost of the
# expansion keeps every row on the sparse path.
ATTENTION_COST = 1.2
EXPANSION_COST = 1.1
WAVES = 1.0  # programs a multiprocessor, of which one runs at a time, that a group of heads must have at least

LONGEST = 4096  # tokens of a request that are expanded at most; K is not larger in any model

_PAGE = tl.constexpr(PAGE)
_LANES = 512  # of a row, looked at together
_ROWS = 1024
_ALLOCATION = 512  # to whose multiples torch rounds


class Plan(NamedTuple):
    """What the host decides.

    Attributes:
        everything: every row is dense, so that nothing is left for the sparse path.
        limit: tokens that a short row attends at most.
        tokens: room for the tokens of one request, ``limit`` rounded up to whole tiles.
        places: requests that can be dense.
        heads: heads whose keys are expanded at a time.
        saved: time saved by each token that a row attends, in FLOP of the sparse path a head.
        spent: time spent for each token that is expanded, likewise.
        index_bytes: scratch held while the sparse path runs.
    """

    everything: bool
    limit: int
    tokens: int
    places: int
    heads: int
    saved: float
    spent: float
    index_bytes: int


class ShortRows(NamedTuple):
    """What the device found.

    Attributes:
        place: int32 [T], that of the row's request; -1 for rows that are not dense.
        rest: int32 [T], count of the rows that are not dense, 0 for those that are; unset where everything is.
        requests: int32 [3, places]: the request of each place; how many tokens of it are expanded (0: nothing is
            there); whether some of them have no page.
    """

    place: Tensor
    rest: Tensor
    requests: Tensor


def plan(
    T: int,
    table_shape: tuple[int, int],
    dims: tuple[int, int, int, int, int],
    width: int,
    paged: bool,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tiling | None,
    scratch_bytes: int,
    row_bytes: int,
) -> Plan | None:
    """How expanded keys are used, or None where the sparse path alone is cheaper, or nothing else fits.

    Args:
        table_shape: B, W.
        dims: H, N, R, V, L.
        width: lanes of a row that count at most.
        paged: rows attend whatever their count says; else a selection.
        tile: of the dense kernels; None: the dims fit none.
        row_bytes: scratch that the sparse path needs for one row.

    A token that is expanded costs 2 L (N + V) FLOP a head, and saves 2 (2L + R) - 2 (N + R + V) for each row that
    attends it. DeepSeek-V3.2 (N, R, V, L = 128, 64, 128, 512): 205 rows repay it, GLM-5 (192, 64, 256, 512): 533. Where
    nothing goes the sparse way, its GEMMs (2 L (N + V) a row) fall away too; this is not counted.
    """
    H, N, R, V, L = dims
    B, W = table_shape
    saved = 2 * L + R - ATTENTION_COST * (N + R + V)
    spent = EXPANSION_COST * L * (N + V)
    limit = min(width, W * PAGE, LONGEST)
    if tile is None or saved <= 0 or not math.isfinite(spent) or limit == 0 or H == 0 or N + V == 0:
        return None
    rows_to_repay = max(1, math.ceil(spent / saved))
    everything = paged and limit == width and rows_to_repay * B <= T
    places = B if everything else min(B, T // rows_to_repay)
    if places == 0:
        return None
    tokens = triton.cdiv(limit, tile.tokens) * tile.tokens
    index_bytes = sum(map(_allocated, (8 * T, 8 * 3 * B, 4 * B, 4 * 3 * places)))
    rope_bytes = _allocated(places * tokens * R * dtype.itemsize)
    head_bytes = places * tokens * (N + V) * dtype.itemsize
    heads = min(H, (scratch_bytes - index_bytes - rope_bytes - _ALLOCATION) // head_bytes)
    if not everything and scratch_bytes - index_bytes < row_bytes:
        return None
    blocks = triton.cdiv(T, tile.rows)
    if heads < 1 or heads * blocks < min(WAVES * multiprocessors(device), H * blocks):
        return None
    return Plan(everything, limit, tokens, places, heads, saved, spent, index_bytes)


def _allocated(size: int) -> int:
    return triton.cdiv(size, _ALLOCATION) * _ALLOCATION


@triton.jit(do_not_specialize=["width", "limit", "pages", "requests"])
def _find(
    topk,  # [T, K], unless PAGED
    count,  # [T]
    page_table,  # [B, W]
    req_of_row,  # [T]
    attended,  # [T]: the tokens of a short row, 0 for others
    totals,  # int64 [3, B]: tokens attended by short rows, the most by one, and whether some of these have no page
    width,
    limit,
    pages,
    requests,
    topk_row,
    table_row,
    PAGED: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(count + row), width)
    request = tl.load(req_of_row + row)
    short = (n > 0) & (n <= limit) & (request >= 0) & (request < requests)
    table = page_table + tl.where(short, request, 0).to(tl.int64) * table_row
    holes = n * 0
    start = n * 0
    while short & (start < n):
        position = start + tl.arange(0, LANES)
        inside = position < n
        slot = paged_slots(table, position, inside, pages)
        if not PAGED:
            # an id outside the pool holds no token, as a position whose page is not in the pool
            lane = tl.load(topk + row * topk_row + position, mask=inside, other=-1)
            lane = tl.where((lane >= 0) & (lane // _PAGE < pages), lane.to(tl.int64), -1)
            short = short & (tl.sum((lane != slot).to(tl.int32), axis=0) == 0)
        holes = tl.maximum(holes, tl.max((inside & (slot < 0)).to(tl.int32), axis=0))
        start += LANES
    tl.store(attended + row, tl.where(short, n, 0))
    if short:  # sums of integers: the order of rows does not matter
        tl.atomic_add(totals + request, n.to(tl.int64), sem="relaxed")
        tl.atomic_max(totals + requests + request, n.to(tl.int64), sem="relaxed")
        if holes > 0:
            tl.atomic_max(totals + 2 * requests + request, holes.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["requests", "places"])
def _place(
    totals,  # int64 [3, B]
    place_of_request,  # [B]
    placed,  # [3, places], zeros
    requests,
    places,
    saved,
    spent,
    EVERYTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: dense requests get the places 0, 1, .. in their order."""
    taken = requests * 0
    for start in range(0, requests, BLOCK):
        request = start + tl.arange(0, BLOCK)
        inside = request < requests
        attended = tl.load(totals + request, mask=inside, other=0)
        longest = tl.load(totals + requests + request, mask=inside, other=0)
        holes = tl.load(totals + 2 * requests + request, mask=inside, other=0)
        dense = longest > 0
        if not EVERYTHING:
            dense = dense & (attended.to(tl.float32) * saved >= longest.to(tl.float32) * spent)
        place = taken + tl.cumsum(dense.to(tl.int32), axis=0) - 1
        dense = dense & (place < places)  # never more, but for the rounding of these products
        tl.store(place_of_request + request, tl.where(dense, place, -1), mask=inside)
        tl.store(placed + place, request, mask=dense)
        tl.store(placed + places + place, longest.to(tl.int32), mask=dense)
        tl.store(placed + 2 * places + place, holes.to(tl.int32), mask=dense)
        taken += tl.sum(dense.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["rows"])
def _divide(
    place,  # [T]: the tokens of a short row, and in their place that of its request
    rest,  # [T], unless EVERYTHING
    count,
    req_of_row,
    place_of_request,
    rows,
    EVERYTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    short = tl.load(place + row, mask=inside, other=0) > 0
    request = tl.load(req_of_row + row, mask=short, other=0)
    its_place = tl.load(place_of_request + request, mask=short, other=-1)
    tl.store(place + row, its_place, mask=inside)
    if not EVERYTHING:
        n = tl.load(count + row, mask=inside, other=0)
        tl.store(rest + row, tl.where(its_place < 0, n, 0), mask=inside)


def find(topk, count, page_table, req_of_row, pages: int, width: int, plan: Plan) -> ShortRows:
    """The dense rows of a call; ``width``: lanes that count at most. Five launches, nothing is synchronised."""
    T, B, device = count.shape[0], page_table.shape[0], count.device
    paged = topk is None
    rows = torch.empty(2, T, dtype=torch.int32, device=device)
    totals = torch.zeros(3, B, dtype=torch.int64, device=device)
    place_of_request = torch.empty(B, dtype=torch.int32, device=device)
    placed = torch.zeros(3, plan.places, dtype=torch.int32, device=device)
    _find[(T,)](
        page_table if paged else topk,
        count,
        page_table,
        req_of_row,
        rows[0],
        totals,
        width,
        plan.limit,
        pages,
        B,
        0 if paged else topk.stride(0),
        page_table.stride(0),
        PAGED=paged,
        LANES=_LANES,
        num_warps=1,
    )
    _place[(1,)](totals, place_of_request, placed, B, plan.places, plan.saved, plan.spent, plan.everything, BLOCK=_ROWS)
    _divide[(triton.cdiv(T, _ROWS),)](
        rows[0], rows[1], count, req_of_row, place_of_request, T, plan.everything, BLOCK=_ROWS
    )
    return ShortRows(rows[0], rows[1], placed)

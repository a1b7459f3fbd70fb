"""What stands around the kernels of libraries so that they keep the contracts of the ops: ids, pages and scores that
they do not check, and results in buffers of the caller.

Legend: T rows, P pages, W columns of a page table, K lanes of a selection, H heads, L latent dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import outputs, paged_slots
from compiled_dsa.custom_ops.layout import PAGE

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of finite fp32 numbers
_PAGE = tl.constexpr(PAGE)
_BLOCK = 1024  # scores, ids or pages of one program; a multiple of every group and of a page


@triton.jit(do_not_specialize=["columns", "width", "pages", "K"])
def _rows_of_pages(
    page_table,
    req_of_row,
    visible,
    tables,  # [T, W]
    lengths,  # [T]
    columns,
    width,
    pages,
    K,
    table_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    page = tl.load(table + column, mask=column < width, other=0)
    page = tl.where((page >= 0) & (page < pages), page, 0)
    tl.store(tables + row * width + column, page, mask=column < width)
    if tl.program_id(1) == 0:
        n = tl.minimum(tl.load(visible + row), columns)
        tl.store(lengths + row, tl.where(n > K, n, 1))


def rows_of_pages(page_table: Tensor, req_of_row: Tensor, visible: Tensor, pages: int, K: int) -> tuple[Tensor, Tensor]:
    """(int32 [T, W], int32 [T]): the pages of each row, entries outside the pool as page 0, and how many keys of it are
    to be scored: 1 of a row that sees at most K, since a length of 0 is no case of some libraries."""
    T, W = req_of_row.shape[0], page_table.shape[1]
    tables = torch.empty(T, W, dtype=torch.int32, device=page_table.device)
    lengths = torch.empty(T, dtype=torch.int32, device=page_table.device)
    _rows_of_pages[(T, triton.cdiv(W, _BLOCK))](
        page_table,
        req_of_row,
        visible,
        tables,
        lengths,
        W * PAGE,
        W,
        pages,
        K,
        page_table.stride(0),
        BLOCK=_BLOCK,
    )
    return tables, lengths


@triton.jit(do_not_specialize=["columns", "pages", "K"])
def _mark_pages(
    scores,  # [T, 64 W]
    maxima,  # [T, at least 64 W / GROUP], if GROUP > 1
    page_table,
    req_of_row,
    visible,
    columns,
    pages,
    K,
    table_row,
    scores_row,
    maxima_row,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    n = tl.minimum(tl.load(visible + row), columns)
    if (n <= K) | (start >= n):
        return
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    position = start + tl.arange(0, BLOCK)
    page = tl.load(table + position // _PAGE, mask=position < n, other=0)
    bad = (position < n) & ((page < 0) | (page >= pages))
    line = scores + row * scores_row + position
    if GROUP > 1:
        score = tl.load(line, mask=(position < n) & (bad == 0), other=float("nan"))
        best = tl.max(tl.reshape(score, [BLOCK // GROUP, GROUP]), axis=1)
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(maxima + row * maxima_row + group, best, mask=group * GROUP < n)
    tl.store(line, tl.full([BLOCK], float("nan"), tl.float32), mask=bad)


def mark_pages(
    scores: Tensor,
    maxima: Tensor,
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    pages: int,
    K: int,
    group: int,
) -> None:
    """Scores of keys on pages outside the pool become NaN; with ``group``, maxima of so many neighbouring scores are
    written as select.py wants them. Rows that see at most K keys are left as they are."""
    T, columns = req_of_row.shape[0], page_table.shape[1] * PAGE
    _mark_pages[(T, triton.cdiv(columns, _BLOCK))](
        scores,
        maxima,
        page_table,
        req_of_row,
        visible,
        columns,
        pages,
        K,
        page_table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        GROUP=group or 1,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["columns", "K"])
def _order_scores(scores, visible, columns, K, scores_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.minimum(tl.load(visible + row), columns)
    if n <= K:
        return
    line = scores + row * scores_row + position
    score = tl.load(line, mask=position < n, other=float("-inf"))
    number = tl.where(score == float("-inf"), _LOWEST, score + 0.0)
    number = tl.where((score == score) & (position < n), number, float("-inf"))
    tl.store(line, number, mask=position < columns)


def order_scores(scores: Tensor, visible: Tensor, K: int) -> None:
    """Scores [T, n] as a selection that knows no NaN and no window needs them, in place: what must not be chosen is
    -inf, and an infinitely low score the lowest finite number. Rows that see at most K keys are left as they are."""
    T, columns = scores.shape
    _order_scores[(T, triton.cdiv(columns, _BLOCK))](scores, visible, columns, K, scores.stride(0), BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["columns", "pages", "K", "chosen"])
def _write_positions(
    positions,  # [T, chosen]
    scores,
    page_table,
    req_of_row,
    visible,
    topk_out,  # [T, K], if SLOTS
    positions_out,  # [T, K], if POSITIONS
    columns,
    pages,
    K,
    chosen,
    positions_row,
    scores_row,
    table_row,
    out_row,
    positions_out_row,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(visible + row), columns)
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    out = topk_out + row * out_row
    out_positions = positions_out + row * positions_out_row
    lane = tl.arange(0, LANES)
    if n <= K:
        slot = paged_slots(table, lane, lane < n, pages).to(tl.int32)
        if SLOTS:
            tl.store(out + lane, slot, mask=lane < K)
        if POSITIONS:
            tl.store(out_positions + lane, tl.where(slot >= 0, lane, -1), mask=lane < K)
        return
    position = tl.load(positions + row * positions_row + lane, mask=lane < chosen, other=-1).to(tl.int32)
    inside = (position >= 0) & (position < n)
    score = tl.load(scores + row * scores_row + position, mask=inside, other=float("-inf"))
    taken = score > float("-inf")
    slot = paged_slots(table, position, taken, pages)
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    count = tl.sum(taken.to(tl.int32), axis=0)
    if SLOTS:
        tl.store(out + place, slot.to(tl.int32), mask=taken)
        tl.store(out + lane, tl.full([LANES], -1, tl.int32), mask=(lane >= count) & (lane < K))
    if POSITIONS:
        tl.store(out_positions + place, position, mask=taken)
        tl.store(out_positions + lane, tl.full([LANES], -1, tl.int32), mask=(lane >= count) & (lane < K))


def write_positions(
    positions: Tensor,
    scores: Tensor,
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    topk_out: Tensor | None,
    pages: int,
    positions_out: Tensor | None = None,
) -> None:
    """Writes ``topk_out``, ``positions_out`` or both, [T, K] and whole, from positions [T, n] that a selection chose
    among ordered scores (see ``order_scores``): of those whose score is not -inf, then -1."""
    slots, where = outputs(topk_out, positions_out)
    T, K = slots.shape
    _write_positions[(T,)](
        positions,
        scores,
        page_table,
        req_of_row,
        visible,
        slots,
        where,
        page_table.shape[1] * PAGE,
        pages,
        K,
        positions.shape[1],
        positions.stride(0),
        scores.stride(0),
        page_table.stride(0),
        slots.stride(0),
        where.stride(0),
        LANES=max(16, triton.next_power_of_2(K)),
        SLOTS=topk_out is not None,
        POSITIONS=positions_out is not None,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["K", "width", "slots"])
def _clean_ids(topk, count, out, K, width, slots, topk_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.minimum(tl.load(count + row), K)
    slot = tl.load(topk + row * topk_row + lane, mask=lane < n, other=-1)
    good = (slot >= 0) & (slot.to(tl.int64) < slots)
    tl.store(out + row * width + lane, tl.where(good, slot, -1), mask=lane < width)


def clean_ids(topk: Tensor, count: Tensor, pages: int, multiple: int) -> Tensor:
    """int32 [T, K padded to a multiple]: the selection of each row, -1 in lanes past its count and for ids outside the
    pool."""
    T, K = topk.shape
    width = max(1, triton.cdiv(K, multiple)) * multiple
    out = torch.empty(T, width, dtype=torch.int32, device=topk.device)
    _clean_ids[(T, triton.cdiv(width, _BLOCK))](topk, count, out, K, width, pages * PAGE, topk.stride(0), BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["heads"])
def _write_attention(
    o,
    o_lse,
    out,
    lse,
    heads,
    o_row,
    o_head,
    o_lse_row,
    out_row,
    out_head,
    lse_row,
    lse_head,
    L: tl.constexpr,
):
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    column = tl.arange(0, L)
    value = tl.load(o + row * o_row + head * o_head + column)
    log_sum = tl.load(o_lse + row * o_lse_row + head)
    tl.store(out + row * out_row + head * out_head + column, value)
    tl.store(lse + row * lse_row + head * lse_head, tl.where(log_sum == float("inf"), float("-inf"), log_sum))


def write_attention(o: Tensor, o_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """The first H heads of o [T, heads, L] and o_lse [T, heads] into out [T, H, L] and lse [T, H]; L is a power of two.

    The library's lse of a row without keys, +inf, becomes -inf.
    """
    T, H, L = out.shape
    _write_attention[(T * H,)](
        o,
        o_lse,
        out,
        lse,
        H,
        o.stride(0),
        o.stride(1),
        o_lse.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        L=L,
        num_warps=1,
    )

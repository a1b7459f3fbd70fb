"""batch_metadata in Triton: one launch, a program for each block of rows.

Programs share nothing: each adds up the lengths itself, up to where its rows end. A step of decode reads few requests
before that, and a few thousand are 16 blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import refuses_device, refuses_strides
from compiled_dsa.custom_ops.layout import PAGE

_PAGE = tl.constexpr(PAGE)
BLOCK_ROWS, BLOCK_REQUESTS = 32, 256  # compared with each other: 64 comparisons a thread


def refuses(
    q_len: Tensor,
    kv_len: Tensor,
    page_table: Tensor,
    accepted: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    q_start: Tensor,
    kv_out: Tensor,
) -> str | None:
    return refuses_device(page_table) or refuses_strides(
        q_len=q_len,
        kv_len=kv_len,
        page_table=page_table,
        accepted=accepted,
        positions=positions,
        slots=slots,
        req_of_row=req_of_row,
        visible=visible,
        q_start=q_start,
        kv_out=kv_out,
    )


@triton.jit
def _rows(q_len, request, inside):
    """int32: rows of requests."""
    return tl.maximum(tl.load(q_len + request, mask=inside, other=0).to(tl.int32), 0)


@triton.jit
def _lengths(q_len, kv_len, accepted, request, inside, ACCEPTED: tl.constexpr):
    """Of requests: (keys before the step, rows that count), both int32."""
    rows = _rows(q_len, request, inside)
    before = tl.load(kv_len + request, mask=inside, other=0).to(tl.int32) - rows
    kept = rows
    if ACCEPTED:
        kept = tl.load(accepted + request, mask=inside, other=0).to(tl.int32)
        kept = tl.minimum(tl.maximum(kept, 0), rows)
    return before, kept


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns", "table_row"])
def _fill(
    q_len,
    kv_len,
    page_table,
    accepted,
    positions,
    slots,
    req_of_row,
    visible,
    q_start,
    kv_out,
    num_rows,
    num_requests,
    columns,
    table_row,
    ACCEPTED: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    first_program = first_row == 0  # it also writes what has an entry a request
    if first_program:
        tl.store(q_start, 0)
    passed = tl.zeros((ROWS,), tl.int32)  # requests that end at or before the row
    start = tl.zeros((ROWS,), tl.int32)  # where the last of them ends
    end_so_far = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while (first < num_requests) & ((end_so_far < first_row + ROWS) | first_program):
        request = first + tl.arange(0, REQUESTS)
        inside = request < num_requests
        length = _rows(q_len, request, inside)
        end = end_so_far + tl.cumsum(length, axis=0)
        is_passed = (end[None, :] <= row[:, None]) & inside[None, :]
        passed += tl.sum(is_passed.to(tl.int32), axis=1)
        start = tl.maximum(start, tl.max(tl.where(is_passed, end[None, :], 0), axis=1))
        if first_program:
            before, kept = _lengths(q_len, kv_len, accepted, request, inside, ACCEPTED)
            tl.store(q_start + 1 + request, end, mask=inside)
            tl.store(kv_out + request, tl.maximum(before + kept, 0), mask=inside)
        end_so_far += tl.sum(length, axis=0)
        first += REQUESTS
    written = row < num_rows
    request = tl.minimum(passed, num_requests - 1)
    before, kept = _lengths(q_len, kv_len, accepted, request, written, ACCEPTED)
    row_of_request = row - start
    position = before + row_of_request
    real = written & (passed < num_requests) & (row_of_request < kept) & (position >= 0)
    position = tl.where(real, position, 0)
    column = position // _PAGE
    table = page_table + request.to(tl.int64) * table_row
    page = tl.load(table + column, mask=real & (column < columns), other=-1)
    slot = tl.where(page >= 0, page.to(tl.int64) * _PAGE + position % _PAGE, -1)
    tl.store(positions + row, position, mask=written)
    tl.store(slots + row, slot, mask=written)
    tl.store(req_of_row + row, request, mask=written)
    tl.store(visible + row, tl.where(real, position + 1, 0), mask=written)


def run(
    q_len: Tensor,
    kv_len: Tensor,
    page_table: Tensor,
    accepted: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    q_start: Tensor,
    kv_out: Tensor,
) -> None:
    T = positions.shape[0]
    _fill[(max(1, triton.cdiv(T, BLOCK_ROWS)),)](  # without rows there still are requests to write
        q_len,
        kv_len,
        page_table,
        q_len if accepted is None else accepted,
        positions,
        slots,
        req_of_row,
        visible,
        q_start,
        kv_out,
        T,
        q_len.shape[0],
        page_table.shape[1],
        page_table.stride(0),
        ACCEPTED=accepted is not None,
        ROWS=BLOCK_ROWS,
        REQUESTS=BLOCK_REQUESTS,
    )

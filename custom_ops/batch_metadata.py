"""batch_metadata: where the rows of a step stand, from lengths and a page table that lie on the device.

Legend: T rows, B requests, maxP columns of the page table.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import check_dtype, check_shape, logical_slots
from compiled_dsa.custom_ops.registry import define

LENGTH_DTYPES = (torch.int32, torch.int64)


def check(
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
    check_shape("q_len", q_len, None)
    B = q_len.shape[0]
    if B == 0:
        raise ValueError("q_len has shape (0,); rows of padding need a request to belong to, so B is at least 1")
    check_shape("kv_len", kv_len, B)
    check_shape("page_table", page_table, B, None)
    check_dtype("page_table", page_table, torch.int32)
    lengths = {"q_len": q_len, "kv_len": kv_len}
    if accepted is not None:
        check_shape("accepted", accepted, B)
        lengths["accepted"] = accepted
    for name, tensor in lengths.items():
        check_dtype(name, tensor, *LENGTH_DTYPES)
    check_shape("positions", positions, None)
    T = positions.shape[0]
    rows = {"positions": positions, "req_of_row": req_of_row, "visible": visible}
    for name, tensor in {**rows, "slots": slots}.items():
        check_shape(name, tensor, T)
    check_shape("q_start", q_start, B + 1)
    check_shape("kv_out", kv_out, B)
    for name, tensor in {**rows, "q_start": q_start, "kv_out": kv_out}.items():
        check_dtype(name, tensor, torch.int32)
    check_dtype("slots", slots, torch.int64)


def reference(
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
    q_len, kv_len = q_len.long().clamp(min=0), kv_len.long()
    kept = q_len if accepted is None else accepted.long().clamp(min=0).minimum(q_len)
    before = kv_len - q_len
    ends = q_len.cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    rows = torch.arange(positions.shape[0], device=q_len.device)
    request = torch.searchsorted(ends, rows, right=True).clamp(max=q_len.shape[0] - 1)
    row_of_request = rows - starts[request]  # past the last request: not below its length, so padding
    position = before[request] + row_of_request
    real = (row_of_request < kept[request]) & (position >= 0)
    position = torch.where(real, position, 0)
    positions.copy_(position)
    slots.copy_(torch.where(real, logical_slots(page_table, request, position), -1))
    req_of_row.copy_(request)
    visible.copy_(torch.where(real, position + 1, 0))
    q_start.copy_(starts)
    kv_out.copy_((before + kept).clamp(min=0))


BATCH_METADATA = define(
    "batch_metadata(Tensor q_len, Tensor kv_len, Tensor page_table, Tensor? accepted, Tensor(a!) positions, "
    "Tensor(b!) slots, Tensor(c!) req_of_row, Tensor(d!) visible, Tensor(e!) q_start, Tensor(f!) kv_out)",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.batch_metadata"},
)


def batch_metadata(
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
    *,
    provider: str | None = None,
) -> None:
    """Fills the description of a step in place: rows of the requests one after another, then padding.

    A row of request b is padding when it stands before position 0 (more rows than keys) or after the accepted ones.
    Padding has position 0, slot -1 and visible 0. With T below sum(q_len) the last rows are left out.

    Args:
        q_len: int32 or int64 [B], rows of each request, their sum below 2^31; a negative number counts as 0, since it
            lies on the device, where nothing can be raised.
        kv_len: int32 or int64 [B], keys of each request after the step if all its rows count.
        page_table: int32 [B, maxP], -1 where there is no page; rows that stand there have slot -1.
        accepted: int32 or int64 [B], how many of its rows count for each request, taken into [0, q_len]; None: all.
        positions: int32 [T], written: position in the request.
        slots: int64 [T], written: physical slot.
        req_of_row: int32 [T], written: request, in [0, B).
        visible: int32 [T], written: position + 1.
        q_start: int32 [B+1], written: first row of each request, whatever T is.
        kv_out: int32 [B], written: keys of each request after the step, accepted rows only.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.batch_metadata(
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
        provider=provider,
    )

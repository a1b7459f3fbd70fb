"""One description of a step for every kind of batch: prefill, chunked prefill, decode, mixed, verify, idle.

Legend: T query tokens (rows) of the step, B requests, maxP pages of a page table.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import logical_slots

DECODE = "decode"
PREFILL = "prefill"
MAX_DECODE_TOKENS = 8  # tokens a request up to which a batch of equal requests is decode-shaped


@dataclass
class Batch:
    """Where the rows of a step stand and what they may see. All tensors lie on the device; nothing is synchronised.

    Attributes:
        positions: int32 [T], position of each row in its request.
        slots: int64 [T], physical slot where the row's keys go; -1 for padding rows.
        req_of_row: int32 [T], request of each row, in [0, B).
        visible: int32 [T], the row sees positions [0, visible) of its request; 0 for padding rows.
        q_start: int32 [B+1], first row of each request.
        kv_len: int32 [B], keys of each request after this step.
        page_table: int32 [B, maxP], pages of each request in order.
        kind: "decode" (few equal tokens a request) or "prefill": which ops run. Host-known.
        skip_scores: host-known: every kv length is at most index_topk, so every visible key is selected. May be False
            although it holds, never True although it does not.
    """

    positions: Tensor
    slots: Tensor
    req_of_row: Tensor
    visible: Tensor
    q_start: Tensor
    kv_len: Tensor
    page_table: Tensor
    kind: str
    skip_scores: bool

    @classmethod
    def from_lengths(
        cls,
        q_len: Tensor,
        kv_len: Tensor,
        page_table: Tensor,
        num_rows: int,
        *,
        kind: str = PREFILL,
        skip_scores: bool = False,
    ) -> "Batch":
        """Rows of the requests one after another, then padding rows.

        Args:
            q_len: integer [B], rows of each request in this step.
            kv_len: integer [B], keys of each request after this step. Rows that would stand before position 0
                (more rows than keys) are padding.
            page_table: int32 [B, maxP].
            num_rows: T >= sum(q_len), as the host knows it; with fewer, the last rows of the batch are left out.

        Example: q_len [3, 2], kv_len [10, 4] gives visible [8, 9, 10, 3, 4].
        """
        _check_lengths(q_len, kv_len, page_table, num_rows, kind)
        B, device = q_len.shape[0], q_len.device
        if B == 0:  # one request without rows, so that padding rows have a request to belong to
            q_len, kv_len = q_len.new_zeros(1), kv_len.new_zeros(1)
            page_table = page_table.new_full((1, page_table.shape[1]), -1)
            B = 1
        q_len, kv_len = q_len.long(), kv_len.long()
        q_start = torch.nn.functional.pad(q_len.cumsum(0), (1, 0))
        rows = torch.arange(num_rows, device=device)
        request = torch.searchsorted(q_start[1:], rows, right=True).clamp(max=B - 1)
        positions = rows - q_start[request] + (kv_len - q_len)[request]
        return cls._assemble(positions, request, rows < q_start[-1], q_start, kv_len, page_table, kind, skip_scores)

    @classmethod
    def from_grid(
        cls, real: Tensor | None, past: Tensor, page_table: Tensor, num_new: int, *, skip_scores: bool = False
    ) -> "Batch":
        """Rows of a rectangular [B, S] step, as Hugging Face models have them; rows that are padding get no position.

        Args:
            real: bool [B, S], False for padding tokens, anywhere; None when all are real.
            past: integer [B], keys of each request before this step.
            page_table: int32 [B, maxP].
            num_new: S.
        """
        _check_grid(real, past, page_table, num_new)
        B, device = past.shape[0], past.device
        request = torch.arange(B, device=device).unsqueeze(1).expand(B, num_new)
        if real is None:
            positions = past.long().unsqueeze(1) + torch.arange(num_new, device=device)
            real = torch.ones_like(positions, dtype=torch.bool)
            kv_len = past.long() + num_new
        else:
            counted = real.long().cumsum(1)
            positions = past.long().unsqueeze(1) + counted - 1
            kv_len = past.long() + real.sum(1)
        q_start = torch.arange(B + 1, device=device) * num_new
        kind = DECODE if num_new <= MAX_DECODE_TOKENS else PREFILL
        flat = [x.reshape(-1) for x in (positions, request, real)]
        return cls._assemble(flat[0], flat[1], flat[2], q_start, kv_len, page_table, kind, skip_scores)

    @classmethod
    def idle(
        cls, num_rows: int, num_requests: int, pages: int, device: torch.device | str, *, kind: str, skip_scores: bool
    ) -> "Batch":
        """A batch in which nothing is to be done: padding rows of requests without keys, as graphs are captured with.

        Args:
            pages: columns of the page table.
        """

        def filled(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            positions=filled(num_rows),
            slots=filled(num_rows, value=-1, dtype=torch.int64),
            req_of_row=filled(num_rows),
            visible=filled(num_rows),
            q_start=filled(num_requests + 1),
            kv_len=filled(num_requests),
            page_table=filled(num_requests, pages, value=-1),
            kind=kind,
            skip_scores=skip_scores,
        )

    @classmethod
    def _assemble(cls, positions, request, real, q_start, kv_len, page_table, kind, skip_scores) -> "Batch":
        real = real & (positions >= 0)
        positions = positions.clamp(min=0)
        return cls(
            positions=positions.int(),
            slots=torch.where(real, logical_slots(page_table, request, positions), -1),
            req_of_row=request.int(),
            visible=torch.where(real, positions + 1, 0).int(),
            q_start=q_start.int(),
            kv_len=kv_len.int(),
            page_table=page_table,
            kind=kind,
            skip_scores=skip_scores,
        )


def _check_grid(real: Tensor | None, past: Tensor, page_table: Tensor, num_new: int) -> None:
    if past.dim() != 1:
        raise ValueError(f"past has shape {tuple(past.shape)}; it must be [B]")
    if real is not None and (real.dtype != torch.bool or real.shape != (past.shape[0], num_new)):
        raise ValueError(f"real is {real.dtype} {tuple(real.shape)}; it must be bool [{past.shape[0]}, {num_new}]")
    if page_table.dim() != 2 or page_table.shape[0] != past.shape[0] or page_table.dtype != torch.int32:
        raise ValueError(
            f"page_table is {page_table.dtype} {tuple(page_table.shape)}; it must be int32 [{past.shape[0]}, maxP]"
        )


def _check_lengths(q_len: Tensor, kv_len: Tensor, page_table: Tensor, num_rows: int, kind: str) -> None:
    if q_len.dim() != 1 or kv_len.shape != q_len.shape:
        raise ValueError(f"q_len {tuple(q_len.shape)} and kv_len {tuple(kv_len.shape)}; both must be [B]")
    if page_table.dim() != 2 or page_table.shape[0] != q_len.shape[0] or page_table.dtype != torch.int32:
        raise ValueError(
            f"page_table is {page_table.dtype} {tuple(page_table.shape)}; it must be int32 [{q_len.shape[0]}, maxP]"
        )
    if num_rows < 0:
        raise ValueError(f"num_rows={num_rows}; it must be at least 0")
    if kind not in (DECODE, PREFILL):
        raise ValueError(f"kind={kind!r}; it must be {DECODE!r} or {PREFILL!r}")

"""One description of a step for every kind of batch: prefill, chunked prefill, decode, mixed, verify, drafting, idle.

Legend: T query tokens (rows) of the step, B requests, maxP pages of a page table.

| step                                      | made by                                                             |
|-------------------------------------------|---------------------------------------------------------------------|
| prefill, also in chunks or after a prefix | ``from_lengths``, kv_len = prefix + chunk                           |
| mixed                                     | ``from_lengths``, the decoding requests with one row each           |
| decode                                    | ``decode``                                                          |
| verify of n tokens a request              | ``decode(tokens=n)``                                                |
| draft-extend after a verify               | ``decode(tokens=n, accepted=...)`` with the lengths of the verify   |
| k tokens of a draft model, one by one     | ``steps(k)`` of the batch before, or ``advance()`` k times          |
| nothing (a rank without work)             | ``from_lengths`` with B = 0 or T = 0, ``idle``                      |

All of these are padded alike. A caller with buffers of its own gives ``from_lengths`` more rows than there are tokens,
and lengths of 0 for requests that are absent. A caller of a compiled model pads nothing: the model's runner makes
``Batch.idle`` of a bucket's size once, captures with it, and before each replay copies the batch into its first rows
and requests and resets the rest (steps.py). A batch without rows runs as one of padding rows, with graphs or without:
after a warm-up of its kind it compiles nothing. ``accepted`` is spent when the batch is made, so it needs no buffer
there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_dsa.custom_ops.batch_metadata import batch_metadata
from compiled_dsa.custom_ops.layout import logical_slots

DECODE = "decode"
PREFILL = "prefill"
MAX_DECODE_TOKENS = 8  # tokens a request up to which a batch of equal requests is decode-shaped


@dataclass
class Batch:
    """Where the rows of a step stand and what they may see. All tensors lie on the device; nothing is synchronised.

    Attributes:
        positions: int32 [T], position of each row in its request; 0 for padding rows.
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
        accepted: Tensor | None = None,
        kind: str = PREFILL,
        skip_scores: bool = False,
    ) -> "Batch":
        """Rows of the requests one after another, then padding rows. One launch on a GPU.

        Args:
            q_len: int32 or int64 [B], rows of each request in this step; a negative number counts as 0.
            kv_len: int32 or int64 [B], keys of each request after this step. Rows that would stand before position 0
                (more rows than keys) are padding.
            page_table: int32 [B, maxP].
            num_rows: T >= sum(q_len), as the host knows it; with fewer, the last rows of the batch are left out.
            accepted: int32 or int64 [B], how many of its rows count for each request; the others are padding and
                ``kv_len`` of the batch is without them. None: all count.

        With B = 0 the batch has no request either, unless it has rows: these belong to one request without keys.

        Example: q_len [3, 2], kv_len [10, 4] gives visible [8, 9, 10, 3, 4]; accepted [1, 2] in addition
        gives visible [8, 0, 0, 3, 4] and kv_len [8, 4].
        """
        _check_lengths(q_len, kv_len, page_table, num_rows, kind)
        if q_len.shape[0] == 0 and num_rows == 0:
            return cls.idle(0, 0, page_table.shape[1], q_len.device, kind=kind, skip_scores=skip_scores)
        if q_len.shape[0] == 0:  # one request without rows, so that padding rows have a request to belong to
            q_len, kv_len, accepted = q_len.new_zeros(1), kv_len.new_zeros(1), None
            page_table = page_table.new_full((1, page_table.shape[1]), -1)
        q_len, kv_len = q_len.contiguous(), kv_len.contiguous()
        accepted = None if accepted is None else accepted.contiguous()
        B, device = q_len.shape[0], q_len.device

        def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        rows = empty(num_rows), empty(num_rows, torch.int64), empty(num_rows), empty(num_rows)
        requests = empty(B + 1), empty(B)
        batch_metadata(q_len, kv_len, page_table, accepted, *rows, *requests)
        return cls(*rows, *requests, page_table, kind, skip_scores)

    @classmethod
    def decode(
        cls,
        kv_len: Tensor,
        page_table: Tensor,
        tokens: int = 1,
        *,
        accepted: Tensor | None = None,
        skip_scores: bool = False,
    ) -> "Batch":
        """The same number of rows for every request: decode, verify, draft-extend. T = B * tokens.

        Args:
            kv_len: int32 or int64 [B], keys of each request after this step; 0 for a request that is padding.
            page_table: int32 [B, maxP].
            tokens: rows a request; up to MAX_DECODE_TOKENS the batch is decode-shaped.
            accepted: int32 or int64 [B], how many of its rows count for each request; None: all.

        Raises:
            ValueError: ``tokens`` below 1, or a shape or dtype as in ``from_lengths``.
        """
        if tokens < 1:
            raise ValueError(f"tokens={tokens}; every request has at least one row")
        return cls.from_lengths(
            torch.full_like(kv_len, tokens),
            kv_len,
            page_table,
            kv_len.shape[0] * tokens,
            accepted=accepted,
            kind=DECODE if tokens <= MAX_DECODE_TOKENS else PREFILL,
            skip_scores=skip_scores,
        )

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
        position, request, real = (x.reshape(-1) for x in (positions, request, real & (positions >= 0)))
        position = torch.where(real, position, 0)
        return cls(
            positions=position.int(),
            slots=torch.where(real, logical_slots(page_table, request, position), -1),
            req_of_row=request.int(),
            visible=torch.where(real, position + 1, 0).int(),
            q_start=q_start.int(),
            kv_len=kv_len.int(),
            page_table=page_table,
            kind=kind,
            skip_scores=skip_scores,
        )

    @classmethod
    def idle(
        cls, num_rows: int, num_requests: int, pages: int, device: torch.device | str, *, kind: str, skip_scores: bool
    ) -> "Batch":
        """A batch in which nothing is to be done: padding rows of requests without keys, as graphs are captured with.

        Args:
            num_rows: T, padding rows.
            num_requests: B, at least 1 where there are rows.
            pages: columns of the page table.

        Raises:
            ValueError: a number below that, or another ``kind`` than "decode" and "prefill".
        """
        _check_kind(kind)
        for name, value in (("num_rows", num_rows), ("num_requests", num_requests), ("pages", pages)):
            if value < 0:
                raise ValueError(f"{name}={value}; it must be at least 0")
        if num_rows and not num_requests:
            raise ValueError(f"num_requests=0; it must be at least 1, for {num_rows} rows to belong to")

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

    def last_rows(self, accepted: Tensor | None = None) -> Tensor:
        """int64 [B]: row of the last token of each request, as for its logits or its selection.

        Args:
            accepted: int32 or int64 [B], how many of its rows count for each request; None: all of the step. A batch
                that was made with ``accepted`` does not keep it, so it is given here again.

        A request without such a row gets some row of the batch, whose values mean nothing for it; with B above 0, T is
        at least 1.
        """
        last = self.q_start[:-1] + self._kept(accepted) - 1
        return last.clamp(0, self.positions.shape[0] - 1).long()

    def advance(self, accepted: Tensor | None = None, *, skip_scores: bool = False) -> "Batch":
        """The batch of the next token of every request: ``steps`` with one step."""
        return self.steps(1, accepted, skip_scores=skip_scores)[0]

    def steps(self, k: int, accepted: Tensor | None = None, *, skip_scores: bool = False) -> list["Batch"]:
        """The batches of the next k steps of one token a request, made at once; nothing is synchronised.

        A draft model runs them one after another; row b of each is request b. The pages of these tokens are in the
        page table already; a token without a page has slot -1 and its keys are lost. Requests without keys (padding)
        stay padding. The batches share memory, so none is to be written to.

        Args:
            accepted: int32 or int64 [B], how many of its rows of this step count for each request, for a batch that
                was made without (a verify step of the target); None: the k tokens follow ``kv_len``.
            skip_scores: of the new batches. The flag of this batch says nothing of longer requests.

        Raises:
            ValueError: ``k`` below 1, or ``accepted`` is not [B].
        """
        if k < 1:
            raise ValueError(f"k={k}; it must be at least 1")
        held, B = self.kv_len, self.kv_len.shape[0]
        if accepted is not None:
            held = (held - self.q_start.diff() + self._kept(accepted)).clamp(min=0)
        ahead = Batch.decode(torch.where(held > 0, held + k, 0), self.page_table, k)
        positions, slots, visible = (
            rows.view(B, k).t().contiguous() for rows in (ahead.positions, ahead.slots, ahead.visible)
        )
        q_start = torch.arange(B + 1, dtype=torch.int32, device=held.device)
        return [
            Batch(
                positions=positions[step],
                slots=slots[step],
                req_of_row=q_start[:B],
                visible=visible[step],
                q_start=q_start,
                kv_len=visible[step],  # one row a request, the last one
                page_table=self.page_table,
                kind=DECODE,
                skip_scores=skip_scores,
            )
            for step in range(k)
        ]

    def _kept(self, accepted: Tensor | None) -> Tensor:
        """int32 [B]: rows of each request that count."""
        q_len = self.q_start.diff()
        if accepted is None:
            return q_len
        if accepted.shape != q_len.shape or accepted.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"accepted is {accepted.dtype} {tuple(accepted.shape)}; it must be int32 or int64 [{q_len.shape[0]}]"
            )
        return accepted.int().clamp(min=0).minimum(q_len)


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
    _check_kind(kind)


def _check_kind(kind: str) -> None:
    if kind not in (DECODE, PREFILL):
        raise ValueError(f"kind={kind!r}; it must be {DECODE!r} or {PREFILL!r}")

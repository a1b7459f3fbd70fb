"""index_topk from our Triton scores and a selection that some library makes: flashinfer's, torch's.

The selection sees scores in which no NaN is left and what must not be chosen is -inf (adapters.order_scores); what it
chose is then written as the op's contract has it. Rows that see at most K keys get them all, whatever it chose there.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from compiled_dsa.custom_ops.kernels.adapters import order_scores, write_positions
from compiled_dsa.custom_ops.kernels.in_order import write_selection
from compiled_dsa.custom_ops.kernels.index_scores import write_scores
from compiled_dsa.custom_ops.layout import PAGE

Selection = Callable[[Tensor, Tensor], Tensor]


def refuses_scratch(page_table: Tensor, K: int, scratch_bytes: int | None, position_bytes: int) -> str | None:
    """A budget that holds no scores and chosen positions of a row beside each other."""
    needed = row_bytes(page_table, K, position_bytes)
    if scratch_bytes is not None and scratch_bytes < needed:
        return f"scratch_bytes={scratch_bytes}; scores and chosen positions of one row need {needed} bytes"
    return None


def row_bytes(page_table: Tensor, K: int, position_bytes: int) -> int:
    return 4 * PAGE * page_table.shape[1] + position_bytes * K


def run(
    select: Selection,
    position_bytes: int,
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic: bool,
    scratch_bytes: int | None,
    positions_out: Tensor | None,
    init_tokens: int,
    local_tokens: int,
) -> None:
    """Scores, selection and slots of as many rows at a time as the scratch holds.

    Args:
        select: (scores fp32 [rows, n], visible [rows]) -> int32 or int64 [rows, at most K] positions; the library's own
            workspace comes on top of the scratch.
        position_bytes: of one chosen position.
    """
    T, K = topk_out.shape
    columns = page_table.shape[1] * PAGE
    if T == 0 or K == 0:
        return
    if pool.shape[0] == 0 or page_table.numel() == 0:
        for out in (topk_out, positions_out):
            if out is not None:
                out.fill_(-1)
        return
    rows_at_once = T
    if scratch_bytes is not None:
        slices = -(-T // (scratch_bytes // row_bytes(page_table, K, position_bytes)))
        rows_at_once = -(-T // slices)
    scores = torch.empty(rows_at_once, columns, dtype=torch.float32, device=q.device)
    rows_per_request = max(1, T // page_table.shape[0])
    for start in range(0, T, rows_at_once):
        part = slice(start, min(start + rows_at_once, T))
        rows = (page_table, req_of_row[part], visible[part])
        some = scores[: part.stop - start]
        write_scores(
            q[part], weights[part], pool, *rows, some, some, K, 0, rows_per_request, init_tokens, local_tokens
        )  # no maxima
        order_scores(some, rows[2], K)
        positions = None if positions_out is None else positions_out[part]
        write_selection(
            partial(write_positions, select(some, rows[2]), some),  # not named: what was selected goes with the call
            *rows,
            topk_out[part],
            pool.shape[0],
            positions,
            deterministic,
        )

"""index_topk in Triton: scores of a slice of rows into scratch (index_scores.py), then an exact selection.

Three kernels select: one program a row (select.py), several where rows are few and long (select_split.py), and one that
reads a long row of a prefill once (select_listed.py). In all of them the lowest positions win among equal scores, with
and without ``deterministic``; with it, in_order.py then puts the keys into one order. Rows that see at most K keys take
them all; their scores are neither computed nor read.
"""

from functools import partial

import torch
import triton

from compiled_dsa.custom_ops.kernels.common import (
    dependent_launch,
    refuses_device,
    refuses_dot,
    refuses_dtype,
    refuses_strides,
)
from compiled_dsa.custom_ops.kernels.in_order import write_selection
from compiled_dsa.custom_ops.kernels.index_scores import PREFILL_ROWS, on_hopper, write_scores
from compiled_dsa.custom_ops.kernels.select import group_size, maxima_of, write_slots
from compiled_dsa.custom_ops.kernels.select_listed import list_size, programs_of, write_slots_listed
from compiled_dsa.custom_ops.kernels.select_split import empty_counters, splits_of, write_slots_split
from compiled_dsa.custom_ops.layout import PAGE


def refuses(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes: int | None = None,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> str | None:
    model_dtype = {} if pool.dtype == torch.uint8 else {"q": q}
    return (
        refuses_device(pool)
        or refuses_dtype(weights=weights, **model_dtype)
        or refuses_dot(q.dtype)
        or refuses_strides(
            q=q,
            weights=weights,
            page_table=page_table,
            req_of_row=req_of_row,
            visible=visible,
            topk_out=topk_out,
            positions_out=positions_out,
        )
    )


def run(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes: int | None = None,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> None:
    """Rows are cut so that their scratch fits into ``scratch_bytes``; without a bound they are scored together."""
    T, K = topk_out.shape
    if T == 0 or K == 0:
        return
    if pool.shape[0] == 0 or page_table.numel() == 0:
        for out in (topk_out, positions_out):
            if out is not None:
                out.fill_(-1)
        return
    columns = page_table.shape[1] * PAGE
    scored = columns > K
    rows_per_request = max(1, T // page_table.shape[0])
    prefill = rows_per_request >= PREFILL_ROWS
    listed = list_size(columns, K, prefill)
    programs = programs_of(T, 4 * columns, listed, scratch_bytes, q.device)
    group = 0 if programs else group_size(columns, K, prefill)
    rows_at_once = T
    if scored and scratch_bytes is not None:
        if scratch_bytes < 4 * (columns + maxima_of(columns, group)):
            group = 0
        row_bytes = 4 * (columns + maxima_of(columns, group))
        slices = triton.cdiv(T, (scratch_bytes - 8 * listed * programs) // row_bytes)
        rows_at_once = triton.cdiv(T, slices)  # the same for all slices
    scratch_rows = rows_at_once if scored else 0
    scores = torch.empty(scratch_rows, columns, dtype=torch.float32, device=q.device)
    maxima = torch.empty(scratch_rows, maxima_of(columns, group), dtype=torch.float32, device=q.device)
    # a budget is that of prefill, whose rows are many
    splits = splits_of(T, columns, K, group, q.device) if scratch_bytes is None else 0
    counters = empty_counters(T, splits, q.device)
    lists = torch.empty(programs, listed, dtype=torch.int64, device=q.device)
    # Not behind the scores on Hopper: with programs that wait beside them, 4096 rows of 32,768 keys took 2,244 us and
    # without 2,147 (one run on an H200, 2026-12-01).
    hopper = on_hopper(q, pool, group, rows_per_request, init_tokens + local_tokens, counters)
    early = scored and not hopper and dependent_launch(q.device)
    if splits:
        write = partial(write_slots_split, scores, maxima, counters, group=group, splits=splits, early=early)
    elif programs:
        write = partial(write_slots_listed, scores, lists, early=early)
    else:
        write = partial(write_slots, scores, maxima, group=group, early=early)
    for start in range(0, T, rows_at_once):
        part = slice(start, min(start + rows_at_once, T))
        rows = (page_table, req_of_row[part], visible[part])
        if scored:
            write_scores(
                q[part], weights[part], pool, *rows, scores, maxima, K, group, rows_per_request, init_tokens,
                local_tokens, counters,
            )  # fmt: skip
        positions = None if positions_out is None else positions_out[part]
        write_selection(write, *rows, topk_out[part], pool.shape[0], positions, deterministic)

"""mla_prefill with Triton: absorb, sparse attention, un-absorb, for as many rows at a time as the scratch holds."""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.kernels import sparse_mla
from compiled_dsa.custom_ops.kernels.common import refuses_device, refuses_dot, refuses_dtype, refuses_strides
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.custom_ops.mla_prefill import row_scratch_bytes


def refuses(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes
) -> str | None:
    return (
        refuses_device(pool)
        or refuses_dtype(q_nope=q_nope)
        or refuses_dot(q_nope.dtype)
        or refuses_strides(
            q_rope=q_rope, topk=topk, count=count, page_table=page_table, req_of_row=req_of_row, sinks=sinks
        )
    )


def run(q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes) -> None:
    T, H, N = q_nope.shape
    L = kv_b.shape[2]
    if T == 0:
        return
    w_uk, w_uv = kv_b[:, :N], kv_b[:, N:].transpose(1, 2)  # [H, N, L], [H, L, V]
    rows_at_once = min(T, scratch_bytes // row_scratch_bytes(q_nope, kv_b))
    width = page_table.shape[1] * PAGE if topk is None else topk.shape[1]
    tile = sparse_mla.tiling(rows_at_once, H, L, width, q_nope.dtype, q_nope.device)._replace(splits=1)
    # a bmm works head by head: buffers are [H, rows, L], and the kernel reads and writes them transposed
    queries: Tensor = q_nope.new_empty(H, rows_at_once, L)
    outputs = torch.empty_like(queries)
    lse = torch.empty(rows_at_once, H, dtype=torch.float32, device=q_nope.device)
    for start in range(0, T, rows_at_once):
        stop = min(start + rows_at_once, T)
        q_latent, o = queries[:, : stop - start], outputs[:, : stop - start]
        torch.bmm(q_nope[start:stop].transpose(0, 1), w_uk, out=q_latent)
        sparse_mla.launch(
            q_latent.transpose(0, 1),
            q_rope[start:stop],
            pool,
            None if topk is None else topk[start:stop],
            count[start:stop],
            page_table,
            req_of_row[start:stop],
            scale,
            sinks,
            o.transpose(0, 1),
            lse[: stop - start],
            tile,
        )
        torch.bmm(o, w_uv, out=out[start:stop].transpose(0, 1))

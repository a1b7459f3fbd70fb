"""mla_prefill with FlashMLA's sparse prefill kernel: absorb, attend, un-absorb, for as many rows as the scratch holds.

An fp8 pool is dequantised whole first. What is done around the kernel is said in flash_mla.py.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import refuses_strides
from compiled_dsa.custom_ops.kernels.dequantise import dequantise, dequantised_bytes
from compiled_dsa.custom_ops.providers.flash_mla import (
    PREFILL_LANES,
    L,
    joined_queries,
    padded_heads,
    padded_sinks,
    refuses_attention,
    sparse_prefill,
)


def refuses(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, max_count=None,
    deterministic=False, own_pages=False,
) -> str | None:  # fmt: skip
    reason = refuses_attention(q_rope, pool, kv_b.shape[2], topk, scale, deterministic)
    reason = reason or refuses_strides(count=count, sinks=sinks)
    if reason is not None:
        return reason
    needed = _pool_bytes(pool, q_rope.shape[2]) + _row_bytes(q_rope, topk.shape[1])
    if scratch_bytes < needed:
        return f"scratch_bytes={scratch_bytes}; one row, beside an fp8 pool in bfloat16, needs {needed} bytes"
    return None


def _pool_bytes(pool: Tensor, R: int) -> int:
    return dequantised_bytes(pool.shape[0], L, R) if pool.dtype == torch.uint8 else 0


def _row_bytes(q_rope: Tensor, K: int) -> int:
    """Of a row's joined queries and outputs, its cleaned ids and its count."""
    _, H, R = q_rope.shape
    return padded_heads(H) * 2 * (2 * L + R) + 4 * (K + PREFILL_LANES + 1)


def run(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, max_count=None,
    deterministic=False, own_pages=False,
) -> None:  # fmt: skip
    T, H, N = q_nope.shape
    R = q_rope.shape[2]
    if T == 0:
        return
    if pool.shape[0] == 0:
        out.zero_()
        return
    scratch_bytes -= _pool_bytes(pool, R)
    if pool.dtype == torch.uint8:
        pool = dequantise(pool, L, R)
    rows_at_once = min(T, scratch_bytes // _row_bytes(q_rope, topk.shape[1]))
    w_uk, w_uv = kv_b[:, :N], kv_b[:, N:].transpose(1, 2)  # [H, N, L], [H, L, V]
    sinks = padded_sinks(sinks)
    buffer = joined_queries(rows_at_once, H, R, q_nope)
    for start in range(0, T, rows_at_once):
        rows = slice(start, min(start + rows_at_once, T))
        q = buffer[: rows.stop - start]
        torch.bmm(q_nope[rows].transpose(0, 1), w_uk, out=q[:, :H, :L].transpose(0, 1))
        q[:, :H, L:] = q_rope[rows]
        o, _ = sparse_prefill(q, pool, topk[rows], count[rows], scale, sinks, want_lse=False)
        torch.bmm(o[:, :H].transpose(0, 1), w_uv, out=out[rows].transpose(0, 1))
        del o  # before the next one is made


warmup = run

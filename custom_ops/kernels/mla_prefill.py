"""mla_prefill with Triton: absorb, sparse attention, un-absorb, for as many rows at a time as the scratch holds.

On Hopper the attention is the Gluon kernel where its shapes fit, over fp8 pools after they, or the pages of the batch,
were dequantised; where that does not pay, they are read in place. Everything else goes through the plain kernel.
Without a selection all rows attend expanded keys instead where that is cheaper: mla_prefill_plan.py decides it,
mla_prefill_dense.py does it. Where the bits of a row must not depend on other rows, there is one way for all calls:
attention as in a deterministic decode, between products of fixed tiles (fixed_products.py).
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from compiled_dsa.custom_ops.kernels import mla_prefill_dense as dense
from compiled_dsa.custom_ops.kernels import mla_prefill_plan as planning
from compiled_dsa.custom_ops.kernels import sparse_mla, sparse_mla_hopper
from compiled_dsa.custom_ops.kernels.common import (
    multiprocessors,
    refuses_device,
    refuses_dot,
    refuses_dtype,
    refuses_strides,
)
from compiled_dsa.custom_ops.kernels.dequantise import dequantise, dequantise_pages, dequantised_bytes, renumber
from compiled_dsa.custom_ops.kernels.fixed_products import multiply
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.custom_ops.mla_prefill import row_scratch_bytes

# Dequantising costs at most 0.6 ns a token, and saves 0.22 ns (128 heads) or 0.11 ns (64 heads) a lane of the selection
# over reading the pool in place (H200, 4096 rows, K = 2048). Rows may have fewer lanes than their ids have columns.
LANES_PER_TOKEN = 6

_ROUNDING = 2048  # bytes, of torch's allocations

_MOST_ELEMENTS = 2**31 - 1  # of latents [H, rows, L]: kernels count those between heads in int32


def refuses(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, max_count=None,
    deterministic=False, own_pages=False,
) -> str | None:  # fmt: skip
    return (
        refuses_device(pool)
        or refuses_dtype(q_nope=q_nope)
        or refuses_dot(q_nope.dtype)
        or refuses_strides(
            q_rope=q_rope, topk=topk, count=count, page_table=page_table, req_of_row=req_of_row, sinks=sinks
        )
    )


def refuses_gluon(q_rope: Tensor, pool: Tensor, L: int, scale: float) -> str | None:
    """Why the attention of these queries [T, H, R] cannot be the Gluon kernel; it is imported only where it runs."""
    H, R = q_rope.shape[1:]
    if q_rope.dtype != torch.bfloat16:
        return f"queries have dtype {q_rope.dtype}, not bfloat16"
    if (L, R) != (512, 64) or H == 0 or H % 64:
        return f"{H} heads of {L}+{R}; it takes multiples of 64 heads of 512+64"
    if not scale > 0:
        return f"scale={scale} is not above 0"
    if pool.data_ptr() % 16:
        return "the pool is not aligned to 16 bytes"
    return sparse_mla_hopper.refuses_machine(pool)


def worth_dequantising(pages: int, L: int, R: int, lanes: int, row_bytes: int, scratch_bytes: int) -> bool:
    """True where ``lanes`` selected tokens repay dequantising so many pages, and half of the scratch holds them and the
    rest a row of ``row_bytes``."""
    enough = lanes >= LANES_PER_TOKEN * pages * PAGE
    size = dequantised_bytes(pages, L, R)
    return enough and size <= scratch_bytes // 2 and size + row_bytes <= scratch_bytes


def run(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, max_count=None,
    deterministic=False, own_pages=False,
) -> None:  # fmt: skip
    T, H, N = q_nope.shape
    R, L, V = q_rope.shape[2], kv_b.shape[2], out.shape[2]
    if T == 0:
        return
    width = page_table.shape[1] * PAGE if topk is None else topk.shape[1]
    width = width if max_count is None else min(width, max_count)
    selection = (count, page_table, req_of_row)
    if deterministic:
        attend_rows_alone(q_nope, q_rope, pool, topk, *selection, kv_b, scale, sinks, out, scratch_bytes, width)
        return
    plan = None
    if topk is None and planning.refuses(q_nope, kv_b, out, scale) is None:
        dims = (H, N, R, V, L)
        plan = planning.plan(T, page_table.shape[0], dims, width, q_nope.dtype, pool.device, scratch_bytes)
    if plan is None:
        rest = (kv_b, scale, sinks, out, scratch_bytes, width, own_pages or topk is None)
        attend_absorbed(q_nope, q_rope, pool, topk, *selection, *rest)
    else:
        dense.attend(q_nope, q_rope, pool, *selection, kv_b, scale, sinks, out, width, plan)


class Source(NamedTuple):
    """What the Gluon kernel reads: a bf16 pool, or what takes the place of an fp8 one.

    Attributes:
        pool: bf16 [pages, 64, L + R].
        page_table: of its pages, where there is no selection.
        places: from which ``renumber`` makes its slots, None where they are those of the op's pool.
        scratch_bytes: of the budget, what is left for rows.
        id_bytes: of these, for the slots of a row.
    """

    pool: Tensor
    page_table: Tensor
    places: Tensor | None
    scratch_bytes: int
    id_bytes: int


def dequantised(
    pool, page_table, paged: bool, own_pages: bool, L: int, R: int, T: int, width: int, row_bytes: int,
    scratch_bytes: int,
) -> Source | None:  # fmt: skip
    """A pool, or the pages of its batch where these are few beside it, in bf16; None where that does not pay."""
    listed = own_pages and 0 < 2 * page_table.numel() <= pool.shape[0]  # two more kernels must be worth it
    pages, numbers, id_bytes = pool.shape[0], 0, 0
    if listed:
        pages, id_bytes = page_table.numel(), 0 if paged else 4 * width
        numbers = 4 * (pool.shape[0] + (pages if paged else 0)) + _ROUNDING
    if not worth_dequantising(pages, L, R, T * width, row_bytes + id_bytes + numbers, scratch_bytes):
        return None
    scratch_bytes -= dequantised_bytes(pages, L, R) + numbers
    if not listed:
        return Source(dequantise(pool, L, R), page_table, None, scratch_bytes, 0)
    pool, places = dequantise_pages(pool, page_table, L, R)
    if paged:
        table = torch.empty(page_table.shape, dtype=torch.int32, device=page_table.device)
        return Source(pool, renumber(page_table, places, 1, table), None, scratch_bytes, 0)
    return Source(pool, page_table, places, scratch_bytes, id_bytes)


def attend_absorbed(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, width: int,
    own_pages: bool,
) -> None:  # fmt: skip
    """The op without expanded keys; ``width``: lanes that count at most."""
    T, H, N = q_nope.shape
    L, R = kv_b.shape[2], q_rope.shape[2]
    row_bytes = H * L * q_nope.element_size()
    if topk is None:
        page_table = page_table[:, : triton.cdiv(width, PAGE)]
    source = None
    if refuses_gluon(q_rope, pool, L, scale) is None:
        source = Source(pool, page_table, None, scratch_bytes, 0)
        if pool.dtype == torch.uint8:
            sizes = (L, R, T, width, row_bytes, scratch_bytes)
            source = dequantised(pool, page_table, topk is None, own_pages, *sizes)
    places = None
    if source is not None:
        from compiled_dsa.custom_ops.kernels import sparse_mla_gluon

        pool, page_table, places, scratch_bytes, id_bytes = source
        rows_at_once = min(T, scratch_bytes // (row_bytes + id_bytes))
        wave = max(1, multiprocessors(pool.device) * sparse_mla_gluon.HEADS // H)
        if wave < rows_at_once < T:
            rows_at_once -= rows_at_once % wave  # a last wave that is nearly empty costs as much as a full one
        lse = None
    else:
        rows_at_once = min(T, scratch_bytes // row_scratch_bytes(q_nope, kv_b), _MOST_ELEMENTS // (H * L))
        lse = torch.empty(rows_at_once, H, dtype=torch.float32, device=q_nope.device)
    w_uk, w_uv = kv_b[:, :N], kv_b[:, N:].transpose(1, 2)  # [H, N, L], [H, L, V]
    # Absorbed queries, and in their place the attention's outputs: a program of any kernel reads its queries before it
    # writes, and no other program reads them. A bmm works head by head, 10 % faster on rows that lie so.
    buffer = q_nope.new_empty(H, rows_at_once, L)
    absorbed = buffer.transpose(0, 1)
    in_place = pool.dtype == torch.uint8  # over bf16 pools, other head counts were not timed beside the plain kernel
    if source is not None:
        attend = partial(sparse_mla_gluon.launch, width=width)
    elif in_place and sparse_mla_hopper.refuses(absorbed, q_rope, pool, scale, absorbed) is None:
        attend = partial(sparse_mla_hopper.launch, chosen=sparse_mla_hopper.ALONE, width=width)
    else:
        tile = sparse_mla.tiling(rows_at_once, H, L, width, q_nope.dtype, q_nope.device)._replace(splits=1)
        attend = partial(sparse_mla.launch, tile=tile, width=width)
    if places is not None:
        renumbered = torch.empty(rows_at_once, width, dtype=torch.int32, device=topk.device)
    for start in range(0, T, rows_at_once):
        stop = min(start + rows_at_once, T)
        rows = slice(start, stop)
        latent = buffer[:, : stop - start]
        torch.bmm(q_nope[rows].transpose(0, 1), w_uk, out=latent)
        latent = latent.transpose(0, 1)
        ids = None if topk is None else topk[rows]
        if places is not None:
            ids = renumber(ids, places, PAGE, renumbered[: stop - start])
        selection = (pool, ids, count[rows], page_table, req_of_row[rows], scale, sinks)
        attend(latent, q_rope[rows], *selection, latent, None if lse is None else lse[: stop - start])
        torch.bmm(latent.transpose(0, 1), w_uv, out=out[rows].transpose(0, 1))


def attend_rows_alone(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, width: int
) -> None:
    """As ``attend_absorbed``; nothing that rounds a row follows from the other rows or from the budget."""
    T, H, N = q_nope.shape
    L = kv_b.shape[2]
    rows_at_once = min(T, scratch_bytes // row_scratch_bytes(q_nope, kv_b), _MOST_ELEMENTS // (H * L))
    buffer = q_nope.new_empty(H, rows_at_once, L)
    lse = torch.empty(rows_at_once, H, dtype=torch.float32, device=q_nope.device)
    for start in range(0, T, rows_at_once):
        stop = min(start + rows_at_once, T)
        rows = slice(start, stop)
        latent = buffer[:, : stop - start].transpose(0, 1)  # [rows, H, L], outputs in place of queries
        multiply(q_nope[rows].transpose(0, 1), kv_b[:, :N], latent.transpose(0, 1))
        selection = (pool, None if topk is None else topk[rows], count[rows], page_table, req_of_row[rows])
        outputs = (latent, lse[: stop - start])
        sparse_mla.attend(latent, q_rope[rows], *selection, scale, sinks, *outputs, width, deterministic=True)
        multiply(latent.transpose(0, 1), kv_b[:, N:].transpose(1, 2), out[rows].transpose(0, 1))

"""sparse_mla in Triton: flash attention over gathered latents, for decode and prefill.

A program serves one row, a block of heads and a split of the row's keys; it runs up to the row's own count, so short
rows cost little. Where rows are few, the keys of a row are split over programs and a second kernel combines them. On
Hopper, decode steps are the Gluon kernels' where their shapes fit (sparse_mla_hopper); the kernel here does the rest.

Legend: T rows, H heads, L latent dim, R rope dim, K lanes of the selection, S splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels import sparse_mla_hopper
from compiled_dsa.custom_ops.kernels.common import (
    LN2,
    LOG2E,
    dot_precision,
    finite,
    multiprocessors,
    refuses_device,
    refuses_dot,
    refuses_dtype,
    refuses_strides,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_combine import combine, empty_parts
from compiled_dsa.custom_ops.layout import LATENT_GROUP, PAGE, split_latent_pool

_PAGE = tl.constexpr(PAGE)

MAX_SPLITS = 32


def refuses(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, deterministic=False
) -> str | None:
    return (
        refuses_device(pool)
        or refuses_dtype(q_latent=q_latent)
        or refuses_dot(q_latent.dtype)
        or refuses_strides(
            q_latent=q_latent,
            q_rope=q_rope,
            topk=topk,
            count=count,
            page_table=page_table,
            req_of_row=req_of_row,
            sinks=sinks,
            out=out,
        )
    )


@triton.jit
def _slots(lanes, start, end, pages, BLOCK: tl.constexpr, PAGED: tl.constexpr):
    """int32 slots of a block of lanes, negative for those past ``end`` and for ids outside the pool."""
    lane = start + tl.arange(0, BLOCK)
    if PAGED:
        page = tl.load(lanes + lane // _PAGE, mask=lane < end, other=-1)
        slot = page * _PAGE + lane % _PAGE
    else:
        slot = tl.load(lanes + lane, mask=lane < end, other=-1)
        page = slot // _PAGE
    return tl.where((page >= 0) & (page < pages), slot, -1)


@triton.jit(do_not_specialize=["width", "pages"])
def _attend(
    q_latent,  # [T, H, L]
    q_rope,  # [T, H, R]
    latents,  # [slots, L] codes or model dtype
    latent_scales,  # [slots, G], for an fp8 pool
    rope,  # [slots, R]
    topk,  # [T, K], unless PAGED
    count,  # [T]
    page_table,  # [B, W], if PAGED
    req_of_row,
    sinks,  # [H], if SINKS
    out,  # [S, T, H, L]
    lse,  # [S, T, H]
    scale,
    heads,
    width,
    pages,
    ql_row,
    ql_head,
    qr_row,
    qr_head,
    latents_slot,
    scales_slot,
    rope_slot,
    topk_row,
    table_row,
    out_split,
    out_row,
    out_head,
    lse_split,
    lse_row,
    lse_head,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    PAGED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the head blocks of a row are neighbours: they read the same latents
    head_blocks = tl.cdiv(heads, HEADS)
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)

    n = tl.minimum(tl.load(count + row), width)
    share = tl.cdiv(tl.cdiv(n, BLOCK), tl.num_programs(1)) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, n)
    lanes = topk + row * topk_row
    if PAGED:
        lanes = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row

    column = tl.arange(0, L_PADDED)
    is_head = (head < heads)[:, None]
    is_column = (column < L)[None, :]
    dtype = q_latent.dtype.element_ty
    ql = tl.load(q_latent + row * ql_row + head[:, None] * ql_head + column[None, :], is_head & is_column, other=0.0)
    if R > 0:
        r = tl.arange(0, R_PADDED)
        qr = tl.load(
            q_rope + row * qr_row + head[:, None] * qr_head + r[None, :], is_head & (r < R)[None, :], other=0.0
        )

    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, L_PADDED], tl.float32)
    slot_ahead = _slots(lanes, begin, end, pages, BLOCK, PAGED)
    for start in range(begin, end, BLOCK):
        slot = slot_ahead
        # the ids of the next block are read a step ahead, so that its latents can be under way while this one is used
        slot_ahead = _slots(lanes, start + BLOCK, end, pages, BLOCK, PAGED)
        there = slot >= 0
        slot = tl.where(there, slot, 0).to(tl.int64)
        # lanes that hold no token are not loaded: NaN in an unused slot stays there
        loaded = there[:, None] if L == L_PADDED else there[:, None] & is_column
        c = tl.load(latents + slot[:, None] * latents_slot + column[None, :], mask=loaded, other=0.0)
        if FP8:
            group = tl.arange(0, L_PADDED // GROUP)
            in_group = there[:, None] & (group * GROUP < L)[None, :]
            s = tl.load(latent_scales + slot[:, None] * scales_slot + group[None, :], mask=in_group, other=0.0)
            c = tl.reshape(c.to(tl.float32), [BLOCK, L_PADDED // GROUP, GROUP]) * s[:, :, None]
            c = tl.reshape(c, [BLOCK, L_PADDED]).to(dtype)
        scores = tl.dot(ql, tl.trans(c), input_precision=PRECISION)
        if R > 0:
            k = tl.load(
                rope + slot[:, None] * rope_slot + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0
            )
            scores = tl.dot(qr, tl.trans(k.to(dtype)), acc=scores, input_precision=PRECISION)
        scores = tl.where(there[None, :], scores * (scale * LOG2E), float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, axis=1))
        p = tl.exp2(scores - finite(new)[:, None])
        shrink = tl.exp2(maximum - finite(new))
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(dtype), c, acc=acc * shrink[:, None], input_precision=PRECISION)
        maximum = new

    log_sum = tl.where(total == 0.0, float("-inf"), maximum * LN2 + tl.log(total))
    tl.store(lse + split * lse_split + row * lse_row + head * lse_head, log_sum, mask=head < heads)
    if SINKS:
        sink = tl.load(sinks + head, mask=head < heads, other=float("-inf")) * LOG2E
        new = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - finite(new))
        total = total * shrink + tl.exp2(sink - finite(new))
        acc = acc * shrink[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = out + split.to(tl.int64) * out_split + row * out_row + head[:, None] * out_head + column[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=is_head & is_column)


class Tiling(NamedTuple):
    heads: int
    keys: int
    warps: int
    stages: int
    splits: int


def whole_rows(H: int, L: int, dtype: torch.dtype) -> Tiling:
    """The tiles of calls that fill the device without splits; they do not depend on the rows.

    64 heads x 64 keys with 8 warps is the largest tile whose accumulator (L = 512) stays in registers. Exact fp32 dots
    run on the ordinary units, unrolled: small tiles.
    """
    if dtype == torch.float32:
        return Tiling(heads=16, keys=16, warps=4, stages=1, splits=1)
    L_padded = triton.next_power_of_2(L)
    keys = max(16, min(64, 64 * 512 // L_padded))
    heads = min(64 if L_padded <= 512 else 32, max(16, triton.next_power_of_2(H)))
    return Tiling(heads, keys, warps=8, stages=2 if heads == 64 else 1, splits=1)


def tiling(T: int, H: int, L: int, width: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """How a call is cut, from shapes alone.

    The keys are split until the device is full. Where even that does not fill it, blocks of 32 heads do more in
    parallel (H200, one row of 128 heads, K = 2048: 14 against 16 us).
    """
    tile = whole_rows(H, L, dtype)
    sms = multiprocessors(device)
    blocks = triton.cdiv(width, tile.keys)
    if tile.heads == 64 and T * triton.cdiv(H, tile.heads) * blocks < sms:
        tile = tile._replace(heads=32, stages=1)
    programs = T * triton.cdiv(H, tile.heads)
    return tile._replace(splits=max(1, min(sms // programs, blocks, MAX_SPLITS)))


def launch(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, tile: Tiling, width: int
) -> None:
    """Runs the kernel on non-empty arguments. The queries and ``out`` may have any strides but the last.

    ``width``: lanes that count at most, those of the selection or the page table or fewer.
    """
    T, H, L = q_latent.shape
    R = q_rope.shape[2]
    latents, latent_scales, rope = split_latent_pool(pool, L, R)
    fp8 = latent_scales is not None
    paged = topk is None
    L_padded = max(16, triton.next_power_of_2(L))
    parts, parts_lse = out, lse
    if tile.splits > 1:
        parts, parts_lse = empty_parts(tile.splits, out, torch.float32)
    has_sinks = sinks is not None
    _attend[(T * triton.cdiv(H, tile.heads), tile.splits)](
        q_latent,
        q_rope,
        latents,
        latent_scales if fp8 else lse,
        rope,
        page_table if paged else topk,
        count,
        page_table,
        req_of_row,
        sinks if has_sinks else lse,
        parts,
        parts_lse,
        scale,
        H,
        width,
        pool.shape[0],
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        latents.stride(1),
        latent_scales.stride(1) if fp8 else 0,
        rope.stride(1),
        0 if paged else topk.stride(0),
        page_table.stride(0),
        parts.stride(0) if tile.splits > 1 else 0,
        parts.stride(-3),
        parts.stride(-2),
        parts_lse.stride(0) if tile.splits > 1 else 0,
        parts_lse.stride(-2),
        parts_lse.stride(-1),
        L=L,
        L_PADDED=L_padded,
        R=R,
        R_PADDED=max(16, triton.next_power_of_2(R)),
        GROUP=min(LATENT_GROUP, L_padded),
        HEADS=tile.heads,
        BLOCK=tile.keys,
        FP8=fp8,
        PAGED=paged,
        SINKS=has_sinks and tile.splits == 1,
        PRECISION=dot_precision(q_latent.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.splits > 1:
        combine(parts, parts_lse, sinks, out, lse)


def attend(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, width: int, deterministic: bool
) -> None:
    """The op on non-empty arguments, by whichever kernel takes them; ``width`` as of ``launch``.

    Which kernel that is does not depend on the rows, and with ``deterministic`` neither does how they are cut. Every
    tile is of one row, which takes its own keys from the first on in blocks of one size.
    """
    T, H, L = q_latent.shape
    arguments = (q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse)
    if sparse_mla_hopper.refuses(q_latent, q_rope, pool, scale, out) is None:
        sparse_mla_hopper.run(*arguments, width, deterministic)
    elif deterministic:
        launch(*arguments, whole_rows(H, L, q_latent.dtype), width)
    else:
        launch(*arguments, tiling(T, H, L, width, q_latent.dtype, q_latent.device), width)


def run(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, deterministic=False
) -> None:
    if q_latent.shape[0] == 0:
        return
    width = page_table.shape[1] * PAGE if topk is None else topk.shape[1]
    selection = (q_latent, q_rope, pool, topk, count, page_table, req_of_row)
    attend(*selection, scale, sinks, out, lse, width, deterministic)

"""Absorbed sparse attention on Hopper, in Gluon: bf16 queries, bf16 or fp8 pools, L = 512, R = 64.

A tile is 64 heads of one row, or of one split of a row where rows are few; programs are persistent and take every nth
tile. Three warpgroups share a tile:

- the producer (sparse_mla_gather; sparse_mla_dequantise for fp8) gathers latents of 64 keys a block into a ring of two
  stages; lanes that hold no token are zero-filled, so that nothing of the pool that was not selected is ever read;
- two consumers (sparse_mla_consume), left and right, take turns: the left one scores and exponentiates the even blocks,
  the right one the odd blocks, and each adds *every* block to its own 256 columns of the output. What the other needs
  of a block (the weights, the factor by which earlier sums shrink, the running maximum) passes through shared memory.

While one exponentiates, the other keeps the tensor cores busy; and no latent is read twice, since the left and right
halves of a stage are keys for the scores and values for the sums. Counts are per row: a row costs its own pairs of
blocks. On an H200, 4096 rows of 128 heads and 2048 of 32,768 keys take 4.1 ms (567 TFLOP/s at the power cap), FlashMLA
3.8 and the kernel of sparse_mla_decode 11.5. Alone, the products would run at 850 TFLOP/s and the gather in 2.3 ms:
what bounds the sum is the turnaround of a stage (free it, refill it, score it, exponentiate), so orders that free
halves sooner or start scores sooner won, and a third stage would not fit.

This module imports ``triton.experimental.gluon``: import it only where the kernel is about to run.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from compiled_dsa.custom_ops.kernels.common import LOG2E, multiprocessors
from compiled_dsa.custom_ops.kernels.sparse_mla_consume import Heads, consume
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT, produce_dequantised
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    HALF,
    HEADS,
    KEYS,
    ROPE,
    TILE_HEADS,
    Barriers,
    Buffers,
    L,
    Rows,
    produce,
)
from compiled_dsa.custom_ops.layout import PAGE

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Registers of a thread of the right consumer and of the producer; the left consumer has what they leave of 504.
_BF16_REGISTERS = gl.constexpr((232, 40))
_FP8_REGISTERS = gl.constexpr((200, 104))  # the producer holds both halves of a block


@gluon.jit(do_not_specialize=["lse_row", "lse_head", "width", "pages", "number", "splits", "H", "ntiles", "zero"])
def _attend(
    q_desc,  # bf16 [T, H, 512]
    o_desc,  # bf16 [S T, H, 512]; may be the queries' own memory: a tile is written after its one program has read it
    q_rope,  # bf16 [T, H, 64], last dim dense
    pool,  # bf16 [P, 64, 576], or uint8 [P, 64, 656]
    ids,  # int32 [T, K] slots, or [B, maxP] page table when PAGED
    count,
    req_of_row,
    sinks,  # fp32 [H] or None
    lse,  # fp32 [S T, H] or None
    scale,
    q_rope_row,
    q_rope_head,
    ids_row,
    lse_row,
    lse_head,
    width,
    pages,
    number,
    splits,
    H,
    ntiles,
    zero,
    PAGED: gl.constexpr,
    SIDES: gl.constexpr,
    EARLY: gl.constexpr,
):
    FP8: gl.constexpr = pool.dtype.element_ty == gl.int32
    if EARLY:
        gdc_launch_dependents()  # the programs that combine start and wait
    buffers = Buffers(
        q_left=gl.allocate_shared_memory(gl.bfloat16, [1, 1, TILE_HEADS, HALF], _QUERIES),
        q_right=gl.allocate_shared_memory(gl.bfloat16, [1, 1, TILE_HEADS, HALF], _QUERIES),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, 1, TILE_HEADS, ROPE], _QUERIES) if FP8 else None,
        k_left=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], _TILE),
        k_right=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], _TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], _TILE),
        bound=gl.allocate_shared_memory(gl.float32, [2, KEYS], _VECTOR),
        shrink=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], _VECTOR),
        maximum=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], _VECTOR),
        total=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], _VECTOR),
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = Barriers(
        q_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        q_empty=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        total_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        left_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        right_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        left_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        right_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        weights_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        rope_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    mbarrier.init(barriers.q_full, count=2 if FP8 else 1)
    mbarrier.init(barriers.q_empty, count=2)
    mbarrier.init(barriers.total_full, count=2)
    for stage in gl.static_range(2):
        # where copies fill it: each producer thread, as its copies arrive, and once for the bound
        mbarrier.init(barriers.left_full.index(stage), count=1 if FP8 else 128)
        mbarrier.init(barriers.right_full.index(stage), count=1 if FP8 else 129)
        mbarrier.init(barriers.left_empty.index(stage), count=1)
        mbarrier.init(barriers.right_empty.index(stage), count=1)
        mbarrier.init(barriers.weights_full.index(stage), count=1)
        mbarrier.init(barriers.rope_full.index(stage), count=129)
    fence_async_shared()
    rows = Rows(ids, ids_row, width, count, req_of_row, pages, number, splits, (H + TILE_HEADS - 1) // TILE_HEADS)
    heads = Heads(H, q_rope, q_rope_row, q_rope_head, o_desc, sinks, lse, lse_row, lse_head)
    unit = scale * LOG2E
    if FP8:
        unit *= LIFT
        gl.warp_specialize(
            [
                (consume, (heads, pool, rows, ntiles, unit, zero, buffers, barriers, PAGED, 0, SIDES)),
                (consume, (heads, pool, rows, ntiles, unit, zero, buffers, barriers, PAGED, 1, SIDES)),
                (produce_dequantised, (q_desc, heads, pool, rows, ntiles, buffers, barriers, PAGED, SIDES)),
            ],
            [4, 4],
            [_FP8_REGISTERS[0], _FP8_REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (heads, pool, rows, ntiles, unit, zero, buffers, barriers, PAGED, 0, SIDES)),
                (consume, (heads, pool, rows, ntiles, unit, zero, buffers, barriers, PAGED, 1, SIDES)),
                (produce, (q_desc, pool, rows, ntiles, buffers, barriers, PAGED, SIDES)),
            ],
            [4, 4],
            [_BF16_REGISTERS[0], _BF16_REGISTERS[1]],
        )


def launch(
    q_latent,
    q_rope,
    pool,
    topk,
    count,
    page_table,
    req_of_row,
    scale,
    sinks,
    out,
    lse: Tensor | None,
    width: int | None = None,
    sides: int = 2,
) -> None:
    """Runs the kernel on non-empty arguments, as ``sparse_mla.launch``.

    Args:
        q_latent: bf16 [T, H, 512], strides but the last multiples of 8 elements, aligned to 16 bytes.
        q_rope: bf16 [T, H, 64]; that of an fp8 pool has such strides too.
        pool: bf16 [P, 64, 576] or uint8 [P, 64, 656], aligned to 16 bytes.
        scale: above 0: scores are cut to -inf before they are scaled.
        sinks: None of more than one split.
        out: as q_latent, which it may be; or bf16 splits [S, T, H, 512], contiguous.
        lse: fp32 [T, H] or [S, T, H], or None when nobody wants it; S and T must be one dim in memory.
        width: lanes that count at most; None: those of the selection, or of the page table.
        sides: blocks of a step; 1 where no split has more than one block of 64 lanes.
    """
    T, H, _ = q_latent.shape
    fp8 = pool.dtype == torch.uint8
    splits = out.shape[0] if out.dim() == 4 else 1
    out = out.flatten(0, -3)
    lse_row, lse_head = (0, 0) if lse is None else lse.stride()[-2:]
    ids = page_table if topk is None else topk
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    tiles = T * splits * -(-H // HEADS)
    _attend[(min(multiprocessors(pool.device), tiles),)](
        TensorDescriptor.from_tensor(q_latent, [1, HEADS, L // 2], layout),
        TensorDescriptor.from_tensor(out, [1, HEADS, L // 2], layout),
        q_rope,
        pool.view(torch.int32) if fp8 else pool,
        ids,
        count,
        req_of_row,
        sinks,
        lse,
        scale,
        q_rope.stride(0),
        q_rope.stride(1),
        ids.stride(0),
        lse_row,
        lse_head,
        ids.shape[1] * (PAGE if topk is None else 1) if width is None else width,
        pool.shape[0],
        T,
        splits,
        H,
        tiles,
        0,
        PAGED=topk is None,
        SIDES=sides,
        EARLY=splits > 1,
        num_warps=4,
    )

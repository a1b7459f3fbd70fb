"""Absorbed sparse attention of many rows on Hopper, in Gluon: bf16, L = 512, R = 64, heads in blocks of 64.

A tile is one row and 64 of its heads; programs are persistent and take every nth tile. Three warpgroups share a tile:

- the producer (sparse_mla_gather) gathers latents of 64 keys a block into a ring of two stages; lanes that hold no
  token are zero-filled, so that nothing of the pool that was not selected is ever read;
- two consumers, left and right, take turns: the left one scores and exponentiates the even blocks, the right one the
  odd blocks, and each adds *every* block to its own 256 columns of the output. What the other needs of a block (the
  weights, the factor by which earlier sums shrink, the running maximum) passes through shared memory.

While one exponentiates, the other keeps the tensor cores busy; and no latent is read twice, since the left and right
halves of a stage are keys for the scores and values for the sums. Counts are per row: a row costs its own pairs of
blocks. On an H200, 4096 rows of 128 heads and 2048 of 32,768 keys take 4.1 ms (567 TFLOP/s at the power cap), FlashMLA
3.8 and the kernel of sparse_mla_decode 11.5. Alone, the products would run at 850 TFLOP/s and the gather in 2.3 ms:
what bounds the sum is the turnaround of a stage (free it, refill it, score it, exponentiate), so orders that free
halves sooner or start scores sooner won, and a third stage would not fit.

This module imports ``triton.experimental.gluon``: import it only where the kernel is about to run.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compiled_dsa.custom_ops.kernels.common import multiprocessors
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    HALF,
    HEADS,
    KEYS,
    NONE,
    ROPE,
    TILE_HEADS,
    Barriers,
    Buffers,
    L,
    Rows,
    corner,
    produce,
    row_of_tile,
    steps_of,
)
from compiled_dsa.custom_ops.layout import PAGE

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L // 2, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Registers of a thread of the right consumer and of the producer; the left consumer gets what they leave, 232 of 504.
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)

# Triton 3.9 has renamed it.
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Heads(NamedTuple):
    """What a consumer reads and writes of each head."""

    q_rope: gl.tensor  # bf16 [T, H, 64]
    q_rope_row: gl.tensor  # stride
    q_rope_head: gl.tensor
    o_desc: tma.tensor_descriptor
    sinks: gl.tensor | None  # fp32 [H]
    lse: gl.tensor | None  # fp32 [T, H]


@gluon.jit
def _finite(maximum):
    """The value to subtract before exponentiating: 0 where nothing was seen, so that exp2(-inf - x) is 0, not NaN."""
    return gl.where(maximum == NONE, 0.0, maximum)


@gluon.jit
def _score_left(scores, stage, varying, phase, buffers, barriers, SIDE: gl.constexpr):
    mbarrier.wait(barriers.left_full.index(SIDE), phase)
    fence_async_shared()
    keys = buffers.k_left.index(stage).permute((1, 0))
    return warpgroup_mma(buffers.q_left.index(varying), keys, scores, use_acc=False, is_async=True)


@gluon.jit
def _score_right(scores, stage, varying, phase, q_rope, buffers, barriers, SIDE: gl.constexpr):
    mbarrier.wait(barriers.right_full.index(SIDE), phase)
    fence_async_shared()
    keys = buffers.k_right.index(stage).permute((1, 0))
    scores = warpgroup_mma(buffers.q_right.index(varying), keys, scores, is_async=True)
    return warpgroup_mma(q_rope, buffers.k_rope.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _sum_other(acc, stage, phase, values, buffers, barriers, OTHER: gl.constexpr):
    """(sums with the other's block under way, the running maximum after it)."""
    mbarrier.wait(barriers.weights_full.index(OTHER), phase)
    shrink = buffers.shrink.index(OTHER).load(gl.SliceLayout(1, _OUT))
    maximum = buffers.maximum.index(OTHER).load(gl.SliceLayout(1, _SCORES))
    acc = acc * gl.expand_dims(shrink, 1)
    return warpgroup_mma(buffers.weights.index(stage), values.index(stage), acc, is_async=True), maximum


@gluon.jit
def _step(
    acc, total, own_maximum, step, q_rope, buffers, barriers, unit, zero, SIDE: gl.constexpr, FIRST: gl.constexpr
):
    """Both blocks of a step for one consumer: sums the other's block, and scores, publishes and sums its own.

    Args:
        own_maximum: the running maximum when this consumer last published; ``total`` is relative to it.
        step: of all tiles so far; gives the phases of the barriers.
        unit: scale * log2(e).
        zero: 0 at run time. Stages indexed by ``step * zero + SIDE`` are not loop-invariant to the compiler; it would
            keep their descriptors in registers otherwise, and spill.
    """
    OTHER: gl.constexpr = 1 - SIDE
    values = buffers.k_left if SIDE == 0 else buffers.k_right
    values_empty = barriers.left_empty if SIDE == 0 else barriers.right_empty
    phase = step & 1
    varying = step * zero
    own = varying + SIDE
    other = varying + OTHER
    scores = gl.zeros([TILE_HEADS, KEYS], gl.float32, layout=_SCORES)
    if SIDE == 0:
        # the right block is summed first: that frees its left half, and the own block is being refilled meanwhile
        if FIRST:
            maximum = gl.full([TILE_HEADS], NONE, gl.float32, layout=gl.SliceLayout(1, _SCORES))
        else:
            acc, maximum = _sum_other(acc, other, phase ^ 1, values, buffers, barriers, OTHER)
        scores = _score_left(scores, own, varying, phase, buffers, barriers, SIDE)
        if not FIRST:
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(values_empty.index(OTHER), count=1)
        scores = _score_right(scores, own, varying, phase, q_rope, buffers, barriers, SIDE)
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        # scores first: they run while the left consumer exponentiates; its block is summed while this one does
        scores = _score_left(scores, own, varying, phase, buffers, barriers, SIDE)
        scores = _score_right(scores, own, varying, phase, q_rope, buffers, barriers, SIDE)
        acc, maximum = _sum_other(acc, other, phase, values, buffers, barriers, OTHER)
        scores = warpgroup_mma_wait(1, deps=[scores])
    # the smaller of NaN and -inf is -inf: lanes without token weigh nothing whatever the query of a padding row holds
    bound = buffers.bound.index(SIDE).load(gl.SliceLayout(0, _SCORES))
    scores = gl.minimum(scores, gl.expand_dims(bound, 0))
    new = gl.maximum(maximum, gl.max(scores, axis=1) * unit)
    finite = _finite(new)
    shrink = gl.exp2(maximum - finite)
    p = gl.exp2(scores * unit - gl.expand_dims(finite, 1))
    weights = p.to(gl.bfloat16)
    buffers.weights.index(SIDE).store(weights)
    buffers.shrink.index(SIDE).store(shrink)
    buffers.maximum.index(SIDE).store(new)
    fence_async_shared()
    mbarrier.arrive(barriers.weights_full.index(SIDE), count=1)
    if SIDE == 1:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(values_empty.index(OTHER), count=1)
    total = total * gl.exp2(own_maximum - finite) + gl.sum(p, axis=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, _OUT)), 1)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, _OUT, 2))
    acc = warpgroup_mma(weights, values.index(own), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values_empty.index(SIDE), count=1)
    return acc, total, new


@gluon.jit
def _consume(heads, rows, ntiles, unit, zero, buffers, barriers, head_blocks, SIDE: gl.constexpr):
    ROW: gl.constexpr = gl.SliceLayout(1, _SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, _OUT)
    Q_ROPE: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    rope_head = gl.expand_dims(gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, Q_ROPE)), 1)
    rope_column = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, Q_ROPE)), 0)
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    n, _ = row_of_tile(rows, first, head_blocks, False)
    begin = 0
    parity = 0
    for tile in range(first, ntiles, hop):
        steps = steps_of(n)
        n, _ = row_of_tile(rows, gl.minimum(tile + hop, ntiles - 1), head_blocks, False)
        head0 = tile % head_blocks * TILE_HEADS
        rope = heads.q_rope + (tile // head_blocks).to(gl.int64) * heads.q_rope_row
        q2 = gl.load(rope + ((head0 + rope_head) * heads.q_rope_head + rope_column))
        mbarrier.wait(barriers.q_full, parity)
        acc = gl.zeros([TILE_HEADS, HALF], gl.float32, layout=_OUT)
        total = gl.zeros([TILE_HEADS], gl.float32, layout=ROW)
        maximum = gl.full([TILE_HEADS], NONE, gl.float32, layout=ROW)
        # the first step is peeled: with it in the loop, ptxas puts a wait before every multiplication of the sums
        acc, total, maximum = _step(acc, total, maximum, begin, q2, buffers, barriers, unit, zero, SIDE, True)
        for step in range(begin + 1, begin + steps):
            acc, total, maximum = _step(acc, total, maximum, step, q2, buffers, barriers, unit, zero, SIDE, False)
        begin += steps
        if SIDE == 0:
            # the right consumer's last block
            mbarrier.wait(barriers.weights_full.index(1), (begin - 1) & 1)
            acc = acc * gl.expand_dims(buffers.shrink.index(1).load(OUT_ROW), 1)
            acc = warpgroup_mma(buffers.weights.index(1), buffers.k_left.index(1), acc, is_async=True)
            new = buffers.maximum.index(1).load(ROW)
            total = total * gl.exp2(maximum - _finite(new))
            maximum = new
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(barriers.left_empty.index(1), count=1)
        buffers.total.index(SIDE).store(total)
        mbarrier.arrive(barriers.total_full, count=1)
        mbarrier.wait(barriers.total_full, parity)
        total = buffers.total.index(0).load(OUT_ROW) + buffers.total.index(1).load(OUT_ROW)
        maximum = gl.convert_layout(maximum, OUT_ROW)
        head = head0 + gl.arange(0, TILE_HEADS, layout=OUT_ROW)
        if heads.lse is not None and SIDE == 1:
            log_sum = gl.where(total == 0.0, NONE, (maximum + gl.log2(total)) * _LN2)
            gl.store(heads.lse + (tile // head_blocks).to(gl.int64) * (head_blocks * TILE_HEADS) + head, log_sum)
        factor = gl.full([TILE_HEADS], 1.0, gl.float32, layout=OUT_ROW)
        if heads.sinks is not None:
            sink = gl.load(heads.sinks + head) * _LOG2E
            top = _finite(gl.maximum(maximum, sink))
            factor = gl.exp2(maximum - top)
            total = total * factor + gl.exp2(sink - top)
        factor = factor / gl.where(total == 0.0, 1.0, total)
        # both consumers are past their last scores, so the output may take the place of the queries
        stage = buffers.q_left.index(0) if SIDE == 0 else buffers.q_right.index(0)
        stage.store((acc * gl.expand_dims(factor, 1)).to(gl.bfloat16))
        fence_async_shared()
        head, column = corner(tile, head_blocks)
        _tma_store(heads.o_desc, [head, column + SIDE * HALF], stage)
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty, count=1)
        parity ^= 1


@gluon.jit(do_not_specialize=["width", "pages", "ntiles", "head_blocks", "zero"])
def _attend(
    q_desc,  # bf16 [H, T*512]
    o_desc,  # bf16 [H, T*512]; may be the queries' own memory: a tile is written after it was read, by its one program
    q_rope,  # bf16 [T, H, 64], last dim dense
    pool,  # bf16 [P, 64, 576]
    ids,  # int32 [T, K] slots, or [B, maxP] page table when PAGED
    count,
    req_of_row,
    sinks,  # fp32 [H] or None
    lse,  # fp32 [T, H] or None
    scale,
    q_rope_row,
    q_rope_head,
    ids_row,
    width,
    pages,
    ntiles,
    head_blocks,
    zero,
    PAGED: gl.constexpr,
):
    buffers = Buffers(
        q_left=gl.allocate_shared_memory(gl.bfloat16, [1, TILE_HEADS, HALF], _TILE),
        q_right=gl.allocate_shared_memory(gl.bfloat16, [1, TILE_HEADS, HALF], _TILE),
        k_left=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], _TILE),
        k_right=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], _TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], _TILE),
        bound=gl.allocate_shared_memory(gl.float32, [2, KEYS], _VECTOR),
        weights=gl.allocate_shared_memory(gl.bfloat16, [2, TILE_HEADS, KEYS], _TILE),
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
    )
    mbarrier.init(barriers.q_full, count=1)
    mbarrier.init(barriers.q_empty, count=2)
    mbarrier.init(barriers.total_full, count=2)
    for stage in gl.static_range(2):
        mbarrier.init(barriers.left_full.index(stage), count=128)  # each producer thread, as its copies arrive
        mbarrier.init(barriers.right_full.index(stage), count=129)  # and once for the bound
        mbarrier.init(barriers.left_empty.index(stage), count=1)
        mbarrier.init(barriers.right_empty.index(stage), count=1)
        mbarrier.init(barriers.weights_full.index(stage), count=1)
    fence_async_shared()
    rows = Rows(ids, ids_row, width, count, req_of_row, pages)
    heads = Heads(q_rope, q_rope_row, q_rope_head, o_desc, sinks, lse)
    unit = scale * _LOG2E
    gl.warp_specialize(
        [
            (_consume, (heads, rows, ntiles, unit, zero, buffers, barriers, head_blocks, 0)),
            (_consume, (heads, rows, ntiles, unit, zero, buffers, barriers, head_blocks, 1)),
            (produce, (q_desc, pool, rows, ntiles, buffers, barriers, head_blocks, PAGED)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
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
) -> None:
    """Runs the kernel on non-empty arguments, as ``sparse_mla.launch``.

    Args:
        q_latent, out: bf16 [T, H, 512] that lie head by head, strides (512, any multiple of 8, 1); may be the same.
        pool: bf16 [P, 64, 576], aligned to 16 bytes.
        scale: above 0: scores are cut to -inf before they are scaled.
        lse: contiguous fp32 [T, H], or None when nobody wants it.
        width: lanes that count at most; None: those of the selection, or of the page table.
    """
    T, H, _ = q_latent.shape
    ids = page_table if topk is None else topk
    block, layout = [HEADS, L // 2], gl.NVMMASharedLayout(128, 16, rank=2)
    tiles = T * (H // HEADS)
    _attend[(min(multiprocessors(pool.device), tiles),)](
        TensorDescriptor.from_tensor(q_latent.transpose(0, 1).view(H, T * L), block, layout),
        TensorDescriptor.from_tensor(out.transpose(0, 1).view(H, T * L), block, layout),
        q_rope,
        pool,
        ids,
        count,
        req_of_row,
        sinks,
        lse,
        scale,
        q_rope.stride(0),
        q_rope.stride(1),
        ids.stride(0),
        ids.shape[1] * (PAGE if topk is None else 1) if width is None else width,
        pool.shape[0],
        tiles,
        H // HEADS,
        0,
        PAGED=topk is None,
        num_warps=4,
    )

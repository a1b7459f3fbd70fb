"""Absorbed sparse attention of tiles of 64 heads over an fp8 pool on Hopper, in Gluon: dequantised in registers.

Keys and latents are the rows of all products, the heads of a tile their columns: scores^T = K Q^T, out^T = V^T weights^T.
The left operands come from registers (sparse_mla_fragments), so that a row passes through shared memory once, as codes.

Two consumers take turns: the first one scores and exponentiates the even blocks, the second one the odd blocks, and each
adds every block to its own 256 latents of the output. What the other needs of a block (the weights, the factor by which
earlier sums shrink, the running maximum) passes through shared memory.

Legend: T rows, H heads, S splits of a row. A block is 64 keys, a step two blocks.
"""

from typing import NamedTuple

import torch
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
from triton.language.extra.cuda import gdc_launch_dependents

from compiled_dsa.custom_ops.kernels.common import LN2, LOG2E, multiprocessors
from compiled_dsa.custom_ops.kernels.sparse_mla_consume import Heads, tma_store
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT, store_q_rope
from compiled_dsa.custom_ops.kernels.sparse_mla_fragments import (
    GROUPS,
    SCALES_BY_KEY,
    WORDS,
    add_scores,
    allocate_stages,
    latents_operand,
    lift,
    produce_raw,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    HALF,
    KEYS,
    NONE,
    ROPE,
    TILE_HEADS,
    L,
    Rows,
    finite_of,
    lanes_of_tile,
    place_of_tile,
    steps_of,
    tile_of,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_hopper import HEADS
from compiled_dsa.custom_ops.layout import PAGE

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

_STAGES = gl.constexpr(3)
_REGISTERS = gl.constexpr((236, 32))  # a thread of the second consumer, of the producer; the first has the rest of 504

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16]))
_HEAD = gl.constexpr(gl.SliceLayout(0, _PRODUCT))
_LOAD_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))

# Words [32, 64] of half of the keys for the sums of 256 latents: of keys 2 t, 2 t + 1 and those 8 further of each 16,
# 8 bytes at 64 w + 8 g.
_BY_LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [8, 0], [16, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[32, 64],
    )
)
_SCALES_BY_LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [16, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 1]],
        block_bases=[],
        shape=[32, 2],
    )
)
_FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[4, 0, 0], [8, 0, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        warp_bases=[[0, 0, 1], [0, 1, 0]],
        block_bases=[],
        shape=[16, 2, 2],
    )
)


class _Buffers(NamedTuple):
    q_left: gl.shared_memory_descriptor  # bf16 [1, 1, 64, 256], in the order of BY_KEY; then the output of that half
    q_right: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor  # bf16 [1, 1, 64, 64]
    weights: gl.shared_memory_descriptor  # bf16 [2, 64 heads, 64 keys], of each consumer
    shrink: gl.shared_memory_descriptor  # fp32 [2, 64]: factor of everything summed before the block
    maximum: gl.shared_memory_descriptor  # fp32 [2, 64]: of the scores up to the block, in units of log2
    total: gl.shared_memory_descriptor  # fp32 [2, 64]: sum of the weights of the blocks of each consumer


class _Barriers(NamedTuple):
    q_full: gl.shared_memory_descriptor
    total_full: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor  # [2]; also of shrink and maximum
    weights_empty: gl.shared_memory_descriptor  # read by the other consumer


@gluon.jit
def _fetch_queries(q_latent, row_stride, head_stride, heads, rows, tile, buffers, barriers, SIDE: gl.constexpr):
    """A half of the queries of a tile, in the order in which keys_operand has the latents; rope with the left one."""
    row, _split, head0 = place_of_tile(rows, tile)
    head = head0 + gl.expand_dims(gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, _LOAD_QUERIES)), 1)
    column = gl.expand_dims(gl.arange(0, 4 * WORDS, layout=gl.SliceLayout(0, _LOAD_QUERIES)), 0)
    begin = q_latent + row.to(gl.int64) * row_stride + (head * head_stride + column)
    place = tile_of(buffers.q_left if SIDE == 0 else buffers.q_right, 0)
    for i in gl.static_range(2):
        q = gl.load(begin + (SIDE * HALF + i * 4 * WORDS), mask=head < heads.H, other=0.0)
        q = gl.reshape(q, [TILE_HEADS, 4, 2, 4, 2, 2])  # t, 16 bytes, word, two codes, code
        q = gl.reshape(gl.permute(q, (0, 2, 3, 4, 1, 5)), [TILE_HEADS, 4 * WORDS])
        place.slice(i * 4 * WORDS, 4 * WORDS, dim=1).store(q)
    if SIDE == 0:
        store_q_rope(heads, rows, tile, tile_of(buffers.q_rope, 0))
    fence_async_shared()
    mbarrier.arrive(barriers.q_full, count=1)


@gluon.jit
def _score(stage, buffers, stages):
    """Scores [64 keys, 64 heads] of a block, not scaled."""
    scores = gl.zeros([KEYS, TILE_HEADS], gl.float32, layout=_PRODUCT)
    rope = tile_of(buffers.q_rope, 0).permute((1, 0))
    scores = warpgroup_mma(stages.rope.index(stage), rope, scores, use_acc=False, is_async=True)
    scales = gl.reshape(stages.scales.index(stage).load(SCALES_BY_KEY), [KEYS, 2, 2])
    even, odd = gl.split(scales)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    by_group = (first, second, third, fourth)
    codes = stages.codes.index(stage)
    for i in gl.static_range(GROUPS):
        queries = tile_of(buffers.q_left if i < 2 else buffers.q_right, 0)
        queries = queries.slice(i % 2 * 4 * WORDS, 4 * WORDS, dim=1)
        scores = add_scores(scores, codes.slice(i * WORDS, WORDS, dim=1), by_group[i], queries, _PRODUCT)
    bound = stages.bound.index(stage).load(gl.SliceLayout(1, _PRODUCT))
    # the smaller of NaN and -inf is -inf: lanes without token weigh nothing whatever the query of a padding row holds
    return gl.minimum(scores, gl.expand_dims(bound, 1))


@gluon.jit
def _exponentiate(scores, maximum, own_maximum, first, buffers, barriers, unit, step, SIDE: gl.constexpr):
    """Publishes the weights of a block, and adds them to the sum of this consumer.

    Args:
        maximum: the running maximum before the block; own_maximum: when this consumer last published.
    """
    new = gl.maximum(maximum, gl.max(scores, axis=0) * unit)
    finite = finite_of(new)
    p = gl.exp2(scores * unit - gl.expand_dims(finite, 0))
    mbarrier.wait(barriers.weights_empty.index(SIDE), (step & 1) ^ 1)
    buffers.shrink.index(SIDE).store(gl.exp2(maximum - finite))
    buffers.maximum.index(SIDE).store(new)
    buffers.weights.index(SIDE).permute((1, 0)).store(p.to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(barriers.weights_full.index(SIDE), count=1)
    # registers are few
    total = gl.where(first, 0.0, buffers.total.index(SIDE).load(_HEAD))
    buffers.total.index(SIDE).store(total * gl.exp2(own_maximum - finite) + gl.sum(p, axis=0))


@gluon.jit
def _latents(codes, scales):
    """Operand [256, 32] of the sums, of codes [32 keys, 256] in words, and scales of their two groups."""
    words = gl.reshape(codes.load(_BY_LATENT), [16, 2, 4, 16])
    even, odd = gl.split(gl.permute(words, (0, 2, 3, 1)))
    LAYOUT: gl.constexpr = even.type.layout
    low, high = gl.split(gl.permute(gl.reshape(scales.load(_SCALES_BY_LATENT), [16, 2, 2]), (0, 2, 1)))
    # [16, 2 groups], of two warps each
    factor = gl.expand_dims(gl.convert_layout(lift(low, high), gl.SliceLayout(2, _FACTORS)), 2)
    factor, _zeros = gl.broadcast(factor, gl.zeros([16, 2, 2], gl.int32, layout=_FACTORS))
    factor = gl.convert_layout(gl.reshape(factor, [16, 4]), gl.SliceLayout(2, LAYOUT))
    factor, even = gl.broadcast(gl.expand_dims(factor, 2), even)
    return latents_operand(even, odd, factor, _PRODUCT)


@gluon.jit
def _add(acc, stage, buffers, stages, OWNER: gl.constexpr, SIDE: gl.constexpr):
    """Adds a block, whose weights OWNER has published, to the sums [256, 64] of latents 256 SIDE on."""
    acc = acc * gl.expand_dims(buffers.shrink.index(OWNER).load(_HEAD), 0)
    codes = stages.codes.index(stage).slice(SIDE * 2 * WORDS, 2 * WORDS, dim=1)
    scales = stages.scales.index(stage).slice(SIDE * 2, 2, dim=1)
    for i in gl.static_range(2):
        latents = _latents(codes.slice(i * 32, 32, dim=0), scales.slice(i * 32, 32, dim=0))
        weights = buffers.weights.index(OWNER).slice(i * 32, 32, dim=1).permute((1, 0))
        acc = warpgroup_mma(latents, weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def _write(acc, total, maximum, heads, rows, tile, buffers, SIDE: gl.constexpr):
    """The tile's half of the output, and its log-sum-exp."""
    row, split, head0 = place_of_tile(rows, tile)
    part = split * rows.number + row
    head = head0 + gl.arange(0, TILE_HEADS, layout=_HEAD)
    if heads.lse is not None and SIDE == 1:
        log_sum = gl.where(total == 0.0, NONE, (maximum + gl.log2(total)) * LN2)
        where = heads.lse + part.to(gl.int64) * heads.lse_row + head * heads.lse_head
        gl.store(where, log_sum, mask=head < heads.H)
    factor = gl.full([TILE_HEADS], LIFT, gl.float32, layout=_HEAD)
    if heads.sinks is not None:
        sink = gl.load(heads.sinks + head, mask=head < heads.H, other=NONE) * LOG2E
        top = finite_of(gl.maximum(maximum, sink))
        shrink = gl.exp2(maximum - top)
        factor = factor * shrink
        total = total * shrink + gl.exp2(sink - top)
    factor = factor / gl.where(total == 0.0, 1.0, total)
    out = (acc * gl.expand_dims(factor, 0)).to(gl.bfloat16)
    out = gl.reshape(out, [2, 2, 4, 2, 8, TILE_HEADS])  # word, two latents, w, latent, g, head
    out = gl.reshape(gl.permute(out, (5, 2, 4, 0, 1, 3)), [TILE_HEADS, HALF])
    # both consumers are past their last scores, so the output may take the place of the queries
    stage = buffers.q_left if SIDE == 0 else buffers.q_right
    tile_of(stage, 0).store(out)
    fence_async_shared()
    tma_store(heads.o_desc, [part, head0, SIDE * HALF], stage.index(0))
    tma.store_wait(0)
    _barrier()  # before other threads fetch the next queries there


@gluon.jit
def _consume(
    q_latent, q_row, q_head, heads, rows, ntiles, unit, buffers, barriers, stages, SIDE: gl.constexpr
):
    OTHER: gl.constexpr = 1 - SIDE
    STAGES: gl.constexpr = stages.codes.shape[0]
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    begin = 0
    parity = 0
    for tile in range(first, ntiles, hop):
        _fetch_queries(q_latent, q_row, q_head, heads, rows, tile, buffers, barriers, SIDE)
        n, _offset = lanes_of_tile(rows, tile, False, 2 * KEYS)
        acc = gl.zeros([HALF, TILE_HEADS], gl.float32, layout=_PRODUCT)
        mbarrier.wait(barriers.q_full, parity)
        steps = steps_of(n, 2 * KEYS)
        # begin must not stand in the range: Triton 3.6 takes what only bounds an inner loop for dead, and keeps it at 0
        for i in range(steps):
            step = begin + i
            own = (2 * step + SIDE) % STAGES
            own_phase = (2 * step + SIDE) // STAGES & 1
            # the maximum when this consumer last published; of other tiles before the first block
            if SIDE == 0:
                if i > 0:
                    mbarrier.wait(barriers.weights_full.index(1), (step - 1) & 1)
                    acc = _add(acc, (2 * step - 1) % STAGES, buffers, stages, 1, SIDE)
                    mbarrier.arrive(stages.empty.index((2 * step - 1) % STAGES), count=1)
            mbarrier.wait(stages.full.index(own), own_phase)
            fence_async_shared()  # the producer cannot: it does not wait for its copies
            scores = _score(own, buffers, stages)
            if SIDE == 1:
                mbarrier.wait(barriers.weights_full.index(0), step & 1)
            maximum = buffers.maximum.index(OTHER).load(_HEAD)
            own_maximum = buffers.maximum.index(SIDE).load(_HEAD)
            if SIDE == 0:
                maximum = gl.where(i > 0, maximum, NONE)
            own_maximum = gl.where(i > 0, own_maximum, NONE)
            _exponentiate(scores, maximum, own_maximum, i == 0, buffers, barriers, unit, step, SIDE)
            if SIDE == 0:
                mbarrier.arrive(barriers.weights_empty.index(1), count=1, pred=i > 0)
            else:
                acc = _add(acc, (2 * step) % STAGES, buffers, stages, 0, SIDE)
                mbarrier.arrive(barriers.weights_empty.index(0), count=1)
                mbarrier.arrive(stages.empty.index((2 * step) % STAGES), count=1)
            acc = _add(acc, own, buffers, stages, SIDE, SIDE)
            mbarrier.arrive(stages.empty.index(own), count=1)
        begin += steps
        if SIDE == 0:
            # the other consumer's last block
            mbarrier.wait(barriers.weights_full.index(1), (begin - 1) & 1)
            acc = _add(acc, (2 * begin - 1) % STAGES, buffers, stages, 1, SIDE)
            mbarrier.arrive(stages.empty.index((2 * begin - 1) % STAGES), count=1)
        maximum = buffers.maximum.index(1).load(_HEAD)
        if SIDE == 0:
            factor = gl.exp2(buffers.maximum.index(0).load(_HEAD) - finite_of(maximum))
            buffers.total.index(0).store(buffers.total.index(0).load(_HEAD) * factor)
            mbarrier.arrive(barriers.weights_empty.index(1), count=1)
        mbarrier.arrive(barriers.total_full, count=1)
        mbarrier.wait(barriers.total_full, parity)
        total = buffers.total.index(0).load(_HEAD) + buffers.total.index(1).load(_HEAD)
        _write(acc, total, maximum, heads, rows, tile, buffers, SIDE)
        parity ^= 1


@gluon.jit(do_not_specialize=["lse_row", "lse_head", "width", "pages", "number", "splits", "H", "ntiles"])
def _attend(
    q_latent,  # bf16 [T, H, 512], last dim dense
    q_rope,  # bf16 [T, H, 64], last dim dense
    o_desc,  # bf16 [S T, H, 512]; may be the queries' own memory: a tile is written after its one program has read it
    pool,  # uint8 [P, 64, 656] as int32
    ids,  # int32 [T, K] slots, or [B, maxP] page table when PAGED
    count,
    req_of_row,
    sinks,  # fp32 [H] or None
    lse,  # fp32 [S T, H] or None
    scale,
    q_row,
    q_head,
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
    PAGED: gl.constexpr,
    EARLY: gl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()  # the programs that combine start and wait
    stages = allocate_stages(_STAGES, 2)
    buffers = _Buffers(
        q_left=gl.allocate_shared_memory(gl.bfloat16, [1, 1, TILE_HEADS, HALF], _QUERIES),
        q_right=gl.allocate_shared_memory(gl.bfloat16, [1, 1, TILE_HEADS, HALF], _QUERIES),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, 1, TILE_HEADS, ROPE], _QUERIES),
        weights=gl.allocate_shared_memory(gl.bfloat16, [2, TILE_HEADS, KEYS], _TILE),
        shrink=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], _VECTOR),
        maximum=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], _VECTOR),
        total=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], _VECTOR),
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = _Barriers(
        q_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        total_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        weights_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        weights_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    mbarrier.init(barriers.q_full, count=2)
    mbarrier.init(barriers.total_full, count=2)
    for side in gl.static_range(2):
        mbarrier.init(barriers.weights_full.index(side), count=1)
        mbarrier.init(barriers.weights_empty.index(side), count=1)
    fence_async_shared()
    rows = Rows(ids, ids_row, width, count, req_of_row, pages, number, splits, (H + TILE_HEADS - 1) // TILE_HEADS)
    heads = Heads(H, q_rope, q_rope_row, q_rope_head, o_desc, sinks, lse, lse_row, lse_head)
    unit = scale * LOG2E * LIFT
    gl.warp_specialize(
        [
            (_consume, (q_latent, q_row, q_head, heads, rows, ntiles, unit, buffers, barriers, stages, 0)),
            (_consume, (q_latent, q_row, q_head, heads, rows, ntiles, unit, buffers, barriers, stages, 1)),
            (produce_raw, (pool, rows, ntiles, stages, PAGED)),
        ],
        [4, 4],
        [_REGISTERS[0], _REGISTERS[1]],
    )


def launch(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse: Tensor | None, sides: int = 2
) -> None:
    """As ``sparse_mla_gluon.launch``, of an fp8 pool and two blocks a step."""
    T, H, _ = q_latent.shape
    splits = out.shape[0] if out.dim() == 4 else 1
    out = out.flatten(0, -3)
    lse_row, lse_head = (0, 0) if lse is None else lse.stride()[-2:]
    ids = page_table if topk is None else topk
    tiles = T * splits * -(-H // HEADS)
    _attend[(min(multiprocessors(pool.device), tiles),)](
        q_latent,
        q_rope,
        TensorDescriptor.from_tensor(out, [1, HEADS, L // 2], gl.NVMMASharedLayout(128, 16, rank=3)),
        pool.view(torch.int32),
        ids,
        count,
        req_of_row,
        sinks,
        lse,
        scale,
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        ids.stride(0),
        lse_row,
        lse_head,
        ids.shape[1] * (PAGE if topk is None else 1),
        pool.shape[0],
        T,
        splits,
        H,
        tiles,
        PAGED=topk is None,
        EARLY=splits > 1,
        num_warps=4,
    )

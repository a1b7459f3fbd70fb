"""Absorbed sparse attention of up to 32 heads over an fp8 pool on Hopper, in Gluon: L = 512, R = 64.

wgmma has 64 rows or none, so the kernel of more heads pads. Here the operands are swapped: 64 keys, then 64 latents,
are the rows, and the heads are columns: scores^T = K Q^T, out^T = V^T weights^T. A block of 64 keys then costs what
reading it from shared memory twice costs, 1100 cycles instead of 2200. (Up to 16 heads leave registers for converting
keys there: sparse_mla_registers, which takes two blocks a step; this kernel has theirs of one block.)

Two producers (sparse_mla_dequantise): of the left half, and of the right half and rope. Stages, their barriers and
splits are those of sparse_mla_gluon.
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
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT, produce_dequantised, store_q_rope
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    HALF,
    KEYS,
    LATENT,
    NONE,
    ROPE,
    L,
    Rows,
    finite_of,
    lanes_of_tile,
    place_of_tile,
    steps_of,
    tile_of,
    tma_load,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_hopper import FEW_HEADS, REGISTER_HEADS

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

_PRODUCER_REGISTERS = gl.constexpr(112)  # a thread; the consumer has what two producers leave of 504


class _Buffers(NamedTuple):
    """Shared memory, as sparse_mla_gather.Buffers; N heads, 16 or 32."""

    q_left: gl.shared_memory_descriptor  # bf16 [1, 1, N, 256]
    q_right: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor  # bf16 [1, 1, N, 64]
    k_left: gl.shared_memory_descriptor  # bf16 [2, 64, 256]
    k_right: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor  # bf16 [2, 64, 64]
    bound: gl.shared_memory_descriptor  # fp32 [2, 64]
    weights: gl.shared_memory_descriptor  # bf16 [1, N, 64]
    out_left: gl.shared_memory_descriptor  # bf16 [1, 1, N, 256]
    out_right: gl.shared_memory_descriptor


class _Barriers(NamedTuple):
    """As sparse_mla_gather.Barriers. Queries need no ``q_empty``: their writer has seen the sums, which come after."""

    q_full: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    left_empty: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    rope_full: gl.shared_memory_descriptor


@gluon.jit
def _block(left, right, total, maximum, step, buffers, barriers, unit, zero, SIDE: gl.constexpr, S: gl.constexpr):
    """Scores a block and adds it to the sums [256, N] of the left and right latents; S is the layout of all products.

    ``zero`` is 0 at run time: stages that seem to vary do not have their descriptors kept in registers.
    """
    phase = step & 1
    varying = step * zero
    own = varying + SIDE
    N: gl.constexpr = buffers.weights.shape[1]
    scores = gl.zeros([KEYS, N], gl.float32, layout=S)
    mbarrier.wait(barriers.left_full.index(SIDE), phase)
    queries = tile_of(buffers.q_left, varying).permute((1, 0))
    scores = warpgroup_mma(buffers.k_left.index(own), queries, scores, use_acc=False, is_async=True)
    mbarrier.wait(barriers.right_full.index(SIDE), phase)
    queries = tile_of(buffers.q_right, varying).permute((1, 0))
    scores = warpgroup_mma(buffers.k_right.index(own), queries, scores, is_async=True)
    mbarrier.wait(barriers.rope_full.index(SIDE), phase)
    fence_async_shared()  # its producer cannot: it does not wait for its copies
    queries = tile_of(buffers.q_rope, varying).permute((1, 0))
    scores = warpgroup_mma(buffers.k_rope.index(own), queries, scores, is_async=True)
    bound = buffers.bound.index(SIDE).load(gl.SliceLayout(1, S))
    scores = warpgroup_mma_wait(0, deps=[scores])
    # the smaller of NaN and -inf is -inf: lanes without token weigh nothing whatever the query of a padding row holds
    scores = gl.minimum(scores, gl.expand_dims(bound, 1))
    new = gl.maximum(maximum, gl.max(scores, axis=0) * unit)
    finite = finite_of(new)
    shrink = gl.expand_dims(gl.exp2(maximum - finite), 0)
    p = gl.exp2(scores * unit - gl.expand_dims(finite, 0))
    weights = buffers.weights.index(varying).permute((1, 0))
    weights.store(p.to(gl.bfloat16))
    fence_async_shared()
    left = warpgroup_mma(buffers.k_left.index(own).permute((1, 0)), weights, left * shrink, is_async=True)
    right = warpgroup_mma(buffers.k_right.index(own).permute((1, 0)), weights, right * shrink, is_async=True)
    total = total * shrink + p
    left = warpgroup_mma_wait(1, deps=[left])
    mbarrier.arrive(barriers.left_empty.index(SIDE), count=1)
    right = warpgroup_mma_wait(0, deps=[right])
    mbarrier.arrive(barriers.right_empty.index(SIDE), count=1)
    return left, right, total, new


@gluon.jit
def _fetch_queries(q_desc, heads, rows, tile, buffers, barriers):
    N: gl.constexpr = buffers.weights.shape[1]
    row, _split, _head = place_of_tile(rows, tile)
    mbarrier.expect(barriers.q_full, N * LATENT * 2)
    tma_load(q_desc, [row, 0, 0], barriers.q_full, buffers.q_left.index(0))
    tma_load(q_desc, [row, 0, HALF], barriers.q_full, buffers.q_right.index(0))
    store_q_rope(heads, rows, tile, tile_of(buffers.q_rope, 0))
    mbarrier.arrive(barriers.q_full, count=1)


@gluon.jit
def _write(left, right, total, maximum, heads, rows, tile, buffers, S: gl.constexpr):
    """The output of a tile and its log-sum-exp."""
    N: gl.constexpr = buffers.weights.shape[1]
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    row, split, _head = place_of_tile(rows, tile)
    part = split * rows.number + row
    head = gl.arange(0, N, layout=COLUMN)
    log_sum = gl.where(total == 0.0, NONE, (maximum + gl.log2(total)) * LN2)
    where = heads.lse + part.to(gl.int64) * heads.lse_row + head * heads.lse_head
    gl.store(where, log_sum, mask=head < heads.H)
    factor = gl.full([N], LIFT, gl.float32, layout=COLUMN)
    if heads.sinks is not None:
        sink = gl.load(heads.sinks + head, mask=head < heads.H, other=NONE) * LOG2E
        top = finite_of(gl.maximum(maximum, sink))
        shrink = gl.exp2(maximum - top)
        factor = factor * shrink
        total = total * shrink + gl.exp2(sink - top)
    factor = gl.expand_dims(factor / gl.where(total == 0.0, 1.0, total), 0)
    tile_of(buffers.out_left, 0).permute((1, 0)).store((left * factor).to(gl.bfloat16))
    tile_of(buffers.out_right, 0).permute((1, 0)).store((right * factor).to(gl.bfloat16))
    fence_async_shared()
    tma_store(heads.o_desc, [part, 0, 0], buffers.out_left.index(0))
    tma_store(heads.o_desc, [part, 0, HALF], buffers.out_right.index(0))
    tma.store_wait(0)


@gluon.jit
def _consume(q_desc, heads, rows, ntiles, unit, zero, buffers, barriers, SIDES: gl.constexpr):
    """All blocks of a tile; also fetches queries and writes."""
    N: gl.constexpr = buffers.weights.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    STEP: gl.constexpr = SIDES * KEYS
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    _fetch_queries(q_desc, heads, rows, first, buffers, barriers)
    begin = 0
    parity = 0
    for tile in range(first, ntiles, hop):
        n, _offset = lanes_of_tile(rows, tile, False, STEP)
        left = gl.zeros([HALF, N], gl.float32, layout=S)
        right = gl.zeros([HALF, N], gl.float32, layout=S)
        total = gl.zeros([KEYS, N], gl.float32, layout=S)
        maximum = gl.full([N], NONE, gl.float32, layout=gl.SliceLayout(0, S))
        mbarrier.wait(barriers.q_full, parity)
        steps = steps_of(n, STEP)
        # begin must not stand in the range: Triton 3.6 takes what only bounds an inner loop for dead, and keeps it at 0
        for i in range(steps):
            step = begin + i
            for side in gl.static_range(SIDES):
                left, right, total, maximum = _block(
                    left, right, total, maximum, step, buffers, barriers, unit, zero, side, S
                )
        begin += steps
        total = gl.sum(total, axis=0)
        if tile + hop < ntiles:
            _fetch_queries(q_desc, heads, rows, tile + hop, buffers, barriers)
        _write(left, right, total, maximum, heads, rows, tile, buffers, S)
        parity ^= 1


@gluon.jit(do_not_specialize=["lse_row", "lse_head", "width", "pages", "number", "splits", "H", "ntiles", "zero"])
def _attend(
    q_desc,  # bf16 [T, H, 512]
    q_rope,  # bf16 [T, H, 64], last dim dense
    o_desc,  # bf16 [S T, H, 512]
    pool,  # uint8 [P, 64, 656] as int32
    ids,  # int32 [T, K] slots, or [B, maxP] page table when PAGED
    count,
    req_of_row,
    sinks,  # fp32 [H] or None
    lse,  # fp32 [S T, H]
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
    N: gl.constexpr,
    PAGED: gl.constexpr,
    SIDES: gl.constexpr,
    EARLY: gl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()  # the programs that combine start and wait
    buffers = _Buffers(
        q_left=gl.allocate_shared_memory(gl.bfloat16, [1, 1, N, HALF], _QUERIES),
        q_right=gl.allocate_shared_memory(gl.bfloat16, [1, 1, N, HALF], _QUERIES),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, 1, N, ROPE], _QUERIES),
        k_left=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], _TILE),
        k_right=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], _TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], _TILE),
        bound=gl.allocate_shared_memory(gl.float32, [2, KEYS], _VECTOR),
        weights=gl.allocate_shared_memory(gl.bfloat16, [1, N, KEYS], _TILE),
        out_left=gl.allocate_shared_memory(gl.bfloat16, [1, 1, N, HALF], _QUERIES),
        out_right=gl.allocate_shared_memory(gl.bfloat16, [1, 1, N, HALF], _QUERIES),
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = _Barriers(
        q_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        left_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        right_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        left_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        right_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        rope_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    mbarrier.init(barriers.q_full, count=2)  # latents as they arrive, rope when it is stored
    for stage in gl.static_range(2):
        mbarrier.init(barriers.left_full.index(stage), count=1)
        mbarrier.init(barriers.right_full.index(stage), count=1)
        mbarrier.init(barriers.left_empty.index(stage), count=1)
        mbarrier.init(barriers.right_empty.index(stage), count=1)
        # each producer thread, as its copies arrive, and once for the bound
        mbarrier.init(barriers.rope_full.index(stage), count=129)
    fence_async_shared()
    rows = Rows(ids, ids_row, width, count, req_of_row, pages, number, splits, 1)
    heads = Heads(H, q_rope, q_rope_row, q_rope_head, o_desc, sinks, lse, lse_row, lse_head)
    unit = scale * LOG2E * LIFT
    gl.warp_specialize(
        [
            (_consume, (q_desc, heads, rows, ntiles, unit, zero, buffers, barriers, SIDES)),
            (produce_dequantised, (None, heads, pool, rows, ntiles, buffers, barriers, PAGED, SIDES, 0, 1)),
            (produce_dequantised, (None, heads, pool, rows, ntiles, buffers, barriers, PAGED, SIDES, 1, 1)),
        ],
        [4, 4],
        [_PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
    )


def launch(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse: Tensor, width: int, sides: int
) -> None:
    """As ``sparse_mla_gluon.launch``, of an fp8 pool and at most 32 heads; ``out`` is bf16."""
    T, H, _ = q_latent.shape
    heads = REGISTER_HEADS if H <= REGISTER_HEADS else FEW_HEADS
    splits = out.shape[0] if out.dim() == 4 else 1
    out = out.flatten(0, -3)
    ids = page_table if topk is None else topk
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    tiles = T * splits
    _attend[(min(multiprocessors(pool.device), tiles),)](
        TensorDescriptor.from_tensor(q_latent, [1, heads, L // 2], layout),
        q_rope,
        TensorDescriptor.from_tensor(out, [1, heads, L // 2], layout),
        pool.view(torch.int32),
        ids,
        count,
        req_of_row,
        sinks,
        lse,
        scale,
        q_rope.stride(0),
        q_rope.stride(1),
        ids.stride(0),
        *lse.stride()[-2:],
        width,
        pool.shape[0],
        T,
        splits,
        H,
        tiles,
        0,
        N=heads,
        PAGED=topk is None,
        SIDES=sides,
        EARLY=splits > 1,
        num_warps=4,
    )

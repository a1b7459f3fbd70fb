"""Absorbed sparse attention of up to 16 heads over an fp8 pool on Hopper, in Gluon: keys are dequantised in registers.

As in sparse_mla_few_heads, keys and latents are the rows of all products and heads their columns:
scores^T = K Q^T, out^T = V^T weights^T. Here the left operands come from registers (sparse_mla_fragments): the producer
copies rows of the pool as they are into a ring of stages, and the consumers convert codes on their way from shared
memory into products. So a stage is half as large, more of them are under way, and no converted key passes through
shared memory. (With 64 heads, sums and fragments do not fit into the registers: that took 316 us on an H200 where
sparse_mla_gluon takes 196.)

Two consumers have every other block each, and a softmax of their own; the first merges what both have.

Legend: T rows, H heads, N = 16, S splits. A block is 64 keys, a step two of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from compiled_dsa.custom_ops.kernels.common import LN2, LOG2E, multiprocessors
from compiled_dsa.custom_ops.kernels.sparse_mla_consume import Heads
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT, store_q_rope
from compiled_dsa.custom_ops.kernels.sparse_mla_fragments import (
    GROUPS,
    SCALES_BY_KEY,
    WORDS,
    add_scores,
    allocate_stages,
    latents_operands,
    produce_raw,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    HALF,
    KEYS,
    LATENT,
    NONE,
    ROPE,
    Rows,
    finite_of,
    lanes_of_tile,
    place_of_tile,
    steps_of,
    tile_of,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_hopper import REGISTER_HEADS

_N = gl.constexpr(REGISTER_HEADS)
_STAGES = gl.constexpr(4)
_REGISTERS = gl.constexpr((232, 40))  # a thread of the second consumer, of the producer; the first has the rest of 504

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REGISTER_HEADS, 16]))

_LOAD_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


class _Tensors(NamedTuple):
    q: gl.tensor  # bf16 [T, H, 512]
    q_row: gl.tensor  # strides
    q_head: gl.tensor
    out: gl.tensor  # bf16 [S T, H, 512]
    out_row: gl.tensor
    out_head: gl.tensor


class _Buffers(NamedTuple):
    q_latent: gl.shared_memory_descriptor  # bf16 [1, 1, N, 512], in the order in which BY_KEY has the latents
    q_rope: gl.shared_memory_descriptor  # bf16 [1, 1, N, 64]
    weights: gl.shared_memory_descriptor  # bf16 [2, N, 64], of each consumer
    sums_left: gl.shared_memory_descriptor  # bf16 [1, 1, N, 256]; of the second consumer
    sums_right: gl.shared_memory_descriptor
    maximum: gl.shared_memory_descriptor  # fp32 [N]; of the second consumer
    total: gl.shared_memory_descriptor


class _Barriers(NamedTuple):
    """``full``: written, may be read; ``empty``: read, may be written."""

    q_full: gl.shared_memory_descriptor
    sums_full: gl.shared_memory_descriptor
    sums_empty: gl.shared_memory_descriptor


@gluon.jit
def _block(left, right, total, maximum, count, buffers, stages, unit, CONSUMER: gl.constexpr):
    """Scores a block and adds it to the sums [256, N] of the left and right latents."""
    stage = count % _STAGES
    mbarrier.wait(stages.full.index(stage), count // _STAGES & 1)
    fence_async_shared()  # the producer cannot: it does not wait for its copies
    codes = stages.codes.index(stage)
    queries = tile_of(buffers.q_latent, 0)
    even, odd = gl.split(gl.reshape(stages.scales.index(stage).load(SCALES_BY_KEY), [KEYS, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    by_group = (first, second, third, fourth)
    scores = gl.zeros([KEYS, _N], gl.float32, layout=_PRODUCT)
    rope = tile_of(buffers.q_rope, 0).permute((1, 0))
    scores = warpgroup_mma(stages.rope.index(stage), rope, scores, use_acc=False, is_async=True)
    for i in gl.static_range(GROUPS):
        part = queries.slice(i * 4 * WORDS, 4 * WORDS, dim=1)
        scores = add_scores(scores, codes.slice(i * WORDS, WORDS, dim=1), by_group[i], part, _PRODUCT)
    # the smaller of NaN and -inf is -inf: lanes without token weigh nothing whatever the query of a padding row holds
    bound = stages.bound.index(stage).load(gl.SliceLayout(1, _PRODUCT))
    scores = gl.minimum(scores, gl.expand_dims(bound, 1))
    new = gl.maximum(maximum, gl.max(scores, axis=0) * unit)
    finite = finite_of(new)
    shrink = gl.expand_dims(gl.exp2(maximum - finite), 0)
    p = gl.exp2(scores * unit - gl.expand_dims(finite, 0))
    weights = buffers.weights.index(CONSUMER)
    weights.permute((1, 0)).store(p.to(gl.bfloat16))
    fence_async_shared()
    total = total * shrink + p
    left = left * shrink
    right = right * shrink
    for i in gl.static_range(2):
        half = codes.slice(i * 32, 32, dim=0)
        scales = stages.scales.index(stage).slice(i * 32, 32, dim=0)
        left_latents, right_latents = latents_operands(half, scales, _PRODUCT)
        if i == 1:
            mbarrier.arrive(stages.empty.index(stage), count=1)
        part = weights.slice(i * 32, 32, dim=1).permute((1, 0))
        left = warpgroup_mma(left_latents, part, left, is_async=True)
        right = warpgroup_mma(right_latents, part, right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return left, right, total, new


@gluon.jit
def _fetch_queries(tensors, heads, rows, tile, buffers, barriers):
    """Queries of a tile, in the order in which BY_KEY has the latents."""
    row, _split, _head = place_of_tile(rows, tile)
    head = gl.expand_dims(gl.arange(0, _N, layout=gl.SliceLayout(1, _LOAD_QUERIES)), 1)
    column = gl.expand_dims(gl.arange(0, LATENT, layout=gl.SliceLayout(0, _LOAD_QUERIES)), 0)
    begin = tensors.q + row.to(gl.int64) * tensors.q_row
    q = gl.load(begin + (head * tensors.q_head + column), mask=head < heads.H, other=0.0)
    q = gl.reshape(q, [_N, 4, 4, 2, 4, 2, 2])  # group, t, 16 bytes, word, two codes, code
    q = gl.reshape(gl.permute(q, (0, 1, 3, 4, 5, 2, 6)), [_N, LATENT])
    tile_of(buffers.q_latent, 0).store(q)
    store_q_rope(heads, rows, tile, tile_of(buffers.q_rope, 0))  # ends with a fence
    mbarrier.arrive(barriers.q_full, count=1)


@gluon.jit
def _write(left, right, total, maximum, tensors, heads, rows, tile, buffers):
    """The output of a tile and its log-sum-exp, of both consumers."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    row, split, _head = place_of_tile(rows, tile)
    part = split * rows.number + row
    head = gl.arange(0, _N, layout=COLUMN)
    other = buffers.maximum.load(COLUMN)
    new = gl.maximum(maximum, other)
    factor = gl.exp2(maximum - finite_of(new))
    other_factor = gl.exp2(other - finite_of(new))
    total = total * factor + buffers.total.load(COLUMN) * other_factor
    log_sum = gl.where(total == 0.0, NONE, (new + gl.log2(total)) * LN2)
    where = heads.lse + part.to(gl.int64) * heads.lse_row + head * heads.lse_head
    gl.store(where, log_sum, mask=head < heads.H)
    shrink = gl.full([_N], 1.0, gl.float32, layout=COLUMN)
    if heads.sinks is not None:
        sink = gl.load(heads.sinks + head, mask=head < heads.H, other=NONE) * LOG2E
        top = finite_of(gl.maximum(new, sink))
        shrink = gl.exp2(new - top)
        total = total * shrink + gl.exp2(sink - top)
    shrink = shrink / gl.where(total == 0.0, 1.0, total)
    factor = gl.expand_dims(factor * shrink * LIFT, 0)
    other_factor = gl.expand_dims(other_factor * shrink, 0)
    other = tile_of(buffers.sums_left, 0).permute((1, 0)).load(_PRODUCT).to(gl.float32)
    left = (left * factor + other * other_factor).to(gl.bfloat16)
    other = tile_of(buffers.sums_right, 0).permute((1, 0)).load(_PRODUCT).to(gl.float32)
    right = (right * factor + other * other_factor).to(gl.bfloat16)
    both = gl.reshape(gl.join(left, right), [2, 2, 4, 2, 8, _N, 2])  # word, two latents, w, latent, g, head, half
    both = gl.reshape(gl.permute(both, (5, 2, 4, 6, 0, 1, 3)), [_N, LATENT])
    both = gl.convert_layout(both, _LOAD_QUERIES)
    head = gl.expand_dims(gl.arange(0, _N, layout=gl.SliceLayout(1, _LOAD_QUERIES)), 1)
    column = gl.expand_dims(gl.arange(0, LATENT, layout=gl.SliceLayout(0, _LOAD_QUERIES)), 0)
    begin = tensors.out + part.to(gl.int64) * tensors.out_row
    gl.store(begin + (head * tensors.out_head + column), both, mask=head < heads.H)


@gluon.jit
def _consume(tensors, heads, rows, ntiles, unit, buffers, barriers, stages, CONSUMER: gl.constexpr):
    """Every other block of a tile; the first consumer also fetches queries, merges and writes."""
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    if CONSUMER == 0:
        _fetch_queries(tensors, heads, rows, first, buffers, barriers)
    begin = 0
    parity = 0
    for tile in range(first, ntiles, hop):
        n, _offset = lanes_of_tile(rows, tile, False, 2 * KEYS)
        left = gl.zeros([HALF, _N], gl.float32, layout=_PRODUCT)
        right = gl.zeros([HALF, _N], gl.float32, layout=_PRODUCT)
        total = gl.zeros([KEYS, _N], gl.float32, layout=_PRODUCT)
        maximum = gl.full([_N], NONE, gl.float32, layout=gl.SliceLayout(0, _PRODUCT))
        mbarrier.wait(barriers.q_full, parity)
        steps = steps_of(n, 2 * KEYS)
        # begin must not stand in the range: Triton 3.6 takes what only bounds an inner loop for dead, and keeps it at 0
        for i in range(steps):
            count = 2 * (begin + i) + CONSUMER
            left, right, total, maximum = _block(left, right, total, maximum, count, buffers, stages, unit, CONSUMER)
        begin += steps
        total = gl.sum(total, axis=0)
        if CONSUMER == 1:
            mbarrier.wait(barriers.sums_empty, parity ^ 1)
            tile_of(buffers.sums_left, 0).permute((1, 0)).store((left * LIFT).to(gl.bfloat16))
            tile_of(buffers.sums_right, 0).permute((1, 0)).store((right * LIFT).to(gl.bfloat16))
            buffers.maximum.store(maximum)
            buffers.total.store(total)
            mbarrier.arrive(barriers.sums_full, count=1)
        else:
            mbarrier.wait(barriers.sums_full, parity)
            if tile + hop < ntiles:  # both consumers are past their last scores
                _fetch_queries(tensors, heads, rows, tile + hop, buffers, barriers)
            _write(left, right, total, maximum, tensors, heads, rows, tile, buffers)
            mbarrier.arrive(barriers.sums_empty, count=1)
        parity ^= 1


@gluon.jit(do_not_specialize=["lse_row", "lse_head", "width", "pages", "number", "splits", "H", "ntiles"])
def _attend(
    q_latent,  # bf16 [T, H, 512], last dim dense
    q_rope,  # bf16 [T, H, 64], last dim dense
    out,  # bf16 [S T, H, 512], last dim dense
    pool,  # uint8 [P, 64, 656] as int32
    ids,  # int32 [T, K] slots, or [B, maxP] page table when PAGED
    count,
    req_of_row,
    sinks,  # fp32 [H] or None
    lse,  # fp32 [S T, H]
    scale,
    q_row,
    q_head,
    q_rope_row,
    q_rope_head,
    out_row,
    out_head,
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
    stages = allocate_stages(_STAGES)
    buffers = _Buffers(
        q_latent=gl.allocate_shared_memory(gl.bfloat16, [1, 1, _N, LATENT], _QUERIES),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, 1, _N, ROPE], _QUERIES),
        weights=gl.allocate_shared_memory(gl.bfloat16, [2, _N, KEYS], _TILE),
        sums_left=gl.allocate_shared_memory(gl.bfloat16, [1, 1, _N, HALF], _QUERIES),
        sums_right=gl.allocate_shared_memory(gl.bfloat16, [1, 1, _N, HALF], _QUERIES),
        maximum=gl.allocate_shared_memory(gl.float32, [_N], _VECTOR),
        total=gl.allocate_shared_memory(gl.float32, [_N], _VECTOR),
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = _Barriers(
        q_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        sums_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        sums_empty=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    mbarrier.init(barriers.q_full, count=1)
    mbarrier.init(barriers.sums_full, count=1)
    mbarrier.init(barriers.sums_empty, count=1)
    fence_async_shared()
    rows = Rows(ids, ids_row, width, count, req_of_row, pages, number, splits, 1)
    heads = Heads(H, q_rope, q_rope_row, q_rope_head, None, sinks, lse, lse_row, lse_head)
    tensors = _Tensors(q_latent, q_row, q_head, out, out_row, out_head)
    unit = scale * LOG2E * LIFT
    gl.warp_specialize(
        [
            (_consume, (tensors, heads, rows, ntiles, unit, buffers, barriers, stages, 0)),
            (_consume, (tensors, heads, rows, ntiles, unit, buffers, barriers, stages, 1)),
            (produce_raw, (pool, rows, ntiles, stages, PAGED)),
        ],
        [4, 4],
        [_REGISTERS[0], _REGISTERS[1]],
    )


def launch(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse: Tensor, width: int, sides: int
) -> None:
    """As ``sparse_mla_gluon.launch``, of an fp8 pool and at most 16 heads; ``out`` is bf16, and ``sides`` 2."""
    T, H, _ = q_latent.shape
    splits = out.shape[0] if out.dim() == 4 else 1
    out = out.flatten(0, -3)
    ids = page_table if topk is None else topk
    tiles = T * splits
    _attend[(min(multiprocessors(pool.device), tiles),)](
        q_latent,
        q_rope,
        out,
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
        out.stride(0),
        out.stride(1),
        ids.stride(0),
        *lse.stride()[-2:],
        width,
        pool.shape[0],
        T,
        splits,
        H,
        tiles,
        PAGED=topk is None,
        EARLY=splits > 1,
        num_warps=4,
    )

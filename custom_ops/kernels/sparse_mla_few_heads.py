"""Absorbed sparse attention of up to 32 heads over an fp8 pool on Hopper, in Gluon: L = 512, R = 64.

wgmma has 64 rows or none, so the kernel of more heads pads. Here the operands are swapped: keys, then latents, are the
rows of all products, and heads their columns: scores^T = K Q^T, out^T = V^T weights^T. The left operands come from
registers (sparse_mla_fragments): a producer copies rows of the pool as they are into two stages of 128 keys, and eight
warps convert codes on their way from shared memory into products, while the product before is under way. So a stage is
half as large as a converted one, and no converted key passes through shared memory. (With 64 heads, sums and fragments
fill the registers: 128 rows of 128 heads took 187 us on an H200 at best, sparse_mla_gluon 193.)

Scores are products of fp16: codes times their scale relative to the largest of their key, and queries relative to the
largest of their head, rope included, both by powers of two that scores are multiplied with afterwards. fp16 has 3 bits
more than bf16, but not its range: codes times relative scales lose bits below 2^-14, queries below 2^-28 of the
largest. The largest scale of a key may be 2^-57 and more, as in sparse_mla_dequantise, the largest query of a head
2^-63 and more.

Weights are relative to a reference of each head that is the largest score only at first. It rises when a score lies 60
above it (in units of log2), which bf16 weights and fp32 sums bear: nearly always nothing that was summed is rescaled,
and the maxima of the heads are not taken.

Legend: T rows, H heads, N heads of a tile, 16 or 32, S splits. A step is 128 keys, a part 16 of them.
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
from compiled_dsa.custom_ops.kernels.gluon_names import reinterpret, thread_barrier, tma_store
from compiled_dsa.custom_ops.kernels.sparse_mla_consume import Heads
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT
from compiled_dsa.custom_ops.kernels.sparse_mla_fragments import (
    CODES,
    GROUPS,
    PART,
    PARTS,
    SCALES,
    STEP,
    WORDS,
    Buffers,
    codes_of_stages,
    exponent_of,
    in_order_of_keys_operands,
    keys_operand,
    latents_operand,
    outputs_of_sums,
    power_of_keys,
    produce_raw,
    scales_of_stages,
    words_of_group,
    words_of_part,
)
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
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
)
from compiled_dsa.custom_ops.kernels.sparse_mla_hopper import FEW_HEADS

_FEWEST = 16  # heads of a tile: products have as many columns at least
_REGISTERS = gl.constexpr(40)  # of a thread of the producer; of the eight warps: half of what it leaves of 504
_RISE = gl.constexpr(60.0)
_LOWEST = gl.constexpr(-1e30)  # a reference before any score: all others lie higher by more than 60

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

_LOAD_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_LOAD_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_HEADS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_EACH = gl.constexpr(  # every thread has all of 8
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]], lane_bases=[[0]] * 5, warp_bases=[[0]] * 3, block_bases=[], shape=[8]
    )
)


class _Tensors(NamedTuple):
    q: gl.tensor  # bf16 [T, H, 512]
    q_row: gl.tensor  # strides
    q_head: gl.tensor


@gluon.jit
def _score(stage, varying, buffers, PRODUCT: gl.constexpr):
    """Scores [128, N] of a step, without their units."""
    N: gl.constexpr = buffers.weights.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    q_latent = tile_of(buffers.q_latent, varying)
    codes, scales = codes_of_stages(buffers).index(stage), scales_of_stages(buffers).index(stage)
    power, inverse = power_of_keys(scales)
    scores = gl.zeros([STEP, N], gl.float32, layout=PRODUCT)
    first, second, factor = words_of_group(codes, scales, inverse, 0)
    keys = keys_operand(first, factor, PRODUCT)
    # Each wait lets one product go on, and what it returns is read only after it: so operands of the next product are
    # made during the last one, in the registers of the one before. Accumulators under way must not pass through it.
    for i in gl.static_range(GROUPS):
        part = q_latent.slice(i * 4 * WORDS, 2 * WORDS, dim=1).permute((1, 0))
        scores = warpgroup_mma(keys, part, scores, use_acc=i > 0, is_async=True)
        if i > 0:
            second = warpgroup_mma_wait(1, deps=[second])
        keys = keys_operand(second, factor, PRODUCT)
        part = q_latent.slice(i * 4 * WORDS + 2 * WORDS, 2 * WORDS, dim=1).permute((1, 0))
        if i < GROUPS - 1:
            first, second, factor = words_of_group(codes, scales, inverse, i + 1)
        scores = warpgroup_mma(keys, part, scores, is_async=True)
        if i < GROUPS - 1:
            first = warpgroup_mma_wait(1, deps=[first])
            keys = keys_operand(first, factor, PRODUCT)
    mbarrier.wait(buffers.rope_full, stage)
    inverse = warpgroup_mma_wait(1, deps=[inverse])
    inverse = gl.convert_layout(inverse.to(gl.bfloat16), gl.SliceLayout(1, OPERAND))
    rope = buffers.rope.load(OPERAND) * gl.expand_dims(inverse, 1)
    scores = warpgroup_mma(rope, buffers.q_rope.index(varying).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    return scores * gl.expand_dims(gl.convert_layout(power, gl.SliceLayout(1, PRODUCT)), 1)


@gluon.jit
def _of_threads(weights):
    """[8, 8, N]: sums of weights [128, N] over the keys that a thread has."""
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.reshape(weights, [8, 2, 8, N]), axis=1)


@gluon.jit
def _step(acc, total, count, buffers, zero, PRODUCT: gl.constexpr):
    """(sums [512, N] with those of a step, what threads have of the sums of its weights).

    Args:
        zero: 0 at run time, so that the descriptors of queries are not kept in registers.
    """
    N: gl.constexpr = buffers.weights.shape[0]
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    stage = count & 1
    mbarrier.wait(buffers.full.index(stage), count >> 1 & 1)
    scores = _score(stage, count * zero, buffers, PRODUCT)
    bound = gl.expand_dims(buffers.bound.index(stage).load(gl.SliceLayout(1, PRODUCT)), 1)
    above = scores * gl.expand_dims(buffers.unit.load(COLUMN), 0) - gl.expand_dims(buffers.reference.load(COLUMN), 0)
    # the smaller of NaN and -inf is -inf: lanes without token weigh nothing whatever the query of a padding row holds
    above = gl.minimum(above, bound)
    buffers.highest.store(gl.max(gl.max(gl.reshape(above, [8, 16, N]), axis=2), axis=1))
    p = gl.exp2(above)
    buffers.weights.permute((1, 0)).store(p.to(gl.bfloat16))
    fence_async_shared()
    added = _of_threads(p)
    part = PARTS * stage
    even, odd, factor = words_of_part(buffers.codes.index(part), buffers.scales.index(part))
    thread_barrier()
    if gl.max(buffers.highest.load(_EACH), axis=0) > _RISE:
        scores = gl.minimum(scores * gl.expand_dims(buffers.unit.load(COLUMN), 0), bound)
        reference = buffers.reference.load(COLUMN)
        risen = gl.maximum(reference, gl.max(scores, axis=0))
        shrink = gl.exp2(reference - risen)
        p = gl.exp2(scores - gl.expand_dims(risen, 0))
        added = _of_threads(p)
        acc = acc * gl.expand_dims(shrink, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))
        total = total * gl.expand_dims(gl.expand_dims(shrink, 0), 1)
        buffers.reference.store(risen)
        buffers.weights.permute((1, 0)).store(p.to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
    total += added
    latents = latents_operand(even, odd, factor, PRODUCT)
    for i in gl.static_range(PARTS):  # as in _score
        if i < PARTS - 1:
            even, odd, factor = words_of_part(buffers.codes.index(part + i + 1), buffers.scales.index(part + i + 1))
        weights = buffers.weights.slice(i * PART, PART, dim=1).permute((1, 0))
        acc = warpgroup_mma(latents, weights, acc, is_async=True)
        if i < PARTS - 1:
            if i > 0:
                even = warpgroup_mma_wait(1, deps=[even])
            latents = latents_operand(even, odd, factor, PRODUCT)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(buffers.empty.index(stage), count=1)
    return acc, total


@gluon.jit
def _fetch_queries(tensors, heads, rows, tile, unit, buffers):
    """Queries of a tile, once the output of the last one, which is in their place, is written."""
    N: gl.constexpr = buffers.weights.shape[0]
    LATENT_ROWS: gl.constexpr = gl.SliceLayout(1, _LOAD_QUERIES)
    ROPE_ROWS: gl.constexpr = gl.SliceLayout(1, _LOAD_ROPE)
    row, _split, head0 = place_of_tile(rows, tile)
    head = head0 + gl.expand_dims(gl.arange(0, N, layout=LATENT_ROWS), 1)
    column = gl.expand_dims(gl.arange(0, LATENT, layout=gl.SliceLayout(0, _LOAD_QUERIES)), 0)
    begin = tensors.q + row.to(gl.int64) * tensors.q_row
    q = gl.load(begin + (head.to(gl.int64) * tensors.q_head + column), mask=head < heads.H, other=0.0)
    head = head0 + gl.expand_dims(gl.arange(0, N, layout=ROPE_ROWS), 1)
    column = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, _LOAD_ROPE)), 0)
    begin = heads.q_rope + row.to(gl.int64) * heads.q_rope_row
    rope = gl.load(begin + (head.to(gl.int64) * heads.q_rope_head + column), mask=head < heads.H, other=0.0)
    tma.store_wait(0)
    thread_barrier()
    q = q.to(gl.float32)
    rope = rope.to(gl.float32)
    largest = gl.convert_layout(gl.max(gl.abs(rope), axis=1), LATENT_ROWS)
    exponent = exponent_of(gl.maximum(gl.max(gl.abs(q), axis=1), largest), 64, 255)  # biased: from 2^-63 on
    inverse = ((252 << 23) - (exponent - (16 << 23))).to(gl.float32, bitcast=True)  # the largest is then near 2^14
    buffers.unit.store((exponent - (14 << 23)).to(gl.float32, bitcast=True) * unit)
    buffers.reference.store(gl.full([N], _LOWEST, gl.float32, layout=LATENT_ROWS))
    q = (q * gl.expand_dims(inverse, 1)).to(gl.float16)
    tile_of(buffers.q_latent, 0).store(in_order_of_keys_operands(q))
    rope = rope * gl.expand_dims(gl.convert_layout(inverse, ROPE_ROWS), 1)
    buffers.q_rope.index(0).store(rope.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _write(acc, total, heads, rows, tile, buffers, PRODUCT: gl.constexpr):
    """The output of a tile, whose copy out is then under way, and its log-sum-exp."""
    N: gl.constexpr = buffers.weights.shape[0]
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    row, split, head0 = place_of_tile(rows, tile)
    part = split * rows.number + row
    total = gl.convert_layout(gl.sum(gl.sum(total, axis=1), axis=0), COLUMN)
    reference = buffers.reference.load(COLUMN)
    log_sum = gl.where(total == 0.0, NONE, (reference + gl.log2(total)) * LN2)
    head = head0 + gl.arange(0, N, layout=_HEADS)
    where = heads.lse + part.to(gl.int64) * heads.lse_row + head * heads.lse_head
    gl.store(where, gl.convert_layout(log_sum, _HEADS), mask=head < heads.H)
    factor = gl.full([N], 1.0, gl.float32, layout=COLUMN)
    if heads.sinks is not None:
        head = head0 + gl.arange(0, N, layout=COLUMN)
        sink = gl.load(heads.sinks + head, mask=head < heads.H, other=NONE) * LOG2E
        top = finite_of(gl.maximum(reference, sink))
        factor = gl.exp2(reference - top)
        total = total * factor + gl.exp2(sink - top)
    factor = factor * LIFT / gl.where(total == 0.0, 1.0, total)
    # all warps are past their last scores, so the output may take the place of the queries
    out = reinterpret(buffers.q_latent, gl.bfloat16, [1, 1, N, LATENT], _QUERIES)
    tile_of(out, 0).store(outputs_of_sums((acc * gl.expand_dims(factor, 0)).to(gl.bfloat16)))
    fence_async_shared()
    thread_barrier()
    tma_store(heads.o_desc, [part, head0, 0], out.index(0))


@gluon.jit
def _consume(tensors, heads, rows, ntiles, unit, zero, buffers, PAGED: gl.constexpr):
    N: gl.constexpr = buffers.weights.shape[0]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    begin = 0
    n, _offset = lanes_of_tile(rows, first, PAGED, STEP)
    _fetch_queries(tensors, heads, rows, first, unit, buffers)
    for tile in range(first, ntiles, hop):
        steps = steps_of(n, STEP)
        n, _offset = lanes_of_tile(rows, gl.minimum(tile + hop, ntiles - 1), PAGED, STEP)
        acc = gl.zeros([LATENT, N], gl.float32, layout=PRODUCT)
        total = _of_threads(gl.zeros([STEP, N], gl.float32, layout=PRODUCT))
        # begin must not stand in the range: Triton 3.6 takes what only bounds an inner loop for dead, and keeps it at 0
        for i in range(steps):
            acc, total = _step(acc, total, begin + i, buffers, zero, PRODUCT)
        begin += steps
        _write(acc, total, heads, rows, tile, buffers, PRODUCT)
        if tile + hop < ntiles:
            _fetch_queries(tensors, heads, rows, tile + hop, unit, buffers)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["lse_row", "lse_head", "width", "pages", "number", "splits", "H", "ntiles", "zero"])
def _attend(
    q_latent,  # bf16 [T, H, 512], last dim dense
    q_rope,  # bf16 [T, H, 64], last dim dense
    o_desc,  # bf16 [S T, H, 512]
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
    EARLY: gl.constexpr,
    N: gl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()  # the programs that combine start and wait
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = Buffers(
        q_latent=gl.allocate_shared_memory(gl.float16, [1, 1, N, LATENT], _QUERIES),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, N, ROPE], _TILE),
        unit=gl.allocate_shared_memory(gl.float32, [N], _VECTOR),
        reference=gl.allocate_shared_memory(gl.float32, [N], _VECTOR),
        highest=gl.allocate_shared_memory(gl.float32, [8], _VECTOR),
        weights=gl.allocate_shared_memory(gl.bfloat16, [N, STEP], _TILE),
        codes=gl.allocate_shared_memory(gl.int32, [2 * PARTS, PART, GROUPS * WORDS], CODES),
        scales=gl.allocate_shared_memory(gl.float32, [2 * PARTS, PART, GROUPS], SCALES),
        rope=gl.allocate_shared_memory(gl.bfloat16, [STEP, ROPE], _TILE),
        bound=gl.allocate_shared_memory(gl.float32, [2, STEP], _VECTOR),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        rope_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for stage in gl.static_range(2):
        # each thread of the producer, as its copies arrive, and once for the bound
        mbarrier.init(buffers.full.index(stage), count=129)
        mbarrier.init(buffers.empty.index(stage), count=1)
    mbarrier.init(buffers.rope_full, count=128)
    fence_async_shared()
    rows = Rows(ids, ids_row, width, count, req_of_row, pages, number, splits, 1)
    heads = Heads(H, q_rope, q_rope_row, q_rope_head, o_desc, sinks, lse, lse_row, lse_head)
    tensors = _Tensors(q_latent, q_row, q_head)
    unit = scale * LOG2E
    gl.warp_specialize(
        [
            (_consume, (tensors, heads, rows, ntiles, unit, zero, buffers, PAGED)),
            (produce_raw, (pool, rows, ntiles, buffers, PAGED)),
        ],
        [4],
        [_REGISTERS],
    )


def launch(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse: Tensor, width: int, sides: int
) -> None:
    """As ``sparse_mla_gluon.launch``, of an fp8 pool and at most 32 heads; ``out`` is bf16, and ``sides`` 2."""
    T, H, _ = q_latent.shape
    splits = out.shape[0] if out.dim() == 4 else 1
    out = out.flatten(0, -3)
    ids = page_table if topk is None else topk
    tiles, N = T * splits, _FEWEST if H <= _FEWEST else FEW_HEADS
    _attend[(min(multiprocessors(pool.device), tiles),)](
        q_latent,
        q_rope,
        TensorDescriptor.from_tensor(out, [1, N, L], _QUERIES.value),
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
        *lse.stride()[-2:],
        width,
        pool.shape[0],
        T,
        splits,
        H,
        tiles,
        0,
        PAGED=topk is None,
        EARLY=splits > 1,
        N=N,
        num_warps=8,
    )

"""The consumers of sparse_mla_gluon: scores, softmax and sums of a tile, each into its own half of the output.

Legend: T rows, H heads, S splits of a row. A tile is 64 heads of one split of one row.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from compiled_dsa.custom_ops.kernels.common import LN2, LOG2E
from compiled_dsa.custom_ops.kernels.gluon_names import thread_barrier, tma_store
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT, fetch
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    HALF,
    KEYS,
    NONE,
    ROPE,
    TILE_HEADS,
    L,
    finite_of,
    lanes_of_tile,
    place_of_tile,
    slots_of_lanes,
    steps_of,
    tile_of,
)
from compiled_dsa.custom_ops.layout import PAGE

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L // 2, 16]))

# Steps between the one that is attended and the one whose rows the L2 cache fetches; the producer is one ahead itself.
_AHEAD = gl.constexpr(2)
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Heads(NamedTuple):
    """What a consumer reads and writes of each head."""

    H: gl.tensor
    q_rope: gl.tensor  # bf16 [T, H, 64]
    q_rope_row: gl.tensor  # stride
    q_rope_head: gl.tensor
    o_desc: tma.tensor_descriptor  # bf16 [S T, H, 512]
    sinks: gl.tensor | None  # fp32 [H]
    lse: gl.tensor | None  # fp32 [S T, H]
    lse_row: gl.tensor  # stride
    lse_head: gl.tensor


@gluon.jit
def _score_left(scores, stage, varying, phase, buffers, barriers, SIDE: gl.constexpr):
    mbarrier.wait(barriers.left_full.index(SIDE), phase)
    fence_async_shared()
    keys = buffers.k_left.index(stage).permute((1, 0))
    return warpgroup_mma(tile_of(buffers.q_left, varying), keys, scores, use_acc=False, is_async=True)


@gluon.jit
def _score_right(scores, stage, varying, phase, q_rope, buffers, barriers, SIDE: gl.constexpr):
    mbarrier.wait(barriers.right_full.index(SIDE), phase)
    fence_async_shared()
    keys = buffers.k_right.index(stage).permute((1, 0))
    scores = warpgroup_mma(tile_of(buffers.q_right, varying), keys, scores, is_async=True)
    if q_rope is None:
        mbarrier.wait(barriers.rope_full.index(SIDE), phase)
        fence_async_shared()
        q_rope = tile_of(buffers.q_rope, varying)
    return warpgroup_mma(q_rope, buffers.k_rope.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _exponentiate(scores, maximum, buffers, barriers, unit, SIDE: gl.constexpr):
    """(weights, also in bf16, factor of earlier sums, new maximum, what was subtracted) of a block, now published."""
    # the smaller of NaN and -inf is -inf: lanes without token weigh nothing whatever the query of a padding row holds
    bound = buffers.bound.index(SIDE).load(gl.SliceLayout(0, _SCORES))
    scores = gl.minimum(scores, gl.expand_dims(bound, 0))
    new = gl.maximum(maximum, gl.max(scores, axis=1) * unit)
    finite = finite_of(new)
    shrink = gl.exp2(maximum - finite)
    p = gl.exp2(scores * unit - gl.expand_dims(finite, 1))
    weights = p.to(gl.bfloat16)
    thread_barrier()  # no warp still scores this block's rope, whose place the weights take
    buffers.k_rope.index(SIDE).store(weights)
    buffers.shrink.index(SIDE).store(shrink)
    buffers.maximum.index(SIDE).store(new)
    fence_async_shared()
    mbarrier.arrive(barriers.weights_full.index(SIDE), count=1)
    return p, weights, shrink, new, finite


@gluon.jit
def _sum_other(acc, stage, phase, values, buffers, barriers, OTHER: gl.constexpr):
    """(sums with the other's block under way, the running maximum after it)."""
    mbarrier.wait(barriers.weights_full.index(OTHER), phase)
    shrink = buffers.shrink.index(OTHER).load(gl.SliceLayout(1, _OUT))
    maximum = buffers.maximum.index(OTHER).load(gl.SliceLayout(1, _SCORES))
    acc = acc * gl.expand_dims(shrink, 1)
    return warpgroup_mma(buffers.k_rope.index(stage), values.index(stage), acc, is_async=True), maximum


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
    p, weights, shrink, new, finite = _exponentiate(scores, maximum, buffers, barriers, unit, SIDE)
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
def _only_step(acc, total, step, q_rope, buffers, barriers, unit, zero, SIDE: gl.constexpr):
    """A tile of one block: the left consumer scores it, both sum it. As _step, with the maximum of the block."""
    phase = step & 1
    varying = step * zero
    maximum = gl.full([TILE_HEADS], NONE, gl.float32, layout=gl.SliceLayout(1, _SCORES))
    if SIDE == 0:
        scores = gl.zeros([TILE_HEADS, KEYS], gl.float32, layout=_SCORES)
        scores = _score_left(scores, varying, varying, phase, buffers, barriers, 0)
        scores = _score_right(scores, varying, varying, phase, q_rope, buffers, barriers, 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        p, weights, _, maximum, _ = _exponentiate(scores, maximum, buffers, barriers, unit, 0)
        total = gl.sum(p, axis=1)
        weights = gl.convert_layout(weights, gl.DotOperandLayout(0, _OUT, 2))
        acc = warpgroup_mma(weights, buffers.k_left.index(varying), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(barriers.left_empty.index(0), count=1)
    else:
        acc, maximum = _sum_other(acc, varying, phase, buffers.k_right, buffers, barriers, 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(barriers.right_empty.index(0), count=1)
    return acc, total, maximum


@gluon.jit
def _write(acc, total, maximum, heads, rows, tile, buffers, barriers, SIDE: gl.constexpr):
    """The tile's half of the output, and its log-sum-exp."""
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, _OUT)
    row, split, head0 = place_of_tile(rows, tile)
    part = split * rows.number + row
    maximum = gl.convert_layout(maximum, OUT_ROW)
    head = head0 + gl.arange(0, TILE_HEADS, layout=OUT_ROW)
    if heads.lse is not None and SIDE == 1:
        log_sum = gl.where(total == 0.0, NONE, (maximum + gl.log2(total)) * LN2)
        where = heads.lse + part.to(gl.int64) * heads.lse_row + head * heads.lse_head
        gl.store(where, log_sum, mask=head < heads.H)
    factor = gl.full([TILE_HEADS], 1.0, gl.float32, layout=OUT_ROW)
    if heads.sinks is not None:
        sink = gl.load(heads.sinks + head, mask=head < heads.H, other=NONE) * LOG2E
        top = finite_of(gl.maximum(maximum, sink))
        factor = gl.exp2(maximum - top)
        total = total * factor + gl.exp2(sink - top)
    factor = factor / gl.where(total == 0.0, 1.0, total)
    if buffers.q_rope is not None:
        factor = factor * LIFT
    # both consumers are past their last scores, so the output may take the place of the queries
    stage = buffers.q_left if SIDE == 0 else buffers.q_right
    tile_of(stage, 0).store((acc * gl.expand_dims(factor, 1)).to(gl.bfloat16))
    fence_async_shared()
    tma_store(heads.o_desc, [part, head0, SIDE * HALF], stage.index(0))
    tma.store_wait(0)
    mbarrier.arrive(barriers.q_empty, count=1)


@gluon.jit
def _slots_of_step(rows, offset, step, n, PAGED: gl.constexpr):
    return slots_of_lanes(rows, offset, step * (2 * KEYS) + gl.arange(0, 2 * KEYS, layout=_LANES), n, PAGED)


@gluon.jit
def consume(
    heads, pool, rows, ntiles, unit, zero, buffers, barriers, PAGED: gl.constexpr, SIDE: gl.constexpr,
    SIDES: gl.constexpr,
):  # fmt: skip
    STEP: gl.constexpr = SIDES * KEYS
    # the left consumer waits longest for the other; the producer has no instructions to spare
    FETCHES: gl.constexpr = buffers.q_rope is not None and SIDES == 2 and SIDE == 0
    ROW: gl.constexpr = gl.SliceLayout(1, _SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, _OUT)
    Q_ROPE: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    rope_head = gl.expand_dims(gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, Q_ROPE)), 1)
    rope_column = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, Q_ROPE)), 0)
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    n, offset = lanes_of_tile(rows, first, PAGED, STEP)
    begin = 0
    parity = 0
    for tile in range(first, ntiles, hop):
        steps = steps_of(n, STEP)
        if FETCHES:
            lanes, ids = n, offset
            far = _slots_of_step(rows, ids, _AHEAD, lanes, PAGED)
        n, offset = lanes_of_tile(rows, gl.minimum(tile + hop, ntiles - 1), PAGED, STEP)
        if buffers.q_rope is not None:
            q_rope: gl.constexpr = None
        else:
            row, _split, head0 = place_of_tile(rows, tile)
            head = head0 + rope_head
            rope = heads.q_rope + row.to(gl.int64) * heads.q_rope_row
            q_rope = gl.load(rope + (head * heads.q_rope_head + rope_column), mask=head < heads.H, other=0.0)
        mbarrier.wait(barriers.q_full, parity)
        acc = gl.zeros([TILE_HEADS, HALF], gl.float32, layout=_OUT)
        total = gl.zeros([TILE_HEADS], gl.float32, layout=ROW)
        if SIDES == 1:
            acc, total, maximum = _only_step(acc, total, begin, q_rope, buffers, barriers, unit, zero, SIDE)
            begin += 1
        else:
            maximum = gl.full([TILE_HEADS], NONE, gl.float32, layout=ROW)
            if FETCHES:
                fetch(pool, far)
                far = _slots_of_step(rows, ids, _AHEAD + 1, lanes, PAGED)  # read a step before they are needed
            # the first step is peeled: with it in the loop, ptxas puts a wait before every multiplication of the sums
            acc, total, maximum = _step(acc, total, maximum, begin, q_rope, buffers, barriers, unit, zero, SIDE, True)
            for step in range(begin + 1, begin + steps):
                if FETCHES:
                    fetch(pool, far)
                    far = _slots_of_step(rows, ids, step - begin + _AHEAD + 1, lanes, PAGED)
                acc, total, maximum = _step(
                    acc, total, maximum, step, q_rope, buffers, barriers, unit, zero, SIDE, False
                )
            begin += steps
            if SIDE == 0:
                # the right consumer's last block
                mbarrier.wait(barriers.weights_full.index(1), (begin - 1) & 1)
                acc = acc * gl.expand_dims(buffers.shrink.index(1).load(OUT_ROW), 1)
                acc = warpgroup_mma(buffers.k_rope.index(1), buffers.k_left.index(1), acc, is_async=True)
                new = buffers.maximum.index(1).load(ROW)
                total = total * gl.exp2(maximum - finite_of(new))
                maximum = new
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(barriers.left_empty.index(1), count=1)
        buffers.total.index(SIDE).store(total)
        mbarrier.arrive(barriers.total_full, count=1)
        mbarrier.wait(barriers.total_full, parity)
        total = buffers.total.index(0).load(OUT_ROW) + buffers.total.index(1).load(OUT_ROW)
        _write(acc, total, maximum, heads, rows, tile, buffers, barriers, SIDE)
        parity ^= 1

"""The producer of sparse_mla_gluon, which gathers latents into shared memory, and what it shares with the consumers.

Legend: T rows, H heads, K lanes of the selection, B requests, S splits of a row. A tile is 64 heads of one split of
one row, or all of up to 32. Pools of fp8 have producers of their own: sparse_mla_dequantise, sparse_mla_fragments.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from compiled_dsa.custom_ops.kernels.gluon_names import copy, tma_load
from compiled_dsa.custom_ops.kernels.sparse_mla_hopper import DIMS, HEADS
from compiled_dsa.custom_ops.layout import PAGE

L, R = DIMS

LATENT = gl.constexpr(L)
HALF = gl.constexpr(L // 2)
ROPE = gl.constexpr(R)
TILE_HEADS = gl.constexpr(HEADS)
KEYS = gl.constexpr(PAGE)  # of a block; one of a request's own positions is then one page
NONE = gl.constexpr(float("-inf"))

# A thread copies 16 bytes of 4 keys, 64 columns apart.
_GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_GATHER_ROWS = gl.constexpr(gl.SliceLayout(1, _GATHER))


class Buffers(NamedTuple):
    """Shared memory, 219 of 227 KiB over an fp8 pool. The first dim of those of two is the stage: block modulo 2.

    Queries of rope lie in registers where a pool is bf16; where it is fp8 the producer needs these, to hold codes.
    """

    q_left: gl.shared_memory_descriptor  # bf16 [1, 1, 64, 256]; holds the output of the left half at the end of a tile
    q_right: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor | None  # bf16 [1, 1, 64, 64]
    k_left: gl.shared_memory_descriptor  # bf16 [2, 64, 256]
    k_right: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor  # bf16 [2, 64, 64]; the weights of a block take the place of its scored rope
    bound: gl.shared_memory_descriptor  # fp32 [2, 64]: scores are cut to it, -inf for a lane without token, else inf
    shrink: gl.shared_memory_descriptor  # fp32 [2, 64]: factor of everything summed before the block
    maximum: gl.shared_memory_descriptor  # fp32 [2, 64]: of the scores up to the block, in units of log2
    total: gl.shared_memory_descriptor  # fp32 [2, 64]: sum of the weights of the blocks of each consumer


class Barriers(NamedTuple):
    """``full``: written, may be read; ``empty``: read, may be written. By stage, except those of q and total.

    What a block's writer publishes, weights included, needs no ``empty``: it has just scored the stage, which was
    refilled only after the other consumer had summed the block before. Rope and the weights in its place need none
    either: a producer writes rope once both halves are free, and a consumer frees a half once it has read the weights.
    """

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    total_full: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor  # also of k_rope and bound of a bf16 pool
    left_empty: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor  # also of shrink and maximum
    rope_full: gl.shared_memory_descriptor  # of k_rope and bound of an fp8 pool


class Rows(NamedTuple):
    """What says which keys a row attends."""

    ids: gl.tensor  # int32 [T, K] slots, or the page table when PAGED
    stride: gl.tensor  # of a row of ids
    width: gl.tensor  # lanes of a row
    count: gl.tensor  # int32 [T]
    req_of_row: gl.tensor  # int32 [T], read when PAGED
    pages: gl.tensor  # of the pool
    number: gl.tensor  # T
    splits: gl.tensor  # S
    head_blocks: gl.tensor


@gluon.jit
def finite_of(maximum):
    """The value to subtract before exponentiating: 0 where nothing was seen, so that exp2(-inf - x) is 0, not NaN."""
    return gl.where(maximum == NONE, 0.0, maximum)


@gluon.jit
def place_of_tile(rows, tile):
    """(row, split, first head) of a tile. The head blocks of a split are neighbours: they read the same latents."""
    part = tile // rows.head_blocks
    return part // rows.splits, part % rows.splits, tile % rows.head_blocks * TILE_HEADS


@gluon.jit
def lanes_of_tile(rows, tile, PAGED: gl.constexpr, STEP: gl.constexpr):
    """(valid lanes, offset of their ids) of a tile. The splits of a row share its own valid lanes, in steps of STEP."""
    row, split, _head = place_of_tile(rows, tile)
    n = gl.minimum(gl.load(rows.count + row), rows.width)
    share = ((n + STEP - 1) // STEP + rows.splits - 1) // rows.splits * STEP
    begin = split * share
    n = gl.minimum(n - begin, share)
    if PAGED:
        row = gl.load(rows.req_of_row + row)
        begin = begin // KEYS
    return n, row.to(gl.int64) * rows.stride + begin


@gluon.jit
def steps_of(n, STEP: gl.constexpr):
    """Steps of a tile. One with nothing to attend takes one, of zeros: roles then need no special case."""
    return gl.maximum((n + STEP - 1) // STEP, 1)


@gluon.jit
def slots_of_lanes(rows, offset, lane, n, PAGED: gl.constexpr):
    """int32 slots of lanes of a tile, -1 for those past ``n`` and for ids outside the pool."""
    if PAGED:
        page = gl.load(rows.ids + offset + (lane >> 6), mask=lane < n, other=-1)
        slot = (page << 6) + (lane & 63)
        inside = (page >= 0) & (page < rows.pages)
    else:
        slot = gl.load(rows.ids + offset + lane, mask=lane < n, other=-1)
        inside = (slot >= 0) & ((slot >> 6) < rows.pages)
    return gl.where(inside, slot, -1)


@gluon.jit
def slots_of_block(rows, offset, block, n, PAGED: gl.constexpr, LAYOUT: gl.constexpr):
    """As slots_of_lanes, of the 64 lanes of a block."""
    return slots_of_lanes(rows, offset, block * KEYS + gl.arange(0, KEYS, layout=LAYOUT), n, PAGED)


@gluon.jit
def _gather_left(stage, phase, keys, there, buffers, barriers):
    """Latents [0, 256) of a block. ``keys`` are addresses [64, 1]; a copy of all columns at once needs no barrier
    between its parts, and their offsets are immediates."""
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, _GATHER)), 0)
    mbarrier.wait(barriers.left_empty.index(stage), phase)
    copy(buffers.k_left.index(stage), keys + column, mask=there)
    async_copy.mbarrier_arrive(barriers.left_full.index(stage), increment_count=False)


@gluon.jit
def _gather_right(stage, phase, keys, there, bound, buffers, barriers):
    """Latents [256, 512) and rope of a block, and which of its lanes count."""
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, _GATHER)), 0)
    rope_column = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, _GATHER)), 0)
    mbarrier.wait(barriers.right_empty.index(stage), phase)
    copy(buffers.k_right.index(stage), keys + (HALF + column), mask=there)
    copy(buffers.k_rope.index(stage), keys + (LATENT + rope_column), mask=there)
    async_copy.mbarrier_arrive(barriers.right_full.index(stage), increment_count=False)
    buffers.bound.index(stage).store(bound)
    mbarrier.arrive(barriers.right_full.index(stage), count=1)


@gluon.jit
def tile_of(queries, varying):
    """[heads, columns] of a buffer of queries, which the copy engine fills in three dims."""
    tile = queries.index(varying)
    return tile.reshape([tile.shape[1], tile.shape[2]])


@gluon.jit
def fetch_queries(q_desc, rows, tile, parity, buffers, barriers):
    """The queries' latents follow the first blocks: until the last tile is written, they hold its output."""
    row, _split, head = place_of_tile(rows, tile)
    mbarrier.wait(barriers.q_empty, parity ^ 1)
    mbarrier.expect(barriers.q_full, TILE_HEADS * LATENT * 2)
    tma_load(q_desc, [row, head, 0], barriers.q_full, buffers.q_left.index(0))
    tma_load(q_desc, [row, head, HALF], barriers.q_full, buffers.q_right.index(0))


@gluon.jit
def produce(q_desc, pool, rows, ntiles, buffers, barriers, PAGED: gl.constexpr, SIDES: gl.constexpr):
    STEP: gl.constexpr = SIDES * KEYS
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    n, offset = lanes_of_tile(rows, first, PAGED, STEP)
    slots = slots_of_block(rows, offset, 0, n, PAGED, _GATHER_ROWS)
    phase = 1
    parity = 0
    for tile in range(first, ntiles, hop):
        next_n, next_offset = lanes_of_tile(rows, gl.minimum(tile + hop, ntiles - 1), PAGED, STEP)
        steps = steps_of(n, STEP)
        for step in range(steps):
            for side in gl.static_range(SIDES):
                there = slots >= 0
                keys = pool + gl.expand_dims(gl.where(there, slots, 0).to(gl.int64) * (LATENT + ROPE), 1)
                bound = gl.where(there, float("inf"), NONE)
                there = gl.expand_dims(there, 1)
                # ids are read a block ahead, also across tiles
                if side + 1 < SIDES:
                    slots = slots_of_block(rows, offset, 2 * step + 1, n, PAGED, _GATHER_ROWS)
                else:
                    last = step == steps - 1
                    ahead = gl.where(last, 0, SIDES * (step + 1))
                    ids = gl.where(last, next_offset, offset)
                    slots = slots_of_block(rows, ids, ahead, gl.where(last, next_n, n), PAGED, _GATHER_ROWS)
                _gather_left(side, phase, keys, there, buffers, barriers)
                _gather_right(side, phase, keys, there, bound, buffers, barriers)
            if step == 0:
                fetch_queries(q_desc, rows, tile, parity, buffers, barriers)
            phase ^= 1
        n = next_n
        offset = next_offset
        parity ^= 1
    async_copy.wait_group(0)

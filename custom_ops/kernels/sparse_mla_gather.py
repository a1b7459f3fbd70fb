"""The producer of sparse_mla_gluon, which gathers latents into shared memory, and what it shares with the consumers.

Legend: T rows, H heads, K lanes of the selection, B requests. A tile is one row and 64 of its heads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from compiled_dsa.custom_ops.layout import PAGE

L, R, HEADS = 512, 64, 64

LATENT = gl.constexpr(L)
HALF = gl.constexpr(L // 2)
ROPE = gl.constexpr(R)
TILE_HEADS = gl.constexpr(HEADS)
KEYS = gl.constexpr(PAGE)  # of a block; one of a request's own positions is then one page
NONE = gl.constexpr(float("-inf"))

# A thread copies 16 bytes of 4 keys, 64 columns apart.
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has renamed them.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Buffers(NamedTuple):
    """Shared memory, 226 of 227 KiB. The first dim of those of two is the stage: block modulo 2."""

    q_left: gl.shared_memory_descriptor  # bf16 [1, 64, 256]; holds the output of the left half at the end of a tile
    q_right: gl.shared_memory_descriptor
    k_left: gl.shared_memory_descriptor  # bf16 [2, 64, 256]
    k_right: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor  # bf16 [2, 64, 64]
    bound: gl.shared_memory_descriptor  # fp32 [2, 64]: scores are cut to it, -inf for a lane without token, else inf
    weights: gl.shared_memory_descriptor  # bf16 [2, 64, 64]
    shrink: gl.shared_memory_descriptor  # fp32 [2, 64]: factor of everything summed before the block
    maximum: gl.shared_memory_descriptor  # fp32 [2, 64]: of the scores up to the block, in units of log2
    total: gl.shared_memory_descriptor  # fp32 [2, 64]: sum of the weights of the blocks of each consumer


class Barriers(NamedTuple):
    """``full``: written, may be read; ``empty``: read, may be written. By stage, except those of q and total.

    The weights of a stage need no ``empty``: their writer has just scored the stage, which was refilled only after the
    other consumer had summed the block before, weights included.
    """

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    total_full: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor  # also of k_rope and bound
    left_empty: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor  # also of shrink and maximum


class Rows(NamedTuple):
    """What says which keys a row attends."""

    ids: gl.tensor  # int32 [T, K] slots, or the page table when PAGED
    stride: gl.tensor  # of a row of ids
    width: gl.tensor  # lanes of a row
    count: gl.tensor  # int32 [T]
    req_of_row: gl.tensor  # int32 [T], read when PAGED
    pages: gl.tensor  # of the pool


@gluon.jit
def row_of_tile(rows, tile, head_blocks, PAGED: gl.constexpr):
    """(valid lanes, offset of the ids) of the row of a tile."""
    row = tile // head_blocks
    n = gl.minimum(gl.load(rows.count + row), rows.width)
    if PAGED:
        row = gl.load(rows.req_of_row + row)
    return n, row.to(gl.int64) * rows.stride


@gluon.jit
def corner(tile, head_blocks):
    """Where a tile begins in queries and outputs that lie head by head, [H, T*512]."""
    return tile % head_blocks * TILE_HEADS, tile // head_blocks * LATENT


@gluon.jit
def steps_of(n):
    """Pairs of blocks of a row. A row with nothing to attend takes one, of zeros: roles then need no special case."""
    return gl.maximum((n + 2 * KEYS - 1) // (2 * KEYS), 1)


@gluon.jit
def _slots(rows, offset, block, n, PAGED: gl.constexpr):
    """int32 [64] slots of a block of lanes, -1 for those past ``n`` and for ids outside the pool."""
    lane = gl.arange(0, KEYS, layout=gl.SliceLayout(1, GATHER))
    start = block * KEYS
    if PAGED:
        page = gl.load(rows.ids + offset + block, mask=start < n, other=-1)
        slot = page * KEYS + lane
        inside = (page >= 0) & (page < rows.pages) & (start + lane < n)
    else:
        slot = gl.load(rows.ids + offset + (start + lane), mask=start + lane < n, other=-1)
        inside = (slot >= 0) & ((slot >> 6) < rows.pages)
    return gl.where(inside, slot, -1)


@gluon.jit
def _gather_left(stage, phase, keys, there, buffers, barriers):
    """Latents [0, 256) of a block. ``keys`` are addresses [64, 1]; a copy of all columns at once needs no barrier
    between its parts, and their offsets are immediates."""
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, GATHER)), 0)
    mbarrier.wait(barriers.left_empty.index(stage), phase)
    _copy(buffers.k_left.index(stage), keys + column, mask=there)
    async_copy.mbarrier_arrive(barriers.left_full.index(stage), increment_count=False)


@gluon.jit
def _gather_right(stage, phase, keys, there, bound, buffers, barriers):
    """Latents [256, 512) and rope of a block, and which of its lanes count."""
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, GATHER)), 0)
    rope_column = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, GATHER)), 0)
    mbarrier.wait(barriers.right_empty.index(stage), phase)
    _copy(buffers.k_right.index(stage), keys + (HALF + column), mask=there)
    _copy(buffers.k_rope.index(stage), keys + (LATENT + rope_column), mask=there)
    async_copy.mbarrier_arrive(barriers.right_full.index(stage), increment_count=False)
    buffers.bound.index(stage).store(bound)
    mbarrier.arrive(barriers.right_full.index(stage), count=1)


@gluon.jit
def produce(q_desc, pool, rows, ntiles, buffers, barriers, head_blocks, PAGED: gl.constexpr):
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    n, offset = row_of_tile(rows, first, head_blocks, PAGED)
    slots = _slots(rows, offset, 0, n, PAGED)
    phase = 1
    parity = 0
    for tile in range(first, ntiles, hop):
        next_n, next_offset = row_of_tile(rows, gl.minimum(tile + hop, ntiles - 1), head_blocks, PAGED)
        steps = steps_of(n)
        for step in range(steps):
            for side in gl.static_range(2):
                there = slots >= 0
                keys = pool + gl.expand_dims(gl.where(there, slots, 0).to(gl.int64) * (LATENT + ROPE), 1)
                bound = gl.where(there, float("inf"), NONE)
                there = gl.expand_dims(there, 1)
                # ids are read a block ahead, also across tiles
                if side == 0:
                    slots = _slots(rows, offset, 2 * step + 1, n, PAGED)
                    _gather_left(0, phase, keys, there, buffers, barriers)
                    _gather_right(0, phase, keys, there, bound, buffers, barriers)
                else:
                    last = step == steps - 1
                    ahead = gl.where(last, 0, 2 * step + 2)
                    slots = _slots(rows, gl.where(last, next_offset, offset), ahead, gl.where(last, next_n, n), PAGED)
                    _gather_left(1, phase, keys, there, buffers, barriers)
                    _gather_right(1, phase, keys, there, bound, buffers, barriers)
            # the queries follow the first two blocks: until the last tile is written, they hold its output
            if step == 0:
                mbarrier.wait(barriers.q_empty, parity ^ 1)
                mbarrier.expect(barriers.q_full, TILE_HEADS * LATENT * 2)
                head, column = corner(tile, head_blocks)
                _tma_load(q_desc, [head, column], barriers.q_full, buffers.q_left.index(0))
                _tma_load(q_desc, [head, column + HALF], barriers.q_full, buffers.q_right.index(0))
            phase ^= 1
        n = next_n
        offset = next_offset
        parity ^= 1
    async_copy.wait_group(0)

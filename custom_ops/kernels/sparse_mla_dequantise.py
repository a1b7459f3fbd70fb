"""The producer of sparse_mla_gluon for fp8 pools: dequantises 656-byte rows on their way into shared memory.

Where the producer of bf16 pools lets the copy engine write, this one holds codes in registers: 16 bytes of a row a
thread and load, 16 registers an item of 64 keys. The items of a block are its four groups of 128 latents, then its
rope; two or three of them are under way while one is converted, also across blocks. So a stage is refilled as soon as
it is free, without waiting for memory, and nothing of a block is in shared memory twice.

e4m3 becomes bf16 without the conversion unit, by 5 instructions for 2 elements instead of 12 by way of fp16 and fp32:
few enough that both programs of 128 heads may dequantise a block, each for itself (FlashMLA's share it through
distributed shared memory, which Gluon does not have). Scales are rounded to bf16, which powers of two survive.

Legend: T rows, K lanes of the selection. An address is that of a row of the pool; scales and rope lie behind codes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    KEYS,
    NONE,
    fetch_queries,
    lanes_of_tile,
    slots_of_block,
    steps_of,
)
from compiled_dsa.custom_ops.layout import LATENT_GROUP

# In words of 4 bytes: elements of 1 byte that are alive across a loop would take a register each.
_GROUPS = gl.constexpr(4)  # of a row; the item behind them is its rope, which has 128 bytes as well
_ITEM = gl.constexpr(LATENT_GROUP // 4)
_ROW = gl.constexpr((512 + 4 * 4 + 2 * 64) // 4)

# A thread holds 16 bytes of 2 keys, 64 bytes apart. 8 threads that store together then fill the 128 bytes of all banks:
# 4 of them even parts of a row (each has 16 bytes of codes, 32 of bf16), 4 what the swizzle makes odd ones of the next.
_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _CODES))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))

# Whether the producer orders its stores before the reads of the tensor cores. The consumers do so too, as they must for
# copies of bf16 pools, and a fence here may wait for loads that are under way: to be measured.
_FENCE = gl.constexpr(True)

# Triton 3.9 has renamed it.
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# Latents and rope lie 2^-60 lower in shared memory. The bits of a code, moved into those of a bf16, are its value times
# 2^-120; so one product, with the scale times 2^60, does the rest, and no scale from 2^-57 to 2^67 leaves the range.
LIFT = gl.constexpr(2.0**60)
_LOWERED = gl.constexpr(0x21802180)  # 2^-60 in bf16, twice

# $2: 4 codes; $3: the factor, twice. A code moves 4 bits up and its sign 8: times 16, and 240 more for the sign.
_TO_BF16 = gl.constexpr("""
{
.reg .b32 low, high, sign;
prmt.b32 low, $2, 0, 0x4140;
prmt.b32 high, $2, 0, 0x4342;
and.b32 sign, low, 0x00800080;
mul.lo.u32 low, low, 16;
mad.lo.u32 low, sign, 240, low;
and.b32 sign, high, 0x00800080;
mul.lo.u32 high, high, 16;
mad.lo.u32 high, sign, 240, high;
mul.bf16x2 low, low, $3;
mul.bf16x2 $1, high, $3;
mov.b32 $0, low;
}
""")
# $8 to $11: the factor of 16 codes, $4 to $7; NaN where one of them is NaN (0x7F or 0xFF), which would count as 480.
_FACTOR_OF_16 = gl.constexpr("""
{
.reg .b32 a, b, c, d;
.reg .pred nan;
and.b32 a, $4, 0x7F7F7F7F;
and.b32 b, $5, 0x7F7F7F7F;
and.b32 c, $6, 0x7F7F7F7F;
and.b32 d, $7, 0x7F7F7F7F;
add.u32 a, a, 0x01010101;
add.u32 b, b, 0x01010101;
add.u32 c, c, 0x01010101;
add.u32 d, d, 0x01010101;
or.b32 a, a, b;
or.b32 a, a, c;
or.b32 a, a, d;
and.b32 a, a, 0x80808080;
setp.ne.u32 nan, a, 0;
selp.b32 a, 0x7FFF7FFF, $8, nan;
mov.b32 $0, a;
mov.b32 $1, a;
mov.b32 $2, a;
mov.b32 $3, a;
}
""")


@gluon.jit
def _as_words(tile):
    """A tile of bf16 in shared memory as int32, two elements to a word."""
    shape: gl.constexpr = [tile.shape[0], tile.shape[1] // 2]
    if _RENAMED:
        return tile.reinterpret(gl.int32, shape, _WORDS)
    else:
        return tile._reinterpret(gl.int32, shape, _WORDS)


@gluon.jit
def _dequantise(codes, scale):
    """bf16 pairs (int32 [64, 64]) of e4m3 ``codes`` (int32 [64, 32], 4 each) with one scale a row (fp32 [64])."""
    factor = (scale * LIFT).to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    factor, codes = gl.broadcast(gl.expand_dims(factor * 0x10001, 1), codes)
    factor = gl.inline_asm_elementwise(
        _FACTOR_OF_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [codes, factor], gl.int32, is_pure=True, pack=4
    )
    low, high = gl.inline_asm_elementwise(
        _TO_BF16, "=r,=r,r,r", [codes, factor], (gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def _lower(rope):
    """bf16 pairs times 2^-60."""
    factor = gl.full([rope.shape[0], rope.shape[1]], _LOWERED, gl.int32, layout=rope.type.layout)
    return gl.inline_asm_elementwise("mul.bf16x2 $0, $1, $2;", "=r,r,r", [rope, factor], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _addresses(pool, slots):
    """(addresses [64] of the rows of slots, which of them hold a token)."""
    there = slots >= 0
    return pool + gl.where(there, slots, 0).to(gl.int64) * _ROW, there


@gluon.jit
def _item(address, there, ITEM: gl.constexpr):
    """(int32 [64, 32], fp32 [64]) of a block: codes and scales of a group; of the last item, rope and its bounds."""
    begin: gl.constexpr = ITEM * _ITEM if ITEM < _GROUPS else _GROUPS * _ITEM + _GROUPS
    column = gl.expand_dims(gl.arange(0, _ITEM, layout=gl.SliceLayout(0, _CODES)), 0)
    codes = gl.load(gl.expand_dims(address, 1) + (begin + column), mask=gl.expand_dims(there, 1), other=0)
    if ITEM < _GROUPS:
        scale = gl.load(address + (_GROUPS * _ITEM + ITEM), mask=there, other=0)
        return codes, scale.to(gl.float32, bitcast=True)
    else:
        return codes, gl.where(there, float("inf"), NONE)


@gluon.jit
def _store(item, phase, buffers, barriers, SIDE: gl.constexpr, ITEM: gl.constexpr):
    """One item of a block into its stage, when that is free; tells consumers of the last of a half."""
    codes, scale = item
    if ITEM == _GROUPS:
        # k_rope has one stage: it is freed by the block before, of the other side
        mbarrier.wait(barriers.rope_empty, phase)
        _as_words(buffers.k_rope.index(0)).store(_lower(codes))
        buffers.bound.index(SIDE).store(scale)
        if _FENCE:
            fence_async_shared()
        mbarrier.arrive(barriers.rope_full, count=1)
    else:
        keys = buffers.k_left if ITEM < 2 else buffers.k_right
        full = barriers.left_full if ITEM < 2 else barriers.right_full
        empty = barriers.left_empty if ITEM < 2 else barriers.right_empty
        pairs = _dequantise(codes, scale)
        if ITEM % 2 == 0:
            mbarrier.wait(empty.index(SIDE), phase)
        _as_words(keys.index(SIDE)).slice(ITEM % 2 * (2 * _ITEM), 2 * _ITEM, dim=1).store(pairs)
        if ITEM % 2 == 1:
            if _FENCE:
                fence_async_shared()
            mbarrier.arrive(full.index(SIDE), count=1)


@gluon.jit
def produce_dequantised(
    q_desc,
    q_rope_desc,
    pool,
    rows,
    ntiles,
    buffers,
    barriers,
    PAGED: gl.constexpr,
    SIDES: gl.constexpr,
    FIRST: gl.constexpr,
    ITEMS: gl.constexpr,
):
    """2 to 5 items of each block from FIRST on, 2 or 3 of them under way; queries too, if there is a q_desc."""
    STEP: gl.constexpr = SIDES * KEYS
    AHEAD: gl.constexpr = 3 if ITEMS > 2 else 2
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    phase = 1
    parity = 0
    for tile in range(first, ntiles, hop):
        n, offset = lanes_of_tile(rows, tile, PAGED, STEP)
        address, there = _addresses(pool, slots_of_block(rows, offset, 0, n, PAGED, _ROWS))
        slots = slots_of_block(rows, offset, 1, n, PAGED, _ROWS)
        queue = (_item(address, there, FIRST), _item(address, there, FIRST + 1))
        if AHEAD > 2:
            queue = queue + (_item(address, there, FIRST + 2),)  # type: ignore[assignment]
        if q_desc is not None:  # noqa: SIM102 (decided when compiled)
            if tile == first:
                fetch_queries(q_desc, q_rope_desc, rows, tile, parity, buffers, barriers)
        for step in range(steps_of(n, STEP)):
            for side in gl.static_range(SIDES):
                next_address, next_there = _addresses(pool, slots)
                slots = slots_of_block(rows, offset, SIDES * step + side + 2, n, PAGED, _ROWS)
                for i in gl.static_range(ITEMS):
                    # the one stage of rope passes from side to side, so the parity of its phase does
                    if FIRST + i < _GROUPS or SIDES == 1:
                        _store(queue[0], phase, buffers, barriers, side, FIRST + i)
                    else:
                        _store(queue[0], 1 - side, buffers, barriers, side, FIRST + i)
                    if i + AHEAD < ITEMS:
                        queue = queue[1:] + (_item(address, there, FIRST + i + AHEAD),)
                    else:
                        queue = queue[1:] + (_item(next_address, next_there, FIRST + i + AHEAD - ITEMS),)
                address = next_address
                there = next_there
                # until the last tile is written, the queries' place holds its output; the second rope needs them
                if side == 0 and q_desc is not None:  # noqa: SIM102 (decided when compiled)
                    if (step == 0) & (tile != first):
                        fetch_queries(q_desc, q_rope_desc, rows, tile, parity, buffers, barriers)
            phase ^= 1
        parity ^= 1

"""The producer of sparse_mla_gluon for fp8 pools: dequantises 656-byte rows on their way into shared memory.

Where the producer of bf16 pools lets the copy engine write, this one holds codes in registers: 16 bytes of a row a
thread and load, 16 registers a group of 64 keys. One half of a block (two groups) is under way while the other one is
converted, also across blocks. Rope is bf16 in the pool, so it is copied.

e4m3 becomes bf16 without the conversion unit, by 4 instructions for 2 elements instead of 12 by way of fp16 and fp32:
few enough that both programs of 128 heads may dequantise a block, each for itself (FlashMLA's share it through
distributed shared memory, which Gluon does not have). Scales are rounded to bf16, which powers of two survive.

Of 128 rows of 128 heads (H200, before rows were fetched ahead) 197 us were 140 of the consumers alone, 160 with
conversions of no loads, 177 with loads and no conversions or with rows that the caches hold: loads, though few wait for
them, and conversions add up.

Legend: T rows, K lanes of the selection. An address is that of a row of the pool; scales and rope lie behind codes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from compiled_dsa.custom_ops.kernels.gluon_names import copy, reinterpret, thread_barrier
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    KEYS,
    NONE,
    ROPE,
    TILE_HEADS,
    fetch_queries,
    lanes_of_tile,
    place_of_tile,
    slots_of_block,
    steps_of,
    tile_of,
)
from compiled_dsa.custom_ops.layout import LATENT_GROUP

# In words of 4 bytes: elements of 1 byte that are alive across a loop would take a register each.
_GROUPS = gl.constexpr(4)  # of a row; behind them lie its scales, then its rope, which has as many bytes as a group
_GROUP = gl.constexpr(LATENT_GROUP // 4)
ROW_WORDS = gl.constexpr((512 + 4 * 4 + 2 * 64) // 4)

# A thread holds 16 bytes of 2 keys, 64 bytes apart. 8 threads that store together then fill the 128 bytes of all banks:
# 4 of them even parts of a row (each has 16 bytes of codes, 32 of bf16), 4 what the swizzle makes odd ones of the next.
_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))

_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has renamed it.

# Latents lie 2^-60 lower in shared memory, and so does rope of the queries. The bits of a code, moved into those of a
# bf16, are its value times 2^-120; so one product, with the scale times 2^60, does the rest, and no scale from 2^-57 to
# 2^67 leaves the range.
LIFT = gl.constexpr(2.0**60)

# $1: address of a row, $2: its slot. Of 128 rows of 128 heads, an H200 takes 189 us with this and 198 without; with
# prefetch instructions, 128 or 64 bytes apart, 192 and 200.
_FETCH = gl.constexpr("""
{
.reg .pred there;
setp.ge.s32 there, $2, 0;
@there cp.async.bulk.prefetch.L2.global [$1], 656;
mov.b32 $0, $2;
}
""")

# $2: 4 codes; $3: the factor, twice. prmt puts the sign of a code into the byte above it: 4 bits up, it is in place.
_TO_BF16 = gl.constexpr("""
{
.reg .b32 low, high;
prmt.b32 low, $2, 0, 0x9180;
prmt.b32 high, $2, 0, 0xB3A2;
shl.b32 low, low, 4;
shl.b32 high, high, 4;
and.b32 low, low, 0x87F087F0;
and.b32 high, high, 0x87F087F0;
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
def as_words(tile):
    """A tile of bf16 in shared memory as int32, two elements to a word."""
    shape: gl.constexpr = [tile.shape[0], tile.shape[1] // 2]
    return reinterpret(tile, gl.int32, shape, _WORDS)


@gluon.jit
def _factor(scale):
    """A scale (fp32 [64]) times 2^60 in bf16, twice (int32 [64]). The first thing that is done with what was loaded.

    ptxas gives most loads one scoreboard: the first use of one waits for the newest. So what is loaded ahead must be
    loaded after this, which therefore stays in its place (it is not called pure).
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [scale * LIFT], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _dequantise(codes, factor):
    """bf16 pairs (int32 [64, 64]) of e4m3 ``codes`` (int32 [64, 32], 4 each) with one factor a row."""
    factor, codes = gl.broadcast(gl.expand_dims(factor, 1), codes)
    factor = gl.inline_asm_elementwise(
        _FACTOR_OF_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [codes, factor], gl.int32, is_pure=True, pack=4
    )
    low, high = gl.inline_asm_elementwise(
        _TO_BF16, "=r,=r,r,r", [codes, factor], (gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def _addresses(pool, slots):
    """(addresses [64] of the rows of slots, which of them hold a token)."""
    there = slots >= 0
    return pool + gl.where(there, slots, 0).to(gl.int64) * ROW_WORDS, there


@gluon.jit
def fetch(pool, slots):
    """Has the L2 cache fetch the rows of slots, but for those of -1: a row to a thread."""
    address = (pool + slots.to(gl.int64) * ROW_WORDS).to(gl.int64)
    gl.inline_asm_elementwise(_FETCH, "=r,l,r", [address, slots], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load(address, there, RIGHT: gl.constexpr):
    """(codes int32 [64, 32], scales fp32 [64]) of both groups of a half of a block."""
    column = gl.expand_dims(gl.arange(0, _GROUP, layout=gl.SliceLayout(0, _CODES)), 0)
    begin = gl.expand_dims(address, 1) + (RIGHT * 2 * _GROUP + column)
    mask = gl.expand_dims(there, 1)
    scales = address + (_GROUPS * _GROUP + RIGHT * 2)
    codes = (gl.load(begin, mask=mask, other=0), gl.load(begin + _GROUP, mask=mask, other=0))
    scale = (gl.load(scales, mask=there, other=0), gl.load(scales + 1, mask=there, other=0))
    return codes, (scale[0].to(gl.float32, bitcast=True), scale[1].to(gl.float32, bitcast=True))


@gluon.jit
def _copy_rope(address, there, buffers, barriers, SIDE: gl.constexpr):
    """Rope of a block into its stage, of which both halves are free, and which of its lanes count."""
    column = gl.expand_dims(gl.arange(0, _GROUP, layout=gl.SliceLayout(0, _CODES)), 0)
    begin = gl.expand_dims(address, 1) + (_GROUPS * _GROUP + _GROUPS + column)
    copy(as_words(buffers.k_rope.index(SIDE)), begin, mask=gl.expand_dims(there, 1))
    async_copy.mbarrier_arrive(barriers.rope_full.index(SIDE), increment_count=False)
    buffers.bound.index(SIDE).store(gl.where(there, float("inf"), NONE))
    mbarrier.arrive(barriers.rope_full.index(SIDE), count=1)


@gluon.jit
def _fetch_queries(q_desc, heads, rows, tile, parity, buffers, barriers):
    """As ``fetch_queries``, and their rope times 2^-60; 0 for heads past the last."""
    fetch_queries(q_desc, rows, tile, parity, buffers, barriers)
    row, _split, head0 = place_of_tile(rows, tile)
    head = head0 + gl.expand_dims(gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, _QUERIES)), 1)
    column = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, _QUERIES)), 0)
    begin = heads.q_rope + row.to(gl.int64) * heads.q_rope_row
    values = gl.load(begin + (head * heads.q_rope_head + column), mask=head < heads.H, other=0.0)
    tile_of(buffers.q_rope, 0).store((values.to(gl.float32) * (1.0 / LIFT)).to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(barriers.q_full, count=1)


@gluon.jit
def _factors(half, phase, barriers, SIDE: gl.constexpr, RIGHT: gl.constexpr):
    """Those of both groups of a half that has arrived, when its stage is free: now the next half may be loaded."""
    _codes, scales = half
    factors = _factor(scales[0]), _factor(scales[1])
    empty = barriers.right_empty if RIGHT else barriers.left_empty
    mbarrier.wait(empty.index(SIDE), phase)
    return factors


@gluon.jit
def _store(half, factors, buffers, barriers, SIDE: gl.constexpr, RIGHT: gl.constexpr):
    """A half, dequantised, into its stage."""
    codes, _scales = half
    tile = as_words((buffers.k_right if RIGHT else buffers.k_left).index(SIDE))
    full = barriers.right_full if RIGHT else barriers.left_full
    thread_barrier()  # else ptxas puts the loads that come before between the conversions, where registers are few
    for i in gl.static_range(2):
        tile.slice(2 * _GROUP * i, 2 * _GROUP, dim=1).store(_dequantise(codes[i], factors[i]))
    fence_async_shared()
    mbarrier.arrive(full.index(SIDE), count=1)


@gluon.jit
def produce_dequantised(
    q_desc, heads, pool, rows, ntiles, buffers, barriers, PAGED: gl.constexpr, SIDES: gl.constexpr
):  # fmt: skip
    STEP: gl.constexpr = SIDES * KEYS
    ROWS: gl.constexpr = gl.SliceLayout(1, _CODES)
    first = gl.program_id(0)
    hop = gl.num_programs(0)
    phase = 1
    parity = 0
    for tile in range(first, ntiles, hop):
        n, offset = lanes_of_tile(rows, tile, PAGED, STEP)
        address, there = _addresses(pool, slots_of_block(rows, offset, 0, n, PAGED, ROWS))
        half = _load(address, there, 0)
        slots = slots_of_block(rows, offset, 1, n, PAGED, ROWS)
        if tile == first:
            _fetch_queries(q_desc, heads, rows, tile, parity, buffers, barriers)
        for step in range(steps_of(n, STEP)):
            for side in gl.static_range(SIDES):
                factors = _factors(half, phase, barriers, side, 0)
                following = _load(address, there, 1)
                _store(half, factors, buffers, barriers, side, 0)
                half = following
                rope, holds = address, there
                address, there = _addresses(pool, slots)
                factors = _factors(half, phase, barriers, side, 1)
                # after the waits for both halves, since the weights in rope's place have been read then
                _copy_rope(rope, holds, buffers, barriers, side)
                following = _load(address, there, 0)
                slots = slots_of_block(rows, offset, SIDES * step + side + 2, n, PAGED, ROWS)
                _store(half, factors, buffers, barriers, side, 1)
                half = following
                # until the last tile is written, the queries' place holds its output
                if side == 0:  # noqa: SIM102 (decided when compiled)
                    if (step == 0) & (tile != first):
                        _fetch_queries(q_desc, heads, rows, tile, parity, buffers, barriers)
            phase ^= 1
        parity ^= 1

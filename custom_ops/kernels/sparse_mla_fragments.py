"""Rows of fp8 pools as left operands of products, dequantised in registers; and their producer, which only copies.

Eight warps read codes from shared memory as the fragments of their operands need them. Products may take the latents of
a row, over which scores are summed, and the rows of the output in any order: the one in which 16 codes of a key, or 8
of a latent's neighbours, are read at a time. So queries are stored in the first order, and sums are written back from
the second.

Legend: a step is 128 keys; w, g, t: warp, and the lane as 4 g + t.
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from compiled_dsa.custom_ops.kernels.gluon_names import copy, reinterpret
from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import LIFT, ROW_WORDS, as_words
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    LATENT,
    NONE,
    ROPE,
    lanes_of_tile,
    slots_of_lanes,
    steps_of,
)
from compiled_dsa.custom_ops.layout import LATENT_GROUP

STEP = gl.constexpr(128)
PART = gl.constexpr(16)  # keys of a product of the sums
PARTS = gl.constexpr(8)
WORDS = gl.constexpr(LATENT_GROUP // 4)  # int32, of a group: 4 codes each
GROUPS = gl.constexpr(4)

# 16 bytes of 8 keys apart by one or by two lie in different banks.
CODES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Words [128, 32] of a group for the scores: of keys g and g + 8 of the warp's 16, 16 bytes at 32 t and 16 bytes behind.
_BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 32],
    )
)
_SCALES_BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 4],
    )
)
_SCALE_BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 1],
    )
)
# Words [16, 128] of a part for the sums: of keys 2 t, 2 t + 1 and those 8 further, 8 bytes at 64 w + 8 g.
_BY_LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [8, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32], [0, 64]],
        block_bases=[],
        shape=[16, 128],
    )
)
_SCALES_BY_LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 1], [0, 2]],
        block_bases=[],
        shape=[16, 4],
    )
)

# A thread of the producer copies 16 bytes of a row.
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))

_F16_4 = gl.constexpr((gl.float16,) * 4)
_BF16_8 = gl.constexpr((gl.bfloat16,) * 8)

# $0 to $3: the fp16 of the 4 codes $4 times the factor $5, twice. A NaN stays one.
_KEY_TO_FP16 = gl.constexpr("""
{
.reg .b16 a, b;
.reg .b32 low, high;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 low, a;
cvt.rn.f16x2.e4m3x2 high, b;
mul.f16x2 low, low, $5;
mul.f16x2 high, high, $5;
mov.b32 {$0, $1}, low;
mov.b32 {$2, $3}, high;
}
""")
# $0 to $7: of each of 4 latents the bf16 of two keys, whose codes are $8 and $9, with the factors $10 of both; see
# sparse_mla_dequantise.
_LATENTS_TO_BF16 = gl.constexpr(
    "{\n.reg .b32 two;\n"
    + "".join(
        f"prmt.b32 two, $8, $9, {selector};\nshl.b32 two, two, 4;\nand.b32 two, two, 0x87F087F0;\n"
        f"mul.bf16x2 two, two, $10;\nmov.b32 {{${2 * i}, ${2 * i + 1}}}, two;\n"
        for i, selector in enumerate(("0xC480", "0xD591", "0xE6A2", "0xF7B3"))
    )
    + "}"
)


class Buffers(NamedTuple):
    """Shared memory and its barriers. The first dim of stages is 2, or 2 * 8 where they are read in parts.

    Rope has one stage: that of a step is copied with the codes of the next one, and is needed after its own codes.
    """

    q_latent: gl.shared_memory_descriptor  # fp16 [1, 1, N, 512], in the order of keys_operand; then the output in bf16
    q_rope: gl.shared_memory_descriptor  # bf16 [1, N, 64]
    unit: gl.shared_memory_descriptor  # fp32 [N]: what makes products scores in units of log2
    reference: gl.shared_memory_descriptor  # fp32 [N]: what is subtracted from them
    highest: gl.shared_memory_descriptor  # fp32 [8]: how far those of each warp lie above it
    weights: gl.shared_memory_descriptor  # bf16 [N, 128]
    codes: gl.shared_memory_descriptor  # int32 [16, 16, 128]
    scales: gl.shared_memory_descriptor  # fp32 [16, 16, 4]
    rope: gl.shared_memory_descriptor  # bf16 [128, 64]
    bound: gl.shared_memory_descriptor  # fp32 [2, 128]: scores are cut to it, -inf for a lane without token
    full: gl.shared_memory_descriptor  # [2]: written, may be read
    rope_full: gl.shared_memory_descriptor  # the same of rope
    empty: gl.shared_memory_descriptor  # read, may be written


@gluon.jit
def _slots(rows, offset, step, n, PAGED: gl.constexpr, LAYOUT: gl.constexpr):
    lane = step * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(1, LAYOUT))
    return slots_of_lanes(rows, offset, lane, n, PAGED)


@gluon.jit
def _copy_rows(pool, slots, word, to):
    """Words of the rows of slots; zeros for those of -1."""
    row = gl.expand_dims(gl.maximum(slots, 0).to(gl.int64) * ROW_WORDS, 1)
    copy(to, pool + row + word, mask=gl.expand_dims(slots >= 0, 1))


@gluon.jit
def codes_of_stages(buffers):
    return reinterpret(buffers.codes, gl.int32, [2, STEP, GROUPS * WORDS], CODES)


@gluon.jit
def scales_of_stages(buffers):
    return reinterpret(buffers.scales, gl.float32, [2, STEP, GROUPS], SCALES)


@gluon.jit
def _copy_rope(pool, slots, buffers):
    word = gl.expand_dims(gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, _COPY)), 0)
    _copy_rows(pool, slots, GROUPS * WORDS + GROUPS + word, as_words(buffers.rope))
    async_copy.mbarrier_arrive(buffers.rope_full, increment_count=False)


@gluon.jit
def produce_raw(pool, rows, ntiles, buffers, PAGED: gl.constexpr):
    word = gl.expand_dims(gl.arange(0, GROUPS * WORDS, layout=gl.SliceLayout(0, _COPY)), 0)
    group = gl.expand_dims(gl.arange(0, GROUPS, layout=gl.SliceLayout(0, _COPY_SCALES)), 0)
    count = 0
    last = gl.full([STEP], -1, gl.int32, layout=gl.SliceLayout(1, _COPY))
    for tile in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        n, offset = lanes_of_tile(rows, tile, PAGED, STEP)
        slots = _slots(rows, offset, 0, n, PAGED, _COPY)
        scale_slots = _slots(rows, offset, 0, n, PAGED, _COPY_SCALES)
        for step in range(steps_of(n, STEP)):
            stage = count & 1
            full = buffers.full.index(stage)
            mbarrier.wait(buffers.empty.index(stage), (count >> 1 & 1) ^ 1)
            if count > 0:  # of the last step: 128 rows of 16 heads take 61 us on an H200 so, 66 with rope in the stage
                _copy_rope(pool, last, buffers)
            _copy_rows(pool, slots, word, codes_of_stages(buffers).index(stage))
            _copy_rows(pool, scale_slots, GROUPS * WORDS + group, scales_of_stages(buffers).index(stage))
            async_copy.mbarrier_arrive(full, increment_count=False)
            buffers.bound.index(stage).store(gl.where(scale_slots >= 0, float("inf"), NONE))
            mbarrier.arrive(full, count=1)
            last = slots
            # ids are read a step ahead
            slots = _slots(rows, offset, step + 1, n, PAGED, _COPY)
            scale_slots = _slots(rows, offset, step + 1, n, PAGED, _COPY_SCALES)
            count += 1
    mbarrier.wait(buffers.empty.index(count & 1), (count >> 1 & 1) ^ 1)
    _copy_rope(pool, last, buffers)
    async_copy.wait_group(0)


@triton.constexpr_function
def _outputs_layout(N):
    """Of outputs [N, 512]: the latents of a thread are neighbours, and its own already."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], *([8 << i, 0] for i in range((N // 8).bit_length() - 1))],
        lane_bases=[[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[0, 64], [0, 128], [0, 256]],
        block_bases=[],
        shape=[N, 512],
    )


@gluon.jit
def exponent_of(x, LOWEST: gl.constexpr, HIGHEST: gl.constexpr):
    """The biased exponent of x in its place (int32), within bounds: as fp32, the power of two at or below x."""
    bits = x.to(gl.int32, bitcast=True) & 0x7F800000
    return gl.minimum(gl.maximum(bits, LOWEST << 23), HIGHEST << 23)


@gluon.jit
def power_of_keys(scales):
    """(a power of two near the largest scale of each key, its inverse), fp32 [128]."""
    exponent = exponent_of(gl.max(gl.abs(scales.load(_SCALES_BY_KEY)), axis=1), 70, 253)  # biased: 2^-57 to 2^126
    return exponent.to(gl.float32, bitcast=True), ((254 << 23) - exponent).to(gl.float32, bitcast=True)


@gluon.jit
def words_of_group(codes, scales, inverse, GROUP: gl.constexpr):
    """Both halves of the words of a group of all keys, [128, 4, 4], and their factors.

    Args:
        codes, scales: of the step, int32 [128, 128] and fp32 [128, 4].
        inverse: of the power of each key; scales times it are near 1, or small beside another group of the key.
    """
    scale = gl.reshape(scales.slice(GROUP, 1, dim=1).load(_SCALE_BY_KEY), [STEP])
    scale = scale * gl.convert_layout(inverse, scale.type.layout)
    words = codes.slice(GROUP * WORDS, WORDS, dim=1).load(_BY_KEY)
    words = gl.permute(gl.reshape(words, [STEP, 4, 2, 4]), (0, 1, 3, 2))
    first, second = gl.split(words)
    LAYOUT: gl.constexpr = first.type.layout
    factor = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], gl.int32, is_pure=True, pack=1)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    factor, first = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 1), 2), first)
    return first, second, factor


@gluon.jit
def keys_operand(words, factor, PRODUCT: gl.constexpr):
    """fp16 operand [128, 64] of the scores from half of the words of a group."""
    a, b, c, d = gl.inline_asm_elementwise(
        _KEY_TO_FP16, "=h,=h,=h,=h,r,r", [words, factor], _F16_4, is_pure=True, pack=1
    )
    both = gl.join(gl.join(a, b), gl.join(c, d))  # key, t, word, code, two codes
    both = gl.reshape(gl.permute(both, (0, 2, 4, 1, 3)), [STEP, 2 * WORDS])
    return gl.convert_layout(both, gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def in_order_of_keys_operands(q):
    """Queries [N, 512] with their latents in the order in which the operands have them."""
    N: gl.constexpr = q.shape[0]
    q = gl.reshape(q, [N, 4, 4, 2, 4, 2, 2])  # group, t, 16 bytes, word, two codes, code
    return gl.reshape(gl.permute(q, (0, 1, 3, 4, 5, 2, 6)), [N, LATENT])


@gluon.jit
def _lift(low, high):
    """Two scales times 2^60 in bf16 in one word."""
    pair: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(pair, "=r,r,r", [low * LIFT, high * LIFT], gl.int32, is_pure=True, pack=1)


@gluon.jit
def words_of_part(codes, scales):
    """Words of even and of odd keys of a part, [8, 4, 2, 16], and the factors of both."""
    words = gl.reshape(codes.load(_BY_LATENT), [8, 2, 4, 2, 16])  # key pair, key, group, warp of it, (g, word)
    even, odd = gl.split(gl.permute(words, (0, 2, 3, 4, 1)))
    LAYOUT: gl.constexpr = even.type.layout
    low, high = gl.split(gl.permute(gl.reshape(scales.load(_SCALES_BY_LATENT), [8, 2, 4]), (0, 2, 1)))
    factor = gl.convert_layout(_lift(low, high), gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    factor, even = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 2), 3), even)
    return even, odd, factor


@gluon.jit
def latents_operand(even, odd, factor, PRODUCT: gl.constexpr):
    """bf16 operand [512, 16] of the sums. Its row 256 q + 128 y + 16 w + 8 z + g holds byte 2 y + z of word q of the 8
    latents 64 w + 8 g. A NaN needs no check: the weight of a key with one is NaN."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _LATENTS_TO_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [even, odd, factor], _BF16_8, is_pure=True, pack=1
    )
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    x = gl.reshape(x, [8, 8, 8, 2, 2, 2, 2])  # key pair, w, g, q, key, z, y
    x = gl.reshape(gl.permute(x, (3, 6, 1, 5, 2, 0, 4)), [LATENT, PART])
    return gl.convert_layout(x, gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def outputs_of_sums(sums):
    """Sums [512, N], rows as those of latents_operand, as outputs [N, 512]."""
    N: gl.constexpr = sums.shape[1]
    sums = gl.reshape(sums, [2, 2, 8, 2, 8, N])  # q, y, w, z, g, head
    sums = gl.reshape(gl.permute(sums, (5, 2, 4, 0, 1, 3)), [N, LATENT])
    return gl.convert_layout(sums, _outputs_layout(N))

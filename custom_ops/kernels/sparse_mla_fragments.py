"""Rows of fp8 pools as left operands of products, dequantised in registers; and their producer, which only copies.

A thread reads 16 codes of a key at a time from shared memory. Products may take the latents of a row, over which scores
are summed, and the rows of the output in any order: the one in which each thread holds what its fragments need. So
queries are stored in the first order, and sums are written back from the second.

Legend: a block is 64 keys; w, g, t: warp, and the lane as 4 g + t.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from compiled_dsa.custom_ops.kernels.sparse_mla_dequantise import FACTOR_OF_16, LIFT, as_words
from compiled_dsa.custom_ops.kernels.sparse_mla_gather import (
    KEYS,
    NONE,
    ROPE,
    copy,
    lanes_of_tile,
    slots_of_block,
    steps_of,
)
from compiled_dsa.custom_ops.layout import LATENT_GROUP

WORDS = gl.constexpr(LATENT_GROUP // 4)  # int32, of a group: 4 codes each
GROUPS = gl.constexpr(4)
_ROW = gl.constexpr((512 + 4 * 4 + 2 * 64) // 4)  # words of a row of the pool: codes, scales, rope

_ROPE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# 16 bytes of 8 keys apart by one or by two lie in different banks.
_CODES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))

# A thread of the producer copies 16 bytes of a row.
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
# Words [64, 32] of a group for the scores: of keys g and g + 8 of the warp's 16, 16 bytes at 32 t and 16 bytes behind.
BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
SCALES_BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
# Words [32, 128] of half of the keys for the sums: of keys 2 t, 2 t + 1 and those 8 further of each 16, 16 bytes at
# 128 w + 16 g.
_BY_LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[32, 128],
    )
)
_SCALES_BY_LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [16, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 1], [0, 2]],
        block_bases=[],
        shape=[32, 4],
    )
)

_BF16_4 = gl.constexpr((gl.bfloat16,) * 4)
_BF16_8 = gl.constexpr((gl.bfloat16,) * 8)

# $0 to $3: the bf16 of the 4 codes $4 with the factor $5, twice; see sparse_mla_dequantise.
_KEY_TO_BF16 = gl.constexpr("""
{
.reg .b32 low, high;
prmt.b32 low, $4, 0, 0x9180;
prmt.b32 high, $4, 0, 0xB3A2;
shl.b32 low, low, 4;
shl.b32 high, high, 4;
and.b32 low, low, 0x87F087F0;
and.b32 high, high, 0x87F087F0;
mul.bf16x2 low, low, $5;
mul.bf16x2 high, high, $5;
mov.b32 {$0, $1}, low;
mov.b32 {$2, $3}, high;
}
""")
# $0 to $7: of each of 4 latents the bf16 of two keys, whose codes are $8 and $9, with the factors $10 of both.
_LATENTS_TO_BF16 = gl.constexpr(
    "{\n.reg .b32 two;\n"
    + "".join(
        f"prmt.b32 two, $8, $9, {selector};\nshl.b32 two, two, 4;\nand.b32 two, two, 0x87F087F0;\n"
        f"mul.bf16x2 two, two, $10;\nmov.b32 {{${2 * i}, ${2 * i + 1}}}, two;\n"
        for i, selector in enumerate(("0xC480", "0xD591", "0xE6A2", "0xF7B3"))
    )
    + "}"
)


class Stages(NamedTuple):
    """Raw rows of blocks in shared memory, and their barriers."""

    codes: gl.shared_memory_descriptor  # int32 [STAGES, 64, 128]
    scales: gl.shared_memory_descriptor  # fp32 [STAGES, 64, 4]
    rope: gl.shared_memory_descriptor  # bf16 [STAGES, 64, 64]
    bound: gl.shared_memory_descriptor  # fp32 [STAGES, 64]: scores are cut to it, -inf for a lane without token
    full: gl.shared_memory_descriptor  # [STAGES]: written, may be read
    empty: gl.shared_memory_descriptor  # read, may be written


@gluon.jit
def allocate_stages(STAGES: gl.constexpr):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    stages = Stages(
        codes=gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, GROUPS * WORDS], _CODES),
        scales=gl.allocate_shared_memory(gl.float32, [STAGES, KEYS, GROUPS], _PLAIN),
        rope=gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, ROPE], _ROPE),
        bound=gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], _VECTOR),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for stage in gl.static_range(STAGES):
        # each thread of the producer, as its copies arrive, and once for the bound
        mbarrier.init(stages.full.index(stage), count=129)
        mbarrier.init(stages.empty.index(stage), count=1)
    return stages


@gluon.jit
def _addresses(pool, rows, offset, block, n, PAGED: gl.constexpr, LAYOUT: gl.constexpr):
    """(addresses [64, 1] of the rows of a block, which of them hold a token)."""
    slots = slots_of_block(rows, offset, block, n, PAGED, gl.SliceLayout(1, LAYOUT))
    there = gl.expand_dims(slots >= 0, 1)
    return pool + gl.expand_dims(gl.where(slots >= 0, slots, 0).to(gl.int64) * _ROW, 1), there


@gluon.jit
def produce_raw(pool, rows, ntiles, stages, PAGED: gl.constexpr):
    STAGES: gl.constexpr = stages.codes.shape[0]
    word = gl.expand_dims(gl.arange(0, GROUPS * WORDS, layout=gl.SliceLayout(0, _COPY)), 0)
    rope_word = gl.expand_dims(gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, _COPY)), 0)
    group = gl.expand_dims(gl.arange(0, GROUPS, layout=gl.SliceLayout(0, _COPY_SCALES)), 0)
    count = 0
    for tile in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        n, offset = lanes_of_tile(rows, tile, PAGED, 2 * KEYS)
        address, there = _addresses(pool, rows, offset, 0, n, PAGED, _COPY)
        scale_address, scale_there = _addresses(pool, rows, offset, 0, n, PAGED, _COPY_SCALES)
        for block in range(2 * steps_of(n, 2 * KEYS)):
            # ids are read a block ahead
            next_address, next_there = _addresses(pool, rows, offset, block + 1, n, PAGED, _COPY)
            next_scale, next_scale_there = _addresses(pool, rows, offset, block + 1, n, PAGED, _COPY_SCALES)
            stage = count % STAGES
            full = stages.full.index(stage)
            mbarrier.wait(stages.empty.index(stage), (count // STAGES & 1) ^ 1)
            copy(stages.codes.index(stage), address + word, mask=there)
            copy(stages.scales.index(stage), scale_address + (GROUPS * WORDS + group), mask=scale_there)
            rope = address + (GROUPS * WORDS + GROUPS + rope_word)
            copy(as_words(stages.rope.index(stage)), rope, mask=there)
            async_copy.mbarrier_arrive(full, increment_count=False)
            bound = gl.where(gl.reshape(there, [KEYS]), float("inf"), NONE)
            stages.bound.index(stage).store(bound)
            mbarrier.arrive(full, count=1)
            address = next_address
            there = next_there
            scale_address = next_scale
            scale_there = next_scale_there
            count += 1
    async_copy.wait_group(0)


@gluon.jit
def _lift(low, high):
    """Two scales times 2^60 in bf16 in one word."""
    pair: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(pair, "=r,r,r", [low * LIFT, high * LIFT], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _keys_operand(words, factor, PRODUCT: gl.constexpr):
    """Operand [64, 64] of the scores: 16 codes of each t of all keys, from words [64, 4, 4] and factors [64, 4, 4].

    Only here a NaN code makes a NaN: the sums need no check, as the weight of a key with a NaN is one.
    """
    factor = gl.inline_asm_elementwise(
        FACTOR_OF_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, factor], gl.int32, is_pure=True, pack=4
    )
    a, b, c, d = gl.inline_asm_elementwise(
        _KEY_TO_BF16, "=h,=h,=h,=h,r,r", [words, factor], _BF16_4, is_pure=True, pack=1
    )
    both = gl.join(gl.join(a, b), gl.join(c, d))  # key, t, word, code, two codes
    both = gl.reshape(gl.permute(both, (0, 2, 4, 1, 3)), [KEYS, 2 * WORDS])
    return gl.convert_layout(both, gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def add_scores(scores, codes, scale, queries, PRODUCT: gl.constexpr):
    """Adds a group, of codes [64, 128] in words and scales [64], to scores [64, N]; queries are [N, 128].

    Operands of one product at a time. Those of the next one under way, all words loaded first and rope from registers
    too, together, took 128 rows of 16 heads 105 us on an H200 instead of 86 (not in one run).
    """
    words = gl.permute(gl.reshape(codes.load(BY_KEY), [KEYS, 4, 2, 4]), (0, 1, 3, 2))
    halves = gl.split(words)
    LAYOUT: gl.constexpr = halves[0].type.layout
    factor = gl.convert_layout(_lift(scale, scale), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    factor, words = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 1), 2), halves[0])
    for i in gl.static_range(2):
        keys = _keys_operand(halves[i], factor, PRODUCT)
        part = queries.slice(i * 2 * WORDS, 2 * WORDS, dim=1).permute((1, 0))
        scores = warpgroup_mma(keys, part, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores


@gluon.jit
def _latents_operand(even, odd, factor, PRODUCT: gl.constexpr):
    """Operand [256, 2 P] of the sums, from 2 words of each (w, g) of even and of odd keys [P, 4, 16] and the factors of
    both. Its row 128 q + 64 y + 16 w + 8 z + g holds byte 2 y + z of word q."""
    P: gl.constexpr = even.shape[0]
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _LATENTS_TO_BF16,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [even, odd, factor],
        _BF16_8,
        is_pure=True,
        pack=1,
    )
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    x = gl.reshape(x, [P, 4, 8, 2, 2, 2, 2])  # key pair, w, g, q, key, z, y
    x = gl.reshape(gl.permute(x, (3, 6, 1, 5, 2, 0, 4)), [256, 2 * P])
    return gl.convert_layout(x, gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def latents_operands(codes, scales, PRODUCT: gl.constexpr):
    """Operands [256, 32] of the sums, of codes [32 keys, 512] in words, and scales."""
    words = gl.reshape(codes.load(_BY_LATENT), [16, 2, 4, 8, 2, 2])  # key pair, key, w, g, half, word
    even, odd = gl.split(gl.permute(words, (0, 2, 3, 5, 4, 1)))  # [key pair, w, g, word, half]
    even_left, even_right = gl.split(even)
    odd_left, odd_right = gl.split(odd)
    even_left = gl.reshape(even_left, [16, 4, 16])
    LAYOUT: gl.constexpr = even_left.type.layout
    low, high = gl.split(gl.permute(gl.reshape(scales.load(_SCALES_BY_LATENT), [16, 2, 4]), (0, 2, 1)))
    factor = gl.convert_layout(_lift(low, high), gl.SliceLayout(2, LAYOUT))
    factor, even_left = gl.broadcast(gl.expand_dims(factor, 2), even_left)
    left = _latents_operand(even_left, gl.reshape(odd_left, [16, 4, 16]), factor, PRODUCT)
    even_right = gl.convert_layout(gl.reshape(even_right, [16, 4, 16]), LAYOUT)
    odd_right = gl.convert_layout(gl.reshape(odd_right, [16, 4, 16]), LAYOUT)
    return left, _latents_operand(even_right, odd_right, factor, PRODUCT)

"""store_latents in Triton: one program a token."""

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import refuses_device, refuses_dtype, refuses_strides
from compiled_dsa.custom_ops.layout import FP8_MAX, LATENT_GROUP, PAGE, latent_groups, split_latent_pool
from compiled_dsa.custom_ops.store_latents import MIN_SCALE

_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_GROUP = tl.constexpr(LATENT_GROUP)


def refuses(pool: Tensor, latents: Tensor, rope: Tensor, slots: Tensor) -> str | None:
    return (
        refuses_device(pool)
        or refuses_dtype(latents=latents, rope=rope)
        or refuses_strides(latents=latents, rope=rope, slots=slots)
    )


@triton.jit
def power_of_two_ceil(x):
    """The smallest power of two >= x, for positive normal fp32 x."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, scale):
    """e4m3 codes of fp32 x at a scale: divided as IEEE has it, saturated at 448; NaN stays NaN."""
    x = tl.clamp(tl.div_rn(x, scale), -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(tl.float8e4nv)


@triton.jit
def latent_columns(GROUPS_PADDED: tl.constexpr):
    """[groups, 128]: the columns of each group."""
    return tl.arange(0, GROUPS_PADDED)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]


@triton.jit
def write_latents(latents, scales, x, L: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr):
    """x, the latents of a token [groups, 128], into its slot, which ``latents`` and ``scales`` point at."""
    group = tl.arange(0, x.shape[0])
    if FP8:
        x = x.to(tl.float32)
        scale = power_of_two_ceil(tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=1), _FP8_MAX), _MIN_SCALE))
        tl.store(scales + group, scale, mask=group < GROUPS)
        x = to_e4m3(x, scale[:, None])
    column = latent_columns(x.shape[0])
    tl.store(latents + column, x, mask=column < L)


@triton.jit(do_not_specialize=["capacity"])
def _store(
    pool_latents,  # [slots, L] codes or model dtype
    pool_scales,  # [slots, G] fp32, for an fp8 pool
    pool_rope,  # [slots, R]
    latents,
    rope,
    slots,
    capacity,
    latents_slot,
    scales_slot,
    rope_slot,
    latents_row,
    rope_row,
    L: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot < 0) | (slot >= capacity):
        return
    column = latent_columns(GROUPS_PADDED)
    x = tl.load(latents + row * latents_row + column, mask=column < L, other=0.0)
    write_latents(pool_latents + slot * latents_slot, pool_scales + slot * scales_slot, x, L, GROUPS, FP8)
    if R > 0:
        r = tl.arange(0, R_PADDED)
        values = tl.load(rope + row * rope_row + r, mask=r < R, other=0.0)
        tl.store(pool_rope + slot * rope_slot + r, values.to(pool_rope.dtype.element_ty), mask=r < R)


def run(pool: Tensor, latents: Tensor, rope: Tensor, slots: Tensor) -> None:
    T, L = latents.shape
    R = rope.shape[1]
    if T == 0:
        return
    pool_latents, pool_scales, pool_rope = split_latent_pool(pool, L, R)
    fp8 = pool_scales is not None
    _store[(T,)](
        pool_latents,
        pool_scales if fp8 else pool_latents,
        pool_rope,
        latents,
        rope,
        slots,
        pool.shape[0] * PAGE,
        pool_latents.stride(1),
        pool_scales.stride(1) if fp8 else 0,
        pool_rope.stride(1),
        latents.stride(0),
        rope.stride(0),
        L=L,
        R=R,
        GROUPS=latent_groups(L),
        GROUPS_PADDED=triton.next_power_of_2(latent_groups(L)),
        R_PADDED=triton.next_power_of_2(max(R, 1)),
        FP8=fp8,
    )

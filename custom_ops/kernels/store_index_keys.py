"""store_index_keys in Triton: one program a token."""

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import refuses_device, refuses_dtype, refuses_strides
from compiled_dsa.custom_ops.kernels.store_latents import power_of_two_ceil, to_e4m3
from compiled_dsa.custom_ops.layout import FP8_MAX, PAGE, split_index_pool
from compiled_dsa.custom_ops.store_index_keys import MIN_AMAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_AMAX = tl.constexpr(MIN_AMAX)
_PAGE = tl.constexpr(PAGE)


def refuses(pool: Tensor, keys: Tensor, slots: Tensor, scale_ue8m0: bool) -> str | None:
    return refuses_device(pool) or refuses_dtype(keys=keys) or refuses_strides(keys=keys, slots=slots)


@triton.jit
def row_scale(amax, UE8M0: tl.constexpr):
    """The scales of rows by their largest magnitudes, as ``quantize_rows`` has them."""
    scale = tl.div_rn(tl.maximum(amax, _MIN_AMAX), _FP8_MAX)
    return power_of_two_ceil(scale) if UE8M0 else scale


@triton.jit
def write_key(keys, scales, x, slot, keys_page, scales_page, D: tl.constexpr, FP8: tl.constexpr, UE8M0: tl.constexpr):
    """x, a key padded with zeros, into its slot."""
    page, offset = slot // _PAGE, slot % _PAGE
    d = tl.arange(0, x.shape[0])
    if FP8:
        x = x.to(tl.float32)
        scale = row_scale(tl.max(tl.abs(x), axis=0), UE8M0)
        tl.store(scales + page * scales_page + offset, scale)
        x = to_e4m3(x, scale)
    tl.store(keys + page * keys_page + offset * D + d, x, mask=d < D)


@triton.jit(do_not_specialize=["capacity"])
def _store(
    pool_keys,  # [P, 64, D] codes or model dtype
    pool_scales,  # [P, 64] fp32, for an fp8 pool
    keys,
    slots,
    capacity,
    keys_page,
    scales_page,
    keys_row,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    UE8M0: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot < 0) | (slot >= capacity):
        return
    d = tl.arange(0, D_PADDED)
    x = tl.load(keys + row * keys_row + d, mask=d < D, other=0.0)
    write_key(pool_keys, pool_scales, x, slot, keys_page, scales_page, D, FP8, UE8M0)


def run(pool: Tensor, keys: Tensor, slots: Tensor, scale_ue8m0: bool) -> None:
    T, D = keys.shape
    if T == 0:
        return
    pool_keys, pool_scales = split_index_pool(pool)
    fp8 = pool_scales is not None
    _store[(T,)](
        pool_keys,
        pool_scales if fp8 else pool_keys,
        keys,
        slots,
        pool.shape[0] * PAGE,
        pool_keys.stride(0),
        pool_scales.stride(0) if fp8 else 0,
        keys.stride(0),
        D=D,
        D_PADDED=triton.next_power_of_2(D),
        FP8=fp8,
        UE8M0=scale_ue8m0,
        num_warps=1,
    )

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


@triton.jit(do_not_specialize=["pages"])
def _store(
    pool_keys,  # [P, 64, D] codes or model dtype
    pool_scales,  # [P, 64] fp32, for an fp8 pool
    keys,
    slots,
    pages,
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
    page = slot // _PAGE
    offset = slot % _PAGE
    if (slot < 0) | (page >= pages):
        return
    d = tl.arange(0, D_PADDED)
    x = tl.load(keys + row * keys_row + d, mask=d < D, other=0.0)
    if FP8:
        x = x.to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), _MIN_AMAX), tl.full([], _FP8_MAX, tl.float32))
        if UE8M0:
            scale = power_of_two_ceil(scale)
        tl.store(pool_scales + page * scales_page + offset, scale)
        x = to_e4m3(x, scale + tl.zeros_like(x))
    tl.store(pool_keys + page * keys_page + offset * D + d, x, mask=d < D)


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
        pool.shape[0],
        pool_keys.stride(0),
        pool_scales.stride(0) if fp8 else 0,
        keys.stride(0),
        D=D,
        D_PADDED=triton.next_power_of_2(D),
        FP8=fp8,
        UE8M0=scale_ue8m0,
        num_warps=1,
    )

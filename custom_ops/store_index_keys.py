"""store_index_keys: writes indexer keys of new tokens into a page pool, quantising for an fp8 pool."""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import (
    FP8,
    FP8_MAX,
    PAGE,
    check_dtype,
    check_index_pool,
    check_shape,
    split_index_pool,
    valid_slots,
)
from compiled_dsa.custom_ops.registry import define
from compiled_dsa.custom_ops.store_latents import power_of_two_ceil

MIN_AMAX = 1e-4


def check(pool: Tensor, keys: Tensor, slots: Tensor, scale_ue8m0: bool) -> None:
    check_shape("keys", keys, None, None)
    check_shape("slots", slots, keys.shape[0])
    check_dtype("slots", slots, torch.int64)
    check_index_pool(pool, keys.shape[1])
    if pool.dtype != torch.uint8:
        check_dtype("keys", keys, pool.dtype)


def quantize_rows(x: Tensor, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """[..., D] -> (e4m3 codes [..., D], fp32 scales [...]), scale = max(amax, 1e-4)/448.

    ``scale_ue8m0`` rounds the scale up to a power of two before the codes are made.
    """
    x = x.float()
    scales = x.abs().amax(-1).clamp(min=MIN_AMAX) / FP8_MAX
    if scale_ue8m0:
        scales = power_of_two_ceil(scales)
    return (x / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def reference(pool: Tensor, keys: Tensor, slots: Tensor, scale_ue8m0: bool) -> None:
    """Token t goes to physical slot ``slots[t]``; a slot outside the pool (-1: padding) writes nothing."""
    kept = valid_slots(slots, pool.shape[0])
    slots, keys = slots[kept], keys[kept]
    page, offset = slots // PAGE, slots % PAGE
    pool_keys, pool_scales = split_index_pool(pool)
    if pool_scales is not None:
        keys, scales = quantize_rows(keys, scale_ue8m0)
        pool_scales[page, offset] = scales
        pool_keys, keys = pool_keys.view(torch.uint8), keys.view(torch.uint8)
    pool_keys[page, offset] = keys


STORE_INDEX_KEYS = define(
    "store_index_keys(Tensor(a!) pool, Tensor keys, Tensor slots, bool scale_ue8m0)",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.store_index_keys"},
)


def store_index_keys(
    pool: Tensor, keys: Tensor, slots: Tensor, scale_ue8m0: bool = False, *, provider: str | None = None
) -> None:
    """Writes new indexer keys into a pool in place.

    Args:
        pool: [P, 64, D] in the dtype of the keys, or uint8 [P, 64*D + 256] (fp8, see layout).
        keys: [T, D] after norm and rope.
        slots: int64 [T], physical slots; -1 (padding) and any other slot outside the pool write nothing.
        scale_ue8m0: for fp8, round each token's scale up to a power of two.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.store_index_keys(pool, keys, slots, scale_ue8m0, provider=provider)

"""store_latents: writes latents and rope keys of new tokens into a page pool, quantising for an fp8 pool."""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import (
    FP8,
    FP8_MAX,
    LATENT_GROUP,
    PAGE,
    check_dtype,
    check_latent_pool,
    check_shape,
    latent_groups,
    split_latent_pool,
    valid_slots,
)
from compiled_dsa.custom_ops.registry import define

MIN_SCALE = 1e-4


def check(pool: Tensor, latents: Tensor, rope: Tensor, slots: Tensor) -> None:
    check_shape("latents", latents, None, None)
    check_shape("rope", rope, latents.shape[0], None)
    check_shape("slots", slots, latents.shape[0])
    check_dtype("slots", slots, torch.int64)
    check_latent_pool(pool, latents.shape[1], rope.shape[1])
    if pool.dtype != torch.uint8:
        check_dtype("latents", latents, pool.dtype)
        check_dtype("rope", rope, pool.dtype)


def power_of_two_ceil(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for positive normal fp32 x; exact, unlike exp2(ceil(log2(x)))."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantize_latents(latents: Tensor) -> tuple[Tensor, Tensor]:
    """[T, L] -> (e4m3 codes [T, L], fp32 scales [T, ceil(L/128)]); scale = 2^ceil(log2(max(amax/448, 1e-4)))."""
    T, L = latents.shape
    G = latent_groups(L)
    groups = torch.nn.functional.pad(latents.float(), (0, G * LATENT_GROUP - L)).view(T, G, LATENT_GROUP)
    scales = power_of_two_ceil((groups.abs().amax(-1) / FP8_MAX).clamp(min=MIN_SCALE))
    codes = (groups / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes.view(T, G * LATENT_GROUP)[:, :L], scales


def reference(pool: Tensor, latents: Tensor, rope: Tensor, slots: Tensor) -> None:
    """Token t goes to physical slot ``slots[t]``; a slot outside the pool (-1: padding) writes nothing."""
    kept = valid_slots(slots, pool.shape[0])
    slots, latents, rope = slots[kept], latents[kept], rope[kept]
    page, offset = slots // PAGE, slots % PAGE
    pool_latents, pool_scales, pool_rope = split_latent_pool(pool, latents.shape[1], rope.shape[1])
    if pool_scales is not None:
        latents, scales = quantize_latents(latents)
        pool_scales[page, offset] = scales
        # index_put is not implemented for e4m3: the codes are moved as bytes
        pool_latents, latents = pool_latents.view(torch.uint8), latents.contiguous().view(torch.uint8)
    pool_latents[page, offset] = latents
    pool_rope[page, offset] = rope.to(pool_rope.dtype)


STORE_LATENTS = define(
    "store_latents(Tensor(a!) pool, Tensor latents, Tensor rope, Tensor slots)",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.store_latents"},
)


def store_latents(pool: Tensor, latents: Tensor, rope: Tensor, slots: Tensor, *, provider: str | None = None) -> None:
    """Writes new tokens into a latent pool in place.

    Args:
        pool: [P, 64, L+R] in the dtype of the latents, or uint8 [P, 64, L + 4*ceil(L/128) + 2R] (fp8, see layout).
        latents: [T, L] after its norm.
        rope: [T, R] after the rotation, pairs in place.
        slots: int64 [T], physical slots; -1 (padding) and any other slot outside the pool write nothing.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.store_latents(pool, latents, rope, slots, provider=provider)

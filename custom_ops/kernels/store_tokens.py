"""store_tokens in Triton: three programs a token, for its queries, its latents and its index key.

One launch in place of seven (three norms, two ropes, two stores); each program waits for nothing but its own columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import (
    dependent_launch,
    early_start,
    refuses_device,
    refuses_dtype,
    refuses_strides,
    wait_for_kernel_in_front,
)
from compiled_dsa.custom_ops.kernels.rope import angles, pair_of, rotate_first, rotated
from compiled_dsa.custom_ops.kernels.store_index_keys import write_key
from compiled_dsa.custom_ops.kernels.store_latents import latent_columns, write_latents
from compiled_dsa.custom_ops.layout import PAGE, latent_groups, split_index_pool, split_latent_pool


def refuses(
    latent_pool, index_pool, q_lora, q_a, kv, k, q_norm, kv_norm, k_norm, k_norm_bias, cos, sin, slots, eps, k_eps,
    interleaved, index_interleaved, scale_ue8m0,
) -> str | None:  # fmt: skip
    return (
        refuses_device(index_pool)
        or refuses_dtype(q_lora=q_lora, q_a=q_a, kv=kv, k=k, k_norm=k_norm, k_norm_bias=k_norm_bias, cos=cos)
        or refuses_strides(
            q_lora=q_lora, q_a=q_a, kv=kv, k=k, q_norm=q_norm, kv_norm=kv_norm, k_norm=k_norm, k_norm_bias=k_norm_bias,
            cos=cos, sin=sin, slots=slots,
        )
    )  # fmt: skip


@triton.jit
def _normalised(x, weight, eps, size: tl.constexpr):
    """A root-mean-square norm that rounds as Hugging Face's: normalised in fp32, to the weight's dtype, then weighted.

    ``x``: fp32, 0 past ``size``.
    """
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    dtype: tl.constexpr = weight.dtype
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _store_latents(
    pool_latents, pool_scales, pool_rope, kv, weight, cos, sin, eps, L: tl.constexpr, R: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, R_PADDED: tl.constexpr, FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Pointers are those of the row and of its slot."""
    column = latent_columns(GROUPS_PADDED)
    w = tl.load(weight + column, mask=column < L, other=0.0)
    x = tl.load(kv + column, mask=column < L, other=0.0).to(w.dtype).to(tl.float32)
    write_latents(pool_latents, pool_scales, _normalised(x, w, eps, L), L, GROUPS, FP8)
    if R > 0:
        r = tl.arange(0, R_PADDED)
        x = tl.load(kv + L + r, mask=r < R, other=0.0).to(w.dtype).to(tl.float32)
        x = rotate_first(x, kv + L, r, r < R, cos, sin, R, INTERLEAVED, w.dtype).to(w.dtype)
        tl.store(pool_rope + r, x.to(pool_rope.dtype.element_ty), mask=r < R)


@triton.jit
def _store_key(
    pool_keys, pool_scales, k, weight, bias, cos, sin, slot, keys_page, scales_page, eps, DTYPE: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, D_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """``k``, ``cos`` and ``sin`` point at the row."""
    d = tl.arange(0, D_PADDED)
    x = tl.load(k + d, mask=d < D, other=0.0).to(DTYPE).to(tl.float32)
    mean = tl.sum(x) / D
    centred = tl.where(d < D, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    y = centred * scale * w + b
    if R > 0:
        turned = d < R
        other, angle, second = pair_of(d, R, INTERLEAVED)
        c, s = angles(cos, sin, angle, turned)
        other = tl.where(turned, other, 0)
        z = tl.load(k + other, mask=turned, other=0.0).to(DTYPE).to(tl.float32)
        w = tl.load(weight + other, mask=turned, other=0.0).to(tl.float32)
        b = tl.load(bias + other, mask=turned, other=0.0).to(tl.float32)
        y = tl.where(turned, rotated(y, (z - mean) * scale * w + b, c, s, second), y)
    write_key(pool_keys, pool_scales, tl.where(d < D, y, 0.0), slot, keys_page, scales_page, D, True, UE8M0)


@triton.jit(do_not_specialize=["latent_capacity", "index_capacity"])
def _store(
    pool_latents,  # [slots, L] codes or model dtype
    pool_latent_scales,  # [slots, G] fp32, for an fp8 pool
    pool_rope,  # [slots, R]
    pool_keys,  # [P, 64, D] codes
    pool_key_scales,  # [P, 64] fp32
    q_lora,  # [T, Q]
    q_a,
    kv,
    k,
    q_norm,
    kv_norm,
    k_norm,
    k_norm_bias,
    cos,
    sin,
    slots,
    latent_capacity,
    index_capacity,
    latents_slot,
    latent_scales_slot,
    rope_slot,
    keys_page,
    key_scales_page,
    q_lora_row,
    q_a_row,
    kv_row,
    k_row,
    cos_row,
    sin_row,
    eps,
    k_eps,
    Q: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    Q_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr,
    D_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    UE8M0: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        wait_for_kernel_in_front()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    if part == 0:
        column = tl.arange(0, Q_PADDED)
        w = tl.load(q_norm + column, mask=column < Q, other=0.0)
        x = tl.load(q_a + row * q_a_row + column, mask=column < Q, other=0.0).to(w.dtype).to(tl.float32)
        tl.store(q_lora + row * q_lora_row + column, _normalised(x, w, eps, Q), mask=column < Q)
    else:
        slot = tl.load(slots + row)
        if part == 1:
            if (slot >= 0) & (slot < latent_capacity):
                _store_latents(
                    pool_latents + slot * latents_slot, pool_latent_scales + slot * latent_scales_slot,
                    pool_rope + slot * rope_slot, kv + row * kv_row, kv_norm, cos, sin, eps, L, R, GROUPS,
                    GROUPS_PADDED, R_PADDED, FP8, INTERLEAVED,
                )  # fmt: skip
        elif (slot >= 0) & (slot < index_capacity):
            _store_key(
                pool_keys, pool_key_scales, k + row * k_row, k_norm, k_norm_bias, cos, sin, slot, keys_page,
                key_scales_page, k_eps, q_lora.dtype.element_ty, D, R, D_PADDED, INDEX_INTERLEAVED, UE8M0,
            )  # fmt: skip


def run(
    latent_pool: Tensor, index_pool: Tensor, q_lora: Tensor, q_a: Tensor, kv: Tensor, k: Tensor, q_norm: Tensor,
    kv_norm: Tensor, k_norm: Tensor, k_norm_bias: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, eps: float,
    k_eps: float, interleaved: bool, index_interleaved: bool, scale_ue8m0: bool,
) -> None:  # fmt: skip
    (T, Q), L, D = q_lora.shape, kv_norm.shape[0], k.shape[1]
    R = kv.shape[1] - L
    if T == 0:
        return
    latents, latent_scales, rope = split_latent_pool(latent_pool, L, R)
    keys, key_scales = split_index_pool(index_pool)
    fp8 = latent_scales is not None
    _store[(T, 3)](
        latents,
        latent_scales if fp8 else latents,
        rope,
        keys,
        key_scales,
        q_lora,
        q_a,
        kv,
        k,
        q_norm,
        kv_norm,
        k_norm,
        k_norm_bias,
        cos,
        sin,
        slots,
        latent_pool.shape[0] * PAGE,
        index_pool.shape[0] * PAGE,
        latents.stride(1),
        latent_scales.stride(1) if fp8 else 0,
        rope.stride(1),
        keys.stride(0),
        key_scales.stride(0),
        q_lora.stride(0),
        q_a.stride(0),
        kv.stride(0),
        k.stride(0),
        cos.stride(0),
        sin.stride(0),
        eps,
        k_eps,
        Q=Q,
        L=L,
        R=R,
        D=D,
        Q_PADDED=triton.next_power_of_2(Q),
        GROUPS=latent_groups(L),
        GROUPS_PADDED=triton.next_power_of_2(latent_groups(L)),
        R_PADDED=triton.next_power_of_2(max(R, 1)),
        D_PADDED=triton.next_power_of_2(D),
        FP8=fp8,
        INTERLEAVED=interleaved,
        INDEX_INTERLEAVED=index_interleaved,
        UE8M0=scale_ue8m0,
        **early_start(dependent_launch(index_pool.device)),
    )

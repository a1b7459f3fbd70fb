"""store_tokens: what a layer makes of its hidden states, from their products to normalised queries and stored keys.

The norms, ropes and quantisations between the first GEMM of a layer and its second, and both cache stores.

Legend: T rows, Q q_lora rank, L latent dim, R rope dim, D index head dim.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import (
    check_dtype,
    check_index_pool,
    check_latent_pool,
    check_shape,
    compute_dtype,
)
from compiled_dsa.custom_ops.registry import define
from compiled_dsa.custom_ops.rope import rotate, rotate_part
from compiled_dsa.custom_ops.store_index_keys import STORE_INDEX_KEYS
from compiled_dsa.custom_ops.store_latents import STORE_LATENTS


def check(
    latent_pool, index_pool, q_lora, q_a, kv, k, q_norm, kv_norm, k_norm, k_norm_bias, cos, sin, slots, eps, k_eps,
    interleaved, index_interleaved, scale_ue8m0,
) -> None:  # fmt: skip
    check_shape("q_lora", q_lora, None, None)
    check_shape("cos", cos, None, None)
    check_shape("k", k, None, None)
    check_shape("kv", kv, None, None)
    (T, Q), R, D = q_lora.shape, 2 * cos.shape[1], k.shape[1]
    L = kv.shape[1] - R
    if L < 1 or R > D:
        raise ValueError(
            f"cos has {cos.shape[1]} angles, for {R} rope values; kv of {kv.shape[1]} columns must have more and k of "
            f"{D} not fewer"
        )
    for name, tensor, columns in (("q_a", q_a, Q), ("kv", kv, L + R), ("k", k, D), ("cos", cos, R // 2)):
        check_shape(name, tensor, T, columns)
    check_shape("sin", sin, *cos.shape)
    check_dtype("sin", sin, cos.dtype)
    for name, tensor, size in (
        ("q_norm", q_norm, Q), ("kv_norm", kv_norm, L), ("k_norm", k_norm, D), ("k_norm_bias", k_norm_bias, D),
    ):  # fmt: skip
        check_shape(name, tensor, size)
    check_dtype("q_norm", q_norm, q_lora.dtype)
    check_dtype("kv_norm", kv_norm, q_lora.dtype)
    check_shape("slots", slots, T)
    check_dtype("slots", slots, torch.int64)
    check_latent_pool(latent_pool, L, R, "latent_pool")
    if latent_pool.dtype != torch.uint8:
        check_dtype("latent_pool", latent_pool, q_lora.dtype)
    check_dtype("index_pool", index_pool, torch.uint8)
    check_index_pool(index_pool, D, "index_pool")


def reference(
    latent_pool, index_pool, q_lora, q_a, kv, k, q_norm, kv_norm, k_norm, k_norm_bias, cos, sin, slots, eps, k_eps,
    interleaved, index_interleaved, scale_ue8m0,
) -> None:  # fmt: skip
    dtype, wide = q_lora.dtype, compute_dtype(q_lora.dtype)
    L = kv_norm.shape[0]

    def normalised(x: Tensor, weight: Tensor) -> Tensor:
        h = x.to(dtype).to(wide)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return weight * h.to(dtype)

    q_lora.copy_(normalised(q_a, q_norm))
    rope = rotate(kv[:, L:].to(dtype).to(wide), cos.to(wide), sin.to(wide), interleaved=interleaved).to(dtype)
    STORE_LATENTS.reference(latent_pool, normalised(kv[:, :L], kv_norm), rope, slots)
    keys = torch.nn.functional.layer_norm(k.to(dtype).float(), k_norm.shape, k_norm.float(), k_norm_bias.float(), k_eps)
    keys = rotate_part(keys, cos.float(), sin.float(), interleaved=index_interleaved, last=False)
    STORE_INDEX_KEYS.reference(index_pool, keys, slots, scale_ue8m0)


STORE_TOKENS = define(
    "store_tokens(Tensor(a!) latent_pool, Tensor(b!) index_pool, Tensor(c!) q_lora, Tensor q_a, Tensor kv, Tensor k, "
    "Tensor q_norm, Tensor kv_norm, Tensor k_norm, Tensor k_norm_bias, Tensor cos, Tensor sin, Tensor slots, "
    "float eps, float k_eps, bool interleaved, bool index_interleaved, bool scale_ue8m0)",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.store_tokens"},
)


def store_tokens(
    latent_pool: Tensor,
    index_pool: Tensor,
    q_lora: Tensor,
    q_a: Tensor,
    kv: Tensor,
    k: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    k_norm: Tensor,
    k_norm_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    eps: float,
    k_eps: float,
    interleaved: bool,
    index_interleaved: bool,
    scale_ue8m0: bool = False,
    *,
    provider: str | None = None,
) -> None:
    """Normalises queries, and stores latents and index keys of new tokens, in place.

    What comes before the norms is rounded to the dtype of ``q_lora`` first, so products may come in fp32. Root-mean-
    square norms round as Hugging Face's do; the index keys' LayerNorm, and all ropes, are computed in fp32.

    Args:
        latent_pool: as of ``store_latents``; fp8 or in the dtype of q_lora.
        index_pool: uint8, as of ``store_index_keys``.
        q_lora: [T, Q], gets q_a after its norm, in the dtype of the model.
        q_a, kv, k: [T, Q], [T, L+R] and [T, D], products of the hidden states: compressed queries, latents with their
            rope, index keys. Any strides but the last, as of columns of one product.
        q_norm, kv_norm: [Q], [L], weights of the norms with ``eps``, in the dtype of q_lora.
        k_norm, k_norm_bias: [D], of the LayerNorm with ``k_eps``.
        cos, sin: [T, R/2], of one dtype, one angle a pair; the first R values of an index key are rotated by the same.
        slots: int64 [T], physical slots; -1 (padding) and any other slot outside the pools write nothing there.
        interleaved, index_interleaved: pairs are (0,1),(2,3).. when True, (0,R/2),(1,R/2+1).. when False.
        scale_ue8m0: as of ``store_index_keys``.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.store_tokens(
        latent_pool, index_pool, q_lora, q_a, kv, k, q_norm, kv_norm, k_norm, k_norm_bias, cos, sin, slots, eps, k_eps,
        interleaved, index_interleaved, scale_ue8m0, provider=provider,
    )  # fmt: skip

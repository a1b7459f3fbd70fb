"""unabsorb: values of each head from its attended latents, written row by row.

Legend: T rows, H heads, V value dim, L latent dim.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import check_dtype, check_shape
from compiled_dsa.custom_ops.registry import define


def check(latents: Tensor, w_uv: Tensor, out: Tensor) -> None:
    check_shape("latents", latents, None, None, None)
    check_shape("w_uv", w_uv, latents.shape[1], None, latents.shape[2])
    check_shape("out", out, latents.shape[0], latents.shape[1], w_uv.shape[1])
    check_dtype("w_uv", w_uv, latents.dtype)
    check_dtype("out", out, latents.dtype)


def reference(latents: Tensor, w_uv: Tensor, out: Tensor) -> None:
    torch.bmm(latents.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))


UNABSORB = define(
    "unabsorb(Tensor latents, Tensor w_uv, Tensor(a!) out)",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.unabsorb"},
    library=True,
)


def unabsorb(latents: Tensor, w_uv: Tensor, out: Tensor, *, provider: str | None = None) -> None:
    """out[t, h] = w_uv[h] @ latents[t, h], as one batched GEMM over heads.

    An op, since torch.compile has no ``out=`` with strides: what ``torch.bmm`` makes lies head by head, and would be
    copied before the output projection reads it row by row.

    Args:
        latents: [T, H, L], head by head or row by row in memory.
        w_uv: [H, V, L], W_UV of each head, dtype of latents.
        out: [T, H, V], dtype of latents; contiguous for the output projection to read it without a copy.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.unabsorb(latents, w_uv, out, provider=provider)

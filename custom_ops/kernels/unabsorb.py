"""unabsorb in Triton for few rows: products beside each other by the kernels of skinny_linear."""

from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import refuses_strides
from compiled_dsa.custom_ops.kernels.skinny_linear import multiply, refuses_products

MOST_TILES = 2.0  # as a share of the multiprocessors: two programs of so few columns fit on one


def refuses(latents: Tensor, w_uv: Tensor, out: Tensor) -> str | None:
    strides = refuses_strides(latents=latents, w_uv=w_uv, out=out)
    return strides or refuses_products("latents", latents.transpose(0, 1), "w_uv", w_uv, MOST_TILES)


def run(latents: Tensor, w_uv: Tensor, out: Tensor) -> None:
    multiply(latents.transpose(0, 1), w_uv, out.transpose(0, 1))

"""sparse_mla_decode on Hopper: which of the Gluon kernels serves a call, and how the call is cut; from shapes alone.

sparse_mla_gluon computes blocks of 64 heads; over fp8 pools, sparse_mla_few_heads up to 32. A call that neither can
serve is the plain Triton kernel's.

Legend: T rows, H heads, L latent dim, R rope dim, K lanes of the selection.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import HOPPER, multiprocessors
from compiled_dsa.custom_ops.kernels.sparse_mla_combine import combine, empty_parts
from compiled_dsa.custom_ops.layout import PAGE

DIMS = (512, 64)  # L, R
HEADS = 64  # of a tile
MIN_HEADS = 8  # fewer are the plain kernel's: sparse_mla_gluon computes 64 however many there are
FEW_HEADS = 32  # up to these, over fp8 pools, the kernel that has heads as columns
MAX_SPLITS = 32

# Microseconds of a step, which is two blocks of 64 keys, of what a tile costs apart from its steps, and of the kernel
# that combines apart from the bytes that it moves; those a microsecond. Fitted to what an H200 takes for 64 and 128
# heads over fp8 pools; fewer are cut alike.
_STEP, _TILE, _COMBINE, _BYTES = 5.2, 9.0, 2.0, 4.0e6


class Cut(NamedTuple):
    splits: int
    sides: int  # blocks that a program takes a step


ALONE = Cut(1, 2)  # of a call whose rows must not depend on each other


def refuses_machine(pool: Tensor) -> str | None:
    """Why no Gluon kernel runs where ``pool`` lies; Gluon is imported only where it does."""
    if pool.device.type != "cuda" or torch.cuda.get_device_capability(pool.device) != HOPPER:
        return f"needs a CUDA device of compute capability {HOPPER}"
    try:
        from compiled_dsa.custom_ops.kernels import sparse_mla_gluon  # noqa: F401
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None


def refuses(q_latent: Tensor, q_rope: Tensor, pool: Tensor, scale: float, out: Tensor) -> str | None:
    """Why a call of non-empty arguments is none of the Gluon kernels'."""
    (H, L), R = q_latent.shape[1:], q_rope.shape[2]
    if q_latent.dtype != torch.bfloat16:
        return f"queries have dtype {q_latent.dtype}, not bfloat16"
    if (L, R) != DIMS or H < MIN_HEADS:
        return f"{H} heads of {L}+{R}; it takes {MIN_HEADS} heads and more, of 512+64"
    if not scale > 0:
        return f"scale={scale} is not above 0"
    for name, tensor in (("q_latent", q_latent), ("q_rope", q_rope), ("pool", pool), ("out", out)):
        if tensor.data_ptr() % 16 or any(stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]):
            return f"{name} or a stride of it is not aligned to 16 bytes"
    return refuses_machine(pool)


def cut(T: int, H: int, width: int, sms: int) -> Cut:
    """The cut of T rows of ``width`` lanes that the model finds fastest on ``sms`` multiprocessors."""
    tiles, blocks = T * triton.cdiv(H, HEADS), max(1, triton.cdiv(width, PAGE))
    if tiles * blocks <= sms // 2 and blocks <= MAX_SPLITS:  # more programs wait for each other's loads
        return Cut(blocks, 1)
    steps = triton.cdiv(blocks, 2)

    def cost(splits: int) -> float:
        waves = triton.cdiv(tiles * splits, sms)
        combining = _COMBINE + splits * T * H * DIMS[0] * 4 / _BYTES if splits > 1 else 0.0
        return waves * (triton.cdiv(steps, splits) * _STEP + _TILE) + combining

    return Cut(min(range(1, min(MAX_SPLITS, steps) + 1), key=cost), 2)


def run(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, width: int, deterministic: bool
) -> None:
    """As ``sparse_mla.attend``, of a call that is not refused."""
    T, H, _ = q_latent.shape
    chosen = ALONE if deterministic else cut(T, H, width, multiprocessors(q_latent.device))
    launch(q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, chosen, width)


def launch(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, chosen: Cut, width: int
) -> None:
    if pool.dtype == torch.uint8 and q_latent.shape[1] <= FEW_HEADS:
        from compiled_dsa.custom_ops.kernels import sparse_mla_few_heads as kernel

        if chosen.sides == 1:  # its steps are of two blocks
            chosen = Cut(triton.cdiv(chosen.splits, 2), 2)
    else:
        from compiled_dsa.custom_ops.kernels import sparse_mla_gluon as kernel  # type: ignore[no-redef]

    selection = (q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale)
    if chosen.splits == 1:
        kernel.launch(*selection, sinks, out, lse, width, chosen.sides)
        return
    # in bf16: rounding twice costs 1 - cos of 4e-6 at most, where FlashMLA's tests allow 5e-6
    parts, parts_lse = empty_parts(chosen.splits, out, out.dtype)
    kernel.launch(*selection, None, parts, parts_lse, width, chosen.sides)
    combine(parts, parts_lse, sinks, out, lse)

"""Whether mla_prefill attends expanded keys, and in which tiles: decided on the host, from shapes alone.

Expanded keys pay where a whole call attends all that its rows see (no ``topk``), so that the GEMMs which absorb queries
and un-absorb outputs fall away too. In CUDA graphs on an H200, bf16 pool, absorbed and expanded in ms. Measured when
the kernels served short rows of a selection too, in three launches more, and not since:

| rows | DeepSeek-V3.2 (128 heads) | GLM-5 (64 heads) |
|---|---|---|
| 2048 from position 0 | 1.203, 0.680 | 0.664, 0.575 |
| 8 requests of 512 from position 0 | 1.257, 0.852 | 0.727, 0.763 |

With a selection they would serve its short rows alone, those whose lanes are positions 0, 1, .. of their request, while
the others keep those GEMMs. That never paid (4096 rows from 0, of which 2048 are short: 3.208, 3.221 and 1.699, 1.928),
and so it is not done.

Legend: T rows, B requests, H heads, N nope dim, R rope dim, V value dim, L latent dim.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import multiprocessors

# Times for each FLOP beside those of the absorbed attention of the Gluon kernel (540 TFLOP/s). Measured in the first
# row of the table, DeepSeek-V3.2: attention 0.507 ms, 339 TFLOP/s; expansion 0.151 ms, 455 TFLOP/s. With them all of
# the table but the 512 rows of GLM-5 is expanded. An infinite cost of the expansion keeps every call absorbed.
ATTENTION_COST = 1.6
EXPANSION_COST = 1.2
WAVES = 1.0  # programs a multiprocessor, of which one runs at a time, that a group of heads must have at least

LONGEST = 4096  # tokens of a request that there is room for at most; K is not larger in any model

_SHARED_BYTES = 220 << 10  # of 227 KiB that a program may have on Hopper
_ALLOCATION = 512  # to whose multiples torch rounds


class Tiling(NamedTuple):
    """Attributes:
    rows, keys, warps, stages: of the attention.
    tokens, columns, depth, expand_warps, expand_stages: of the expansion; ``tokens`` is a multiple of ``keys``.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    tokens: int
    columns: int
    depth: int
    expand_warps: int
    expand_stages: int


class Plan(NamedTuple):
    """Attributes:
    tile: of both kernels.
    tokens: room for those of one request, whole tiles.
    heads: heads whose keys are expanded at a time.
    """

    tile: Tiling
    tokens: int
    heads: int


def refuses(q_nope: Tensor, kv_b: Tensor, out: Tensor, scale: float) -> str | None:
    """Why these arguments of the op, accepted otherwise, cannot be attended with expanded keys."""
    if not scale > 0:
        return f"scale={scale} is not above 0; maxima are taken before scores are scaled"
    for name, tensor in (("q_nope", q_nope), ("kv_b", kv_b), ("out", out)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} has strides {tensor.stride()}; its last dim must be dense"
    return None


def rows_to_repay(N: int, R: int, V: int, L: int) -> float:
    """Rows that must attend a token for its expansion to be repaid.

    It costs 2 L (N + V) FLOP a head, and saves 2 (2L + R) - 2 (N + R + V) for each row. DeepSeek-V3.2 (N, R, V, L =
    128, 64, 128, 512): 273 rows, GLM-5 (192, 64, 256, 512): 1024. The absorption, which falls away too (2 L (N + V) a
    row and head), is not counted.
    """
    saved = 2 * L + R - ATTENTION_COST * (N + R + V)
    return EXPANSION_COST * L * (N + V) / saved if saved > 0 else math.inf


def plan(
    T: int, B: int, dims: tuple[int, int, int, int, int], width: int, dtype: torch.dtype, device, scratch_bytes: int
) -> Plan | None:
    """How a call without ``topk`` attends expanded keys; None where it should not, or they do not fit.

    Args:
        dims: H, N, R, V, L.
        width: tokens that a row attends at most.
    """
    H, N, R, V, L = dims
    tile = tiling(N, R, V, dtype)
    if tile is None or min(B, H, N + V, width) == 0 or width > LONGEST:
        return None
    if B * rows_to_repay(N, R, V, L) > T:
        return None
    tokens = triton.cdiv(width, tile.tokens) * tile.tokens
    others = _allocated(8 * B) + _allocated(B * tokens * R * dtype.itemsize)
    heads = min(H, (scratch_bytes - others - _ALLOCATION) // (B * tokens * (N + V) * dtype.itemsize))
    blocks = triton.cdiv(T, tile.rows)
    if heads < 1 or heads * blocks < min(WAVES * multiprocessors(device), H * blocks):
        return None
    return Plan(tile, tokens, heads)


def _allocated(size: int) -> int:
    return triton.cdiv(size, _ALLOCATION) * _ALLOCATION


def tiling(N: int, R: int, V: int, dtype: torch.dtype) -> Tiling | None:
    """Tiles of the two kernels, or None where the dims are too large for any.

    The accumulator of the attention is to stay in registers, queries and two stages of keys in shared memory.
    """
    columns = min(256, padded(N + V))
    if dtype == torch.float32:  # exact dots run on the ordinary units, unrolled: small tiles
        return Tiling(32, 32, 4, 1, 32, min(32, columns), 32, 4, 1) if padded(V) <= 256 else None
    first, second = chunks(N)
    key = first + second + (padded(R) if R else 0)
    for rows, keys in ((128, 128), (128, 64), (64, 64), (64, 32), (64, 16)):
        held = rows * key + 2 * keys * (key + padded(V))
        if held * dtype.itemsize <= _SHARED_BYTES and rows * padded(V) <= 128 * 256:
            return Tiling(rows, keys, 8 if rows == 128 else 4, 2, 128, columns, 64, 8, 3)
    return None


def chunks(N: int) -> tuple[int, int]:
    """N as the sizes of one or two dots: 192 is 128 and 64; the last is padded, 0 where there is none."""
    first = max(16, 1 << (N.bit_length() - 1)) if N else 16
    return first, padded(N - first) if first < N else 0


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))

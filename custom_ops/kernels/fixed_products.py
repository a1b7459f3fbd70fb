"""Products whose rows have the same bits in any batch: tiles that do not depend on the number of rows.

GEMMs of a library choose tiles, and splits of what they sum over, by the number of rows. A deterministic mla_prefill
uses this kernel in their place.

What a product is compiled for besides (which strides are multiples of 16) changes how tiles are loaded, not their sums.

Legend: B products beside each other, T rows, K columns of x, N columns of the product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import dot_precision


@triton.jit(do_not_specialize=["T"])
def _multiply(
    x,  # [B, T, K]
    weight,  # [B, K, N]
    out,  # [B, T, N]
    T,
    N,
    K,
    x_product,
    x_row,
    x_column,
    w_product,
    w_row,
    w_column,
    out_product,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column_blocks = tl.cdiv(N, COLUMNS)
    product = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (row < T)[:, None]
    is_column = (column < N)[None, :]
    x += product * x_product + row[:, None] * x_row
    weight += product * w_product + column[None, :] * w_column
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < K
        some = tl.load(x + depth[None, :] * x_column, mask=is_row & inside[None, :], other=0.0)
        w = tl.load(weight + depth[:, None] * w_row, mask=inside[:, None] & is_column, other=0.0)
        acc = tl.dot(some, w, acc=acc, input_precision=PRECISION)
    place = out + product * out_product + row[:, None] * out_row + column[None, :] * out_column
    tl.store(place, acc.to(out.dtype.element_ty), mask=is_row & is_column)


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[b, t] = x[b, t] @ weight[b] of x [B, T, K] and weight [B, K, N], one dtype, any strides."""
    B, T, K = x.shape
    N = weight.shape[2]
    if out.numel() == 0:
        return
    # exact fp32 dots run on the ordinary units, unrolled: small tiles
    rows, columns, depth, stages = (16, 32, 32, 1) if x.dtype == torch.float32 else (64, 128, 64, 3)
    _multiply[(triton.cdiv(T, rows) * triton.cdiv(N, columns), B)](
        x,
        weight,
        out,
        T,
        N,
        K,
        *x.stride(),
        *weight.stride(),
        *out.stride(),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        PRECISION=dot_precision(x.dtype),
        num_warps=4,
        num_stages=stages,
    )

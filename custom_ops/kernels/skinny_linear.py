"""skinny_linear in Triton: programs that are all resident at once share the memory's bandwidth evenly.

us on an H200, cuBLAS beside: output projection of V3.2 (7168 x 16384, 55.7 at peak bandwidth) of 1, 16, 64 rows 55.1,
56.3, 60.4 (59.5, 64.4, 62.6); first projections (2304 x 7168, 7.8) of 1 row 10.6 (12.7). Of more rows, tiles that are
fewer or more than the multiprocessors lose: 15.1 (13.9) and, for 32768 x 1536, 27.8 (27.2) of 16 rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import multiprocessors, refuses_device, refuses_dot, refuses_dtype
from compiled_dsa.custom_ops.skinny_linear import reference

MOST_ROWS = 64
FEW_TILES, MOST_TILES = 0.5, 1.0  # of several rows, as shares of the multiprocessors
_ONE, _FEW = (8, 512, 3), (64, 128, 6)  # rows and columns of weights in a tile, stages


@triton.jit
def _one_row(
    x, weight, out, N, K, w_row, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tile = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = None if EVEN else start + k < K
        w = tl.load(tile + start, mask=None if EVEN else inside[None, :], other=None if EVEN else 0.0)
        row = tl.load(x + start + k, mask=inside, other=None if EVEN else 0.0)
        sums += w.to(tl.float32) * row.to(tl.float32)[None, :]
    tl.store(out + n, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["T"])
def _few_rows(
    x, weight, out, T, N, K, x_row, w_row, out_row,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of weights are those of the tensor cores' tile, rows of x its columns."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, ROWS)
    tile = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :]
    columns = x + t.to(tl.int64)[None, :] * x_row + k[:, None]
    real = (t < T)[None, :]
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(tile + start)
            column = tl.load(columns + start, mask=real, other=0.0)
        else:
            inside = start + k < K
            w = tl.load(tile + start, mask=inside[None, :], other=0.0)
            column = tl.load(columns + start, mask=real & inside[:, None], other=0.0)
        sums = tl.dot(w, column, sums)
    place = out + t.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=real & (n < N)[:, None])


def refuses(x: Tensor, weight: Tensor, out: Tensor) -> str | None:
    return refuses_device(x) or refuses_dtype(x=x) or refuses_dot(x.dtype)


def run(x: Tensor, weight: Tensor, out: Tensor) -> None:
    T, K = x.shape
    N = weight.shape[0]
    tiles = triton.cdiv(N, _FEW[0]) / multiprocessors(x.device)
    one = T == 1 and N > 0
    few = 1 < T <= MOST_ROWS and FEW_TILES <= tiles <= MOST_TILES
    dense = x.stride(1) == weight.stride(1) == out.stride(1) == 1
    if x.element_size() > 2 or not dense or not (one or few):
        reference(x, weight, out)
        return
    block_n, block_k, stages = _ONE if one else _FEW
    grid = (triton.cdiv(N, block_n),)
    tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "EVEN": K % block_k == 0, "STAGES": stages, "num_warps": 4}
    if one:
        _one_row[grid](x, weight, out, N, K, weight.stride(0), **tile)
    else:
        rows = max(16, triton.next_power_of_2(T))
        _few_rows[grid](
            x, weight, out, T, N, K, x.stride(0), weight.stride(0), out.stride(0), ROWS=rows, **tile
        )  # fmt: skip

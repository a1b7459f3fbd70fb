"""skinny_linear in Triton: programs that are all resident at once share the memory's bandwidth evenly.

us on an H200, cuBLAS beside: output projection of V3.2 (7168 x 16384, 55.7 at peak bandwidth) of 1, 16, 64 rows 55.1,
56.3, 60.4 (59.5, 64.4, 62.6); first projections (2304 x 7168, 7.8) of 1 row 10.6 (12.7). Of more rows, tiles that are
fewer or more than the multiprocessors lose: 15.1 (13.9) and, for 32768 x 1536, 27.8 (27.2) of 16 rows; 57.1 and 60.0
(cuBLASLt 51.1 and 52.0) of 16 and 64 rows with GLM-5's output projection, whose tiles fill 0.73 of them.

Fetching weights to L2 while the kernel in front runs does not pay: a decode layer of one row took 142.8 us with it,
139.5 without. Nor does a ring that the copy engine fills, its first weights under way before the kernel in front ends,
with programs that share the columns of a tile: by itself 14 to 20 % faster for first projections of 2 to 64 rows and 5
to 10 for second ones, in layers of 16 to 128 rows as fast as these kernels and cuBLAS.

Legend: B products beside each other, T rows, N rows and K columns of the weights.
"""

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import (
    dependent_launch,
    early_start,
    multiprocessors,
    refuses_device,
    refuses_dot,
    refuses_dtype,
    refuses_strides,
    wait_for_kernel_in_front,
)

MOST_ROWS = 64
FEWEST_TILES, MOST_TILES = 0.8, 1.0  # of several rows, as shares of the multiprocessors
_ONE, _FEW = (8, 512, 3), (64, 128, 6)  # rows and columns of weights in a tile, stages


@triton.jit
def _one_row(
    x, weight, out, N, K, x_product, w_product, w_row, out_product,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_kernel_in_front()
    product = tl.program_id(1).to(tl.int64)
    x += product * x_product
    weight += product * w_product
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tile = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = None if EVEN else start + k < K
        w = tl.load(tile + start, mask=None if EVEN else inside[None, :], other=None if EVEN else 0.0)
        some = tl.load(x + start + k, mask=inside, other=None if EVEN else 0.0)
        sums += w.to(tl.float32) * some.to(tl.float32)[None, :]
    tl.store(out + product * out_product + n, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["T"])
def _few_rows(
    x, weight, out, T, N, K, x_product, x_row, w_product, w_row, out_product, out_row,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of weights are those of the tensor cores' tile, rows of x its columns."""
    if EARLY:
        wait_for_kernel_in_front()
    product = tl.program_id(1).to(tl.int64)
    weight += product * w_product
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, ROWS)
    tile = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :]
    columns = x + product * x_product + t.to(tl.int64)[None, :] * x_row + k[:, None]
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
    place = out + product * out_product + t.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=real & (n < N)[:, None])


def refuses(x: Tensor, weight: Tensor, out: Tensor) -> str | None:
    return refuses_strides(x=x, weight=weight, out=out) or refuses_products("x", x[None], "weight", weight[None])


def refuses_products(
    name: str, x: Tensor, weight_name: str, weight: Tensor, most_tiles: float = MOST_TILES
) -> str | None:
    """Why x [B, T, K] and weight [B, N, K], arguments of these names, are left to the library, or None.

    ``most_tiles``: of several rows, as a share of the multiprocessors.
    """
    reason = refuses_device(x) or refuses_dtype(**{name: x}) or refuses_dot(x.dtype)
    if reason is not None:
        return reason
    if x.element_size() != 2:
        return f"{name} has dtype {x.dtype}; it must be of two bytes"
    T = x.shape[1]
    if T > MOST_ROWS:
        return f"{name} has {T} rows; at most {MOST_ROWS} are taken"
    if weight.numel() == 0:
        return f"{weight_name} has shape {tuple(weight.shape)}; it must have elements"
    tiles, full = len(weight) * triton.cdiv(weight.shape[1], _FEW[0]), multiprocessors(x.device)
    fewest, most = FEWEST_TILES * full, most_tiles * full
    if T > 1 and not fewest <= tiles <= most:
        return (
            f"{weight_name} makes {tiles} tiles; of several rows the library is faster but for {fewest:g} to {most:g}"
        )
    return None


def run(x: Tensor, weight: Tensor, out: Tensor) -> None:
    multiply(x[None], weight[None], out[None])


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[b, t] = weight[b] @ x[b, t] of x [B, T, K] and weight [B, N, K], where ``refuses_products`` has no reason."""
    B, T, K = x.shape
    N = weight.shape[1]
    if T == 0:
        return
    block_n, block_k, stages = _ONE if T == 1 else _FEW
    grid = (triton.cdiv(N, block_n), B)
    options = {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN": K % block_k == 0,
        "STAGES": min(stages, triton.cdiv(K, block_k)),
        "num_warps": 4,
        **early_start(dependent_launch(x.device)),
    }
    if T == 1:
        _one_row[grid](
            x, weight, out, N, K, x.stride(0), weight.stride(0), weight.stride(1), out.stride(0), **options
        )  # fmt: skip
    else:
        rows = max(16, triton.next_power_of_2(T))
        _few_rows[grid](
            x, weight, out, T, N, K, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1), out.stride(0),
            out.stride(1), ROWS=rows, **options,
        )  # fmt: skip

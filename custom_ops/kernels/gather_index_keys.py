"""Index keys of requests laid end to end, for libraries that read no page table, with NaN where it can be seen.

Libraries take a product that is NaN for 0 (relu by fmaxf), so a NaN among codes would go unseen: here the scale of such
a key, and the weight of such a head of a query, becomes NaN, and with it the scores.

Legend: T rows, HI index heads, D index head dim, B requests, P pages, W columns of the page table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.layout import FP8, PAGE, index_dim

_VECTORS = 64  # of D codes, a program


@triton.jit
def _any_nan(words):
    """Of [N, M] words of 4 codes: [N] whether one of a vector is NaN, 0x7F or 0xFF."""
    found = ((words & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80  # 0x80808080
    return tl.max((found != 0).to(tl.int32), axis=1) > 0


@triton.jit(do_not_specialize=["pages"])
def _gather(
    words,  # int32 [P, PAGE (D + 4) / 4], the pool
    scales,  # the same as fp32
    page_table,  # int32 [B, W]
    codes_out,  # int32 [B W PAGE, D / 4]
    scales_out,  # fp32 [B W PAGE]
    width,
    pages,
    pool_page,
    table_row,
    WORDS: tl.constexpr,
    PAGE: tl.constexpr,
):
    entry = tl.program_id(0)
    page = tl.load(page_table + (entry // width).to(tl.int64) * table_row + entry % width)
    good = (page >= 0) & (page < pages)
    begin = tl.where(good, page, 0).to(tl.int64) * pool_page
    key = tl.arange(0, PAGE)
    offset = key[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    codes = tl.load(words + begin + offset)
    scale = tl.load(scales + begin + PAGE * WORDS + key)
    first = entry.to(tl.int64) * PAGE
    tl.store(codes_out + first * WORDS + offset, codes)
    tl.store(scales_out + first + key, tl.where(good & ~_any_nan(codes), scale, float("nan")))


def gather_index_keys(pool: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of all requests, those of a request in the order of its pages.

    Args:
        pool: uint8 [P, PAGE (D + 4)], P not 0, its pages aligned to 4 bytes.
        page_table: int32 [B, W], last dim dense.

    Returns:
        e4m3 [B W PAGE, D], and their scales, fp32 [B W PAGE]: NaN where a code is, and for pages outside the pool.
    """
    D, entries = index_dim(pool), page_table.numel()
    codes = torch.empty(entries * PAGE, D // 4, dtype=torch.int32, device=pool.device)
    scales = torch.empty(entries * PAGE, dtype=torch.float32, device=pool.device)
    words = pool.view(torch.int32)
    _gather[(entries,)](
        words,
        pool.view(torch.float32),
        page_table,
        codes,
        scales,
        page_table.shape[1],
        pool.shape[0],
        words.stride(0),
        page_table.stride(0),
        WORDS=D // 4,
        PAGE=PAGE,
    )
    return codes.view(FP8), scales


@triton.jit(do_not_specialize=["number"])
def _mark(
    words,  # int32 [T HI, D / 4], the queries
    weights,  # fp32 [T, HI]
    marked,  # fp32 [T HI]
    number,
    heads,
    weights_row,
    weights_head,
    WORDS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    inside = vector < number
    offset = vector[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    codes = tl.load(words + offset, mask=inside[:, None], other=0)
    weight = tl.load(weights + vector // heads * weights_row + vector % heads * weights_head, mask=inside, other=0.0)
    tl.store(marked + vector, tl.where(_any_nan(codes), float("nan"), weight), mask=inside)


def mark_weights(q: Tensor, weights: Tensor) -> Tensor:
    """fp32 [T, HI], contiguous: the weights, NaN for heads whose query holds a NaN.

    Args:
        q: e4m3 [T, HI, D], contiguous, aligned to 4 bytes.
        weights: fp32 [T, HI].
    """
    T, HI, D = q.shape
    marked = torch.empty(T, HI, dtype=torch.float32, device=q.device)
    _mark[(triton.cdiv(T * HI, _VECTORS),)](
        q.view(torch.int32),
        weights,
        marked,
        T * HI,
        HI,
        *weights.stride(),
        WORDS=D // 4,
        VECTORS=_VECTORS,
    )
    return marked

"""fp8 latents in bf16, for kernels that read nothing else: of a whole pool, or of the pages of a batch.

Those are laid end to end, as many as the page table has entries, however large the pool. Slots are then renumbered:
what pool page ``p`` held lies on page ``places[p]``.

Legend: P pages of the pool, B requests, W columns of the page table, L latent dim, R rope dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.layout import LATENT_GROUP, PAGE, latent_pool_shape, split_latent_pool

_TOKENS = 16  # of a program; divides a page
_IDS = 1024  # of a program


@triton.jit(do_not_specialize=["tokens", "width", "pages"])
def _dequantise(
    latents,
    scales,
    rope,
    out,
    page_table,  # int32 [B, W], if LISTED
    places,  # int32 [P], if LISTED
    tokens,  # of out
    width,
    pages,
    latents_slot,
    scales_slot,
    rope_slot,
    table_row,
    L: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    LISTED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS
    token = first + tl.arange(0, TOKENS)
    slot = token
    there = token < tokens
    if LISTED:
        entry = first // PAGE
        page = tl.load(page_table + entry // width * table_row + entry % width)
        good = (page >= 0) & (page < pages)
        if first % PAGE == 0:  # of a page that is listed twice, either place holds the same
            tl.store(places + page, entry.to(tl.int32), mask=good)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        there = token < tl.where(good, tokens, 0)
    there = there[:, None]
    slot = tl.where(there, slot[:, None], 0)
    token = token[:, None]
    column = tl.arange(0, L)[None, :]
    group = tl.arange(0, L // GROUP)[None, :]
    r = tl.arange(0, R)[None, :]
    c = tl.load(latents + slot * latents_slot + column, mask=there, other=0.0)
    s = tl.load(scales + slot * scales_slot + group, mask=there, other=0.0)
    k = tl.load(rope + slot * rope_slot + r, mask=there, other=0.0)
    c = tl.reshape(c.to(tl.float32), [TOKENS, L // GROUP, GROUP]) * s[:, :, None]
    dtype = out.dtype.element_ty
    tl.store(out + token * (L + R) + column, tl.reshape(c, [TOKENS, L]).to(dtype), mask=there)
    tl.store(out + token * (L + R) + L + r, k.to(dtype), mask=there)


@triton.jit(do_not_specialize=["columns", "pages"])
def _renumber(
    ids,  # int32 [rows, columns]
    places,  # int32 [P]
    out,  # int32 [rows, columns], contiguous
    columns,
    pages,
    ids_row,
    UNIT: tl.constexpr,
    IDS: tl.constexpr,
):
    column = tl.program_id(1) * IDS + tl.arange(0, IDS)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(ids + row * ids_row + column, mask=column < columns, other=-1)
    page = number // UNIT
    place = tl.load(places + page, mask=(number >= 0) & (page < pages), other=-1)
    tl.store(
        out + row * columns + column, tl.where(place >= 0, place * UNIT + number % UNIT, -1), mask=column < columns
    )


def dequantised_bytes(pages: int, L: int, R: int) -> int:
    """Bytes of so many fp8 pages in bf16."""
    return pages * PAGE * (L + R) * 2


def dequantise(pool: Tensor, L: int, R: int) -> Tensor:
    """An fp8 pool as a bf16 one [P, 64, L + R]; L and R are powers of two.

    70 to 90 us a call with its launch for 8,192 to 131,072 tokens (H200).
    """
    return _launch(pool, L, R, pool.shape[0], None, None)


def dequantise_pages(pool: Tensor, page_table: Tensor, L: int, R: int) -> tuple[Tensor, Tensor]:
    """(the pages of a table in bf16 [B W, 64, L + R], int32 places [P] of the pool's pages in it).

    A place is -1 for pages that the table does not name. The pages of entries outside the pool are not written.
    """
    places = torch.full((pool.shape[0],), -1, dtype=torch.int32, device=pool.device)
    return _launch(pool, L, R, page_table.numel(), page_table, places), places


def renumber(ids: Tensor, places: Tensor, unit: int, out: Tensor) -> Tensor:
    """``out``, contiguous int32 [rows, columns]: ids after dequantise_pages.

    They are slots where ``unit`` is a page's 64, and pages where it is 1. -1 for ids outside the pool and of pages that
    have no place.
    """
    rows, columns = ids.shape
    _renumber[(rows, triton.cdiv(columns, _IDS))](
        ids, places, out, columns, places.shape[0], ids.stride(0), UNIT=unit, IDS=_IDS
    )
    return out


def _launch(pool: Tensor, L: int, R: int, pages: int, page_table: Tensor | None, places: Tensor | None) -> Tensor:
    out = torch.empty(latent_pool_shape(pages, L, R, torch.bfloat16)[0], dtype=torch.bfloat16, device=pool.device)
    latents, scales, rope = split_latent_pool(pool, L, R)
    listed = page_table is not None
    _dequantise[(triton.cdiv(pages * PAGE, _TOKENS),)](
        latents,
        scales,
        rope,
        out,
        page_table if listed else out,
        places if listed else out,
        pages * PAGE,
        page_table.shape[1] if listed else 1,
        pool.shape[0],
        latents.stride(1),
        scales.stride(1),
        rope.stride(1),
        page_table.stride(0) if listed else 0,
        L=L,
        R=R,
        GROUP=LATENT_GROUP,
        TOKENS=_TOKENS,
        PAGE=PAGE,
        LISTED=listed,
    )
    return out

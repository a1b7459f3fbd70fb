"""Byte layouts of the paged caches. Every shape and offset in the project is derived here.

Legend: P pages, 64 tokens a page, L latent dim (kv_lora_rank), R rope dim, D index head dim.
A physical slot is ``page * 64 + offset``.

| pool                    | dtype       | shape                                                                      |
|-------------------------|-------------|----------------------------------------------------------------------------|
| latents                 | model dtype | [P, 64, L + R]: latent, then rope                                          |
| latents, fp8            | uint8       | [P, 64, L + 4*ceil(L/128) + 2R]: e4m3 codes, fp32 scales, bf16 rope        |
| index keys              | model dtype | [P, 64, D]                                                                 |
| index keys, fp8         | uint8       | [P, 64*D + 256]: 64 rows of e4m3 codes, then 64 fp32 scales                |
"""

import torch
from torch import Tensor

PAGE = 64
LATENT_GROUP = 128  # latent elements that share one scale
FP8_MAX = 448.0  # largest finite e4m3fn
FP8 = torch.float8_e4m3fn


def latent_groups(L: int) -> int:
    return -(-L // LATENT_GROUP)


def latent_pool_shape(pages: int, L: int, R: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and storage dtype of a latent pool; ``dtype`` is a model dtype or ``torch.float8_e4m3fn``."""
    if dtype != FP8:
        return (pages, PAGE, L + R), dtype
    if L % 4 or R % 2:
        raise ValueError(f"kv_lora_rank={L}, qk_rope_head_dim={R}: an fp8 latent pool needs multiples of 4 and 2")
    return (pages, PAGE, L + 4 * latent_groups(L) + 2 * R), torch.uint8


def index_pool_shape(pages: int, D: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and storage dtype of an index-key pool; ``dtype`` is a model dtype or ``torch.float8_e4m3fn``."""
    if dtype != FP8:
        return (pages, PAGE, D), dtype
    if D % 4:
        raise ValueError(f"index_head_dim={D}: an fp8 index pool needs a multiple of 4")
    return (pages, PAGE * D + 4 * PAGE), torch.uint8


def index_dim(pool: Tensor) -> int:
    """D of an index-key pool."""
    return (pool.shape[1] - 4 * PAGE) // PAGE if pool.dtype == torch.uint8 else pool.shape[2]


def split_latent_pool(pool: Tensor, L: int, R: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Views of a latent pool: (latent [P, 64, L], scales [P, 64, G] or None, rope [P, 64, R])."""
    if pool.dtype != torch.uint8:
        return pool[..., :L], None, pool[..., L:]
    G = latent_groups(L)
    return (
        pool[..., :L].view(FP8),
        pool.view(torch.float32)[..., L // 4 : L // 4 + G],
        pool.view(torch.bfloat16)[..., (L + 4 * G) // 2 :],
    )


def split_index_pool(pool: Tensor) -> tuple[Tensor, Tensor | None]:
    """Views of an index-key pool: (keys [P, 64, D], scales [P, 64] or None)."""
    if pool.dtype != torch.uint8:
        return pool, None
    D = index_dim(pool)
    keys = pool.view(FP8)[:, : PAGE * D].unflatten(1, (PAGE, D))
    return keys, pool.view(torch.float32)[:, PAGE * D // 4 :]


def check_latent_pool(pool: Tensor, L: int, R: int, name: str = "pool") -> None:
    """Raises ValueError unless ``pool``, the argument ``name``, is a contiguous latent pool for L and R."""
    check_shape(name, pool, None, PAGE, None)
    dtype = FP8 if pool.dtype == torch.uint8 else pool.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"{name} has dtype {pool.dtype}; a latent pool is uint8 (fp8 layout) or a model dtype")
    shape, _ = latent_pool_shape(pool.shape[0], L, R, dtype)
    _check_pool("latent", name, pool, shape)


def check_index_pool(pool: Tensor, D: int, name: str = "pool") -> None:
    """Raises ValueError unless ``pool``, the argument ``name``, is a contiguous index-key pool for D."""
    if pool.dim() not in (2, 3):
        raise ValueError(f"{name} has shape {tuple(pool.shape)}; an index-key pool has 2 dims (fp8) or 3")
    dtype = FP8 if pool.dtype == torch.uint8 else pool.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"{name} has dtype {pool.dtype}; an index-key pool is uint8 (fp8 layout) or a model dtype")
    shape, _ = index_pool_shape(pool.shape[0], D, dtype)
    _check_pool("index-key", name, pool, shape)


def _check_pool(kind: str, name: str, pool: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(pool.shape) != shape:
        raise ValueError(
            f"{name} has dtype {pool.dtype} and shape {tuple(pool.shape)}; a {kind} pool of that dtype is {shape} "
            "(fp8 pools are passed as raw uint8, never as a view of another dtype)"
        )
    if not pool.is_contiguous():
        raise ValueError(f"{name} has strides {pool.stride()}; a {kind} pool must be contiguous")


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raises ValueError unless ``tensor`` has this shape; None stands for any size."""
    if tensor.dim() != len(shape) or any(want is not None and got != want for got, want in zip(tensor.shape, shape)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{wanted}]")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raises ValueError unless ``tensor`` has one of these dtypes."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {' or '.join(str(d) for d in dtypes)}")


def valid_slots(slots: Tensor, pages: int) -> Tensor:
    """True where a slot (or page-table entry times 64) lies inside a pool of ``pages`` pages."""
    return (slots >= 0) & (slots < pages * PAGE)


def logical_slots(page_table: Tensor, requests: Tensor, positions: Tensor, pages: int | None = None) -> Tensor:
    """Physical slots (int64) of token positions of requests.

    -1 where the page table has no such column or no page there, and, with ``pages``, no page of a pool of that size.
    """
    if page_table.numel() == 0:
        return torch.full_like(positions + requests, -1, dtype=torch.int64)
    column = positions // PAGE
    inside = (positions >= 0) & (column < page_table.shape[1])
    page = page_table[requests, column.clamp(0, page_table.shape[1] - 1)].long()
    slots = page * PAGE + positions % PAGE
    inside = inside & (page >= 0 if pages is None else valid_slots(slots, pages))
    return torch.where(inside, slots, -1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reference computes: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

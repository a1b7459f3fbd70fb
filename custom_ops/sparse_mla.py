"""sparse_mla_decode: absorbed MLA over selected tokens, for batches of few tokens a request.

Legend: T rows (query tokens), H heads, L latent dim, R rope dim, B requests, K lanes of the selection.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import (
    LATENT_GROUP,
    PAGE,
    check_dtype,
    check_latent_pool,
    check_shape,
    compute_dtype,
    logical_slots,
    split_latent_pool,
    valid_slots,
)
from compiled_dsa.custom_ops.registry import define

_REFERENCE_ELEMENTS = 1 << 24  # gathered latent elements that the reference holds at a time


def check_selection(T: int, topk, count, page_table, req_of_row) -> None:
    """The arguments that say which keys a row attends; shared with mla_prefill."""
    check_shape("count", count, T)
    check_shape("page_table", page_table, None, None)
    check_shape("req_of_row", req_of_row, T)
    for name, tensor in (("count", count), ("page_table", page_table), ("req_of_row", req_of_row)):
        check_dtype(name, tensor, torch.int32)
    if topk is not None:
        check_shape("topk", topk, T, None)
        check_dtype("topk", topk, torch.int32)


def check_query_dtype(name: str, tensor: Tensor, pool: Tensor) -> None:
    """Queries have the dtype of a model-dtype pool; an fp8 pool is read for queries of any model dtype."""
    if pool.dtype != torch.uint8:
        check_dtype(name, tensor, pool.dtype)
    elif not tensor.dtype.is_floating_point:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be a model dtype")


def check(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, deterministic=False
) -> None:
    check_shape("q_latent", q_latent, None, None, None)
    T, H, L = q_latent.shape
    check_shape("q_rope", q_rope, T, H, None)
    check_dtype("q_rope", q_rope, q_latent.dtype)
    check_latent_pool(pool, L, q_rope.shape[2])
    check_query_dtype("q_latent", q_latent, pool)
    check_selection(T, topk, count, page_table, req_of_row)
    if sinks is not None:
        check_shape("sinks", sinks, H)
        check_dtype("sinks", sinks, torch.float32)
    check_shape("out", out, T, H, L)
    check_dtype("out", out, q_latent.dtype)
    check_shape("lse", lse, T, H)
    check_dtype("lse", lse, torch.float32)


def selected_slots(topk, count, page_table, req_of_row, pages: int) -> Tensor:
    """int64 [T, n]: the physical slots that each row attends, -1 for lanes past its count and for bad ids."""
    width = page_table.shape[1] * PAGE if topk is None else topk.shape[1]
    lanes = torch.arange(min(width, max(int(count.max()), 0)), device=count.device)
    if topk is None:
        slots = logical_slots(page_table, req_of_row.long()[:, None], lanes[None], pages)
    else:
        slots = topk[:, : lanes.numel()].long()
        slots = torch.where(valid_slots(slots, pages), slots, -1)
    return torch.where(lanes < count[:, None], slots, -1)


def gather_latents(pool: Tensor, slots: Tensor, L: int, R: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dequantised ([..., L], [..., R]) of the tokens at ``slots`` (all valid)."""
    rows = pool.flatten(0, 1)[slots]  # [..., row]: one gather, then views of it
    latents, scales, rope = split_latent_pool(rows, L, R)
    latents = latents.to(dtype)
    if scales is not None:
        latents = latents * scales.to(dtype).repeat_interleave(LATENT_GROUP, dim=-1)[..., :L]
    return latents, rope.to(dtype)


def attend(q_latent, q_rope, pool, slots, scale: float, sinks) -> tuple[Tensor, Tensor]:
    """Attention of every row over its slots (-1: none), in ``compute_dtype``: (o [T, H, L], lse [T, H])."""
    dtype = compute_dtype(q_latent.dtype)
    T, H, L = q_latent.shape
    R = q_rope.shape[2]
    out = torch.zeros(T, H, L, dtype=dtype, device=pool.device)
    lse = torch.full((T, H), -torch.inf, dtype=dtype, device=pool.device)
    if slots.shape[1] == 0 or pool.shape[0] == 0:
        return out, lse
    rows_at_once = max(1, _REFERENCE_ELEMENTS // (slots.shape[1] * (L + R)))
    for part in torch.arange(T, device=pool.device).split(rows_at_once):
        latents, rope = gather_latents(pool, slots[part].clamp(min=0), L, R, dtype)
        scores = torch.einsum("thl,tkl->thk", q_latent[part].to(dtype), latents)
        scores += torch.einsum("thr,tkr->thk", q_rope[part].to(dtype), rope)
        missing = (slots[part] < 0)[:, None]
        scores = (scores * scale).masked_fill(missing, -torch.inf)
        lse[part] = scores.logsumexp(-1)
        normaliser = lse[part] if sinks is None else torch.logaddexp(lse[part], sinks.to(dtype))
        weights = (scores - normaliser[..., None]).exp().masked_fill(missing, 0.0)
        # a slot that is not attended may hold NaN: 0 * NaN must not reach the output
        out[part] = torch.einsum("thk,tkl->thl", weights, latents.masked_fill(missing.transpose(1, 2), 0.0))
    return out, lse


def reference(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, deterministic=False
) -> None:
    """o = softmax(scale * (q_latent . c + q_rope . k_rope)) c over the selected tokens, each row on its own."""
    T = q_latent.shape[0]
    # how torch rounds follows from shapes, and rows at once have as many lanes as the longest of them
    rows_at_once = 1 if deterministic else max(1, T)
    for start in range(0, T, rows_at_once):
        rows = slice(start, start + rows_at_once)
        ids = None if topk is None else topk[rows]
        slots = selected_slots(ids, count[rows], page_table, req_of_row[rows], pool.shape[0])
        out[rows], lse[rows] = attend(q_latent[rows], q_rope[rows], pool, slots, scale, sinks)


SPARSE_MLA_DECODE = define(
    "sparse_mla_decode(Tensor q_latent, Tensor q_rope, Tensor pool, Tensor? topk, Tensor count, Tensor page_table, "
    "Tensor req_of_row, float scale, Tensor? sinks, Tensor(a!) out, Tensor(b!) lse, bool deterministic=False)",
    check=check,
    reference=reference,
    providers={
        "triton": "compiled_dsa.custom_ops.kernels.sparse_mla",
        "flash_mla": "compiled_dsa.custom_ops.providers.flash_mla",
    },
)


def sparse_mla_decode(
    q_latent,
    q_rope,
    pool,
    topk,
    count,
    page_table,
    req_of_row,
    scale: float,
    sinks,
    out,
    lse,
    deterministic: bool = False,
    *,
    provider: str | None = None,
) -> None:
    """Absorbed multi-head latent attention of each row over the tokens selected for it, in place.

    Args:
        q_latent: [T, H, L], the absorbed query q_nope W_UK.
        q_rope: [T, H, R]; R may be 0.
        pool: latent pool, see layout; fp8 or the dtype of the query.
        topk: int32 [T, K] physical slots, or None: the row attends positions [0, count) of its request.
        count: int32 [T], valid lanes, all K where it is larger. Lanes past it are ignored whatever they hold; ids
            outside the pool act as -1.
        page_table: int32 [B, maxP]; read only when ``topk`` is None.
        req_of_row: int32 [T]; read only when ``topk`` is None.
        scale: multiplies the scores.
        sinks: fp32 [H] or None, one more logit a head in the denominator.
        out: [T, H, L] in the dtype of the query, any strides with a dense last dim; 0 for a row with nothing to attend.
        lse: fp32 [T, H], natural log, scale included, sinks excluded, -inf for a row with nothing to attend.
        deterministic: the bits of a row do not depend on the other rows, their number or its place among them, nor on
            lanes past its count. Its keys are not split over programs, which costs time where rows are few. Which
            kernel runs follows from sizes and dtypes, and from whether tensors and strides are aligned to 16 bytes.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.sparse_mla_decode(
        q_latent,
        q_rope,
        pool,
        topk,
        count,
        page_table,
        req_of_row,
        scale,
        sinks,
        out,
        lse,
        deterministic,
        provider=provider,
    )

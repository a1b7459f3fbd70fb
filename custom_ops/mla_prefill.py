"""mla_prefill: MLA of many rows over selected tokens, from queries before absorption to values after un-absorption.

Absorption lives inside the op, so that the absorbed queries (H*L a row, four times the model's own) exist for a slice
of the rows only, and so that an implementation may expand keys instead where that is cheaper. Graphs are cut at it: in
how many slices and which way it works through the rows follows from their real number.

Legend: T rows (query tokens), H heads, N nope dim, R rope dim, L latent dim, V value dim, B requests, K lanes.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import PAGE, check_dtype, check_latent_pool, check_shape, compute_dtype
from compiled_dsa.custom_ops.registry import define
from compiled_dsa.custom_ops.sparse_mla import attend, check_query_dtype, check_selection, selected_slots

DEFAULT_SCRATCH_BYTES = 512 << 20


def check(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, max_count=None,
    deterministic=False, own_pages=False,
) -> None:  # fmt: skip
    check_shape("q_nope", q_nope, None, None, None)
    T, H, N = q_nope.shape
    check_shape("kv_b", kv_b, H, None, None)
    V, L = kv_b.shape[1] - N, kv_b.shape[2]
    check_dtype("kv_b", kv_b, q_nope.dtype)
    check_shape("q_rope", q_rope, T, H, None)
    check_dtype("q_rope", q_rope, q_nope.dtype)
    check_latent_pool(pool, L, q_rope.shape[2])
    check_query_dtype("q_nope", q_nope, pool)
    check_selection(T, topk, count, page_table, req_of_row)
    if sinks is not None:
        check_shape("sinks", sinks, H)
        check_dtype("sinks", sinks, torch.float32)
    check_shape("out", out, T, H, V)
    check_dtype("out", out, q_nope.dtype)
    if scratch_bytes < row_scratch_bytes(q_nope, kv_b):
        raise ValueError(f"scratch_bytes={scratch_bytes}; one row needs {row_scratch_bytes(q_nope, kv_b)} bytes")
    if max_count is not None and (topk is not None or max_count < 0):
        given = "along with topk, whose columns bound a row's lanes" if max_count >= 0 else "below 0"
        raise ValueError(f"max_count={max_count} is given {given}")


def row_scratch_bytes(q_nope: Tensor, kv_b: Tensor) -> int:
    """Scratch of one row: its absorbed query, in whose place its output comes, [H, L], and log-sum-exp, fp32 [H]."""
    H, L = kv_b.shape[0], kv_b.shape[2]
    return H * (L * q_nope.element_size() + 4)


def reference(
    q_nope, q_rope, pool, topk, count, page_table, req_of_row, kv_b, scale, sinks, out, scratch_bytes, max_count=None,
    deterministic=False, own_pages=False,
) -> None:  # fmt: skip
    """out = W_UV softmax(scale * ((q_nope W_UK) . c + q_rope . k_rope)) c over the selected tokens."""
    T, _, N = q_nope.shape
    if T == 0:
        return
    dtype = compute_dtype(q_nope.dtype)
    count = count if max_count is None else count.clamp(max=max_count)
    w_uk, w_uv = kv_b[:, :N].to(dtype), kv_b[:, N:].to(dtype)
    # queries and outputs are two tensors here, in fp32 for rows of two bytes
    rows_at_once = 1 if deterministic else max(1, scratch_bytes // (4 * row_scratch_bytes(q_nope, kv_b)))
    for part in torch.arange(T, device=pool.device).split(rows_at_once):
        ids = None if topk is None else on_pages(topk[part], page_table, pool.shape[0]) if own_pages else topk[part]
        slots = selected_slots(ids, count[part], page_table, req_of_row[part], pool.shape[0])
        q_latent = torch.einsum("thn,hnl->thl", q_nope[part].to(dtype), w_uk)
        o, _ = attend(q_latent, q_rope[part], pool, slots, scale, sinks)
        out[part] = torch.einsum("thl,hvl->thv", o, w_uv).to(out.dtype)


def on_pages(topk: Tensor, page_table: Tensor, pages: int) -> Tensor:
    """-1 in the place of slots whose page the table does not name."""
    named = torch.zeros(pages + 1, dtype=torch.bool, device=topk.device)
    named[torch.where((page_table >= 0) & (page_table < pages), page_table, pages).long()] = True
    named[pages] = False
    page = torch.where((topk >= 0) & (topk < pages * PAGE), topk // PAGE, pages)
    return torch.where(named[page.long()], topk, -1)


MLA_PREFILL = define(
    "mla_prefill(Tensor q_nope, Tensor q_rope, Tensor pool, Tensor? topk, Tensor count, Tensor page_table, "
    "Tensor req_of_row, Tensor kv_b, float scale, Tensor? sinks, Tensor(a!) out, int scratch_bytes, "
    "int? max_count=None, bool deterministic=False, bool own_pages=False)",
    check=check,
    reference=reference,
    providers={
        "triton": "compiled_dsa.custom_ops.kernels.mla_prefill",
        "flash_mla": "compiled_dsa.custom_ops.providers.flash_mla_prefill",
    },
    split=True,
    rows={"q_nope": None, "q_rope": None, "topk": None, "count": None, "req_of_row": None, "out": 0},
)


def mla_prefill(
    q_nope,
    q_rope,
    pool,
    topk,
    count,
    page_table,
    req_of_row,
    kv_b,
    scale: float,
    sinks,
    out,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    max_count: int | None = None,
    deterministic: bool = False,
    own_pages: bool = False,
    *,
    provider: str | None = None,
) -> None:
    """Multi-head latent attention of each row over the tokens selected for it, in place. Graphs are split here.

    Args:
        q_nope: [T, H, N].
        q_rope: [T, H, R]; R may be 0.
        pool: latent pool, see layout; fp8 or the dtype of the query.
        topk: int32 [T, K] physical slots, or None: the row attends positions [0, count) of its request.
        count: int32 [T], valid lanes, all K where it is larger. Lanes past it are ignored whatever they hold; ids
            outside the pool act as -1.
        page_table: int32 [B, maxP]; read only when ``topk`` is None, and with ``own_pages``.
        req_of_row: int32 [T], in [0, B); read only when ``topk`` is None.
        kv_b: [H, N + V, L] = (W_UK, W_UV) of each head, kv_b_proj's weight viewed by head.
        scale: multiplies the scores.
        sinks: fp32 [H] or None, one more logit a head in the denominator.
        out: [T, H, V] in the dtype of the query; 0 for a row with nothing to attend.
        scratch_bytes: bound on the op's temporary memory; rows and heads are cut as it demands.
        max_count: without ``topk``, no row attends more tokens than this, whatever its count; None: those of its page
            table. A close bound lets rows attend expanded keys, see kernels/mla_prefill_plan.py.
        deterministic: as of ``sparse_mla_decode``; nor do the bits of a row depend on ``scratch_bytes``. Keys are never
            expanded and fp8 pools never dequantised, which costs time where these pay.
        own_pages: all slots of ``topk`` lie on pages that ``page_table`` names, as index_topk's do; others may act as
            -1. Triton then dequantises as many pages of an fp8 pool as the table has entries, where these fit into half
            of the scratch, and not all of a large pool.

    Raises:
        ValueError: a shape or dtype outside this contract, a budget too small for one row, or ``max_count`` below 0 or
            along with ``topk``.
    """
    torch.ops.compiled_dsa.mla_prefill(
        q_nope,
        q_rope,
        pool,
        topk,
        count,
        page_table,
        req_of_row,
        kv_b,
        scale,
        sinks,
        out,
        scratch_bytes,
        max_count,
        deterministic,
        own_pages,
        provider=provider,
    )

"""index_topk: the lightning indexer's scores and its choice of the K best keys of every row.

Two ops with one reference. ``index_topk_decode`` is for batches of few tokens a request and is captured in graphs;
``index_topk_prefill`` works through its rows within a scratch budget, and graphs are cut at it.

Legend: T rows (query tokens), HI index heads, D index head dim, B requests, K = topk_out.shape[1].
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import (
    FP8,
    PAGE,
    check_dtype,
    check_index_pool,
    check_shape,
    compute_dtype,
    logical_slots,
    split_index_pool,
)
from compiled_dsa.custom_ops.registry import define

DEFAULT_SCRATCH_BYTES = 512 << 20
_REFERENCE_SCORES = 1 << 18  # scores at a time in the reference; choosing among them takes some 30 bytes a score


def check_decode(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> None:
    check_shape("q", q, None, None, None)
    T, HI, D = q.shape
    check_index_pool(pool, D)
    check_dtype("q", q, FP8 if pool.dtype == torch.uint8 else pool.dtype)
    check_shape("weights", weights, T, HI)
    check_dtype("weights", weights, torch.float32, torch.float64)
    check_shape("page_table", page_table, None, None)
    check_shape("req_of_row", req_of_row, T)
    check_shape("visible", visible, T)
    check_shape("topk_out", topk_out, T, None)
    for name, tensor in (("page_table", page_table), ("req_of_row", req_of_row), ("visible", visible)):
        check_dtype(name, tensor, torch.int32)
    check_dtype("topk_out", topk_out, torch.int32)
    if positions_out is not None:
        check_shape("positions_out", positions_out, *topk_out.shape)
        check_dtype("positions_out", positions_out, torch.int32)
    check_forced(init_tokens, local_tokens, topk_out.shape[1])


def check_forced(init_tokens: int, local_tokens: int, K: int) -> None:
    """Raises ValueError unless so many tokens can always be among K."""
    if min(init_tokens, local_tokens) < 0 or init_tokens + local_tokens > K:
        raise ValueError(
            f"init_tokens={init_tokens}, local_tokens={local_tokens}; neither may be negative, and {K} are selected"
        )


def check_prefill(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> None:
    check_decode(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out, init_tokens,
        local_tokens,
    )  # fmt: skip
    row_bytes = 4 * PAGE * page_table.shape[1]
    if scratch_bytes < row_bytes:
        raise ValueError(
            f"scratch_bytes={scratch_bytes}; one row's scores over {page_table.shape[1]} pages need {row_bytes} bytes"
        )


def order_key(scores: Tensor) -> Tensor:
    """Scores -> integers of the same width and order; NaN becomes the smallest integer, which no other score maps to.

    Adding 0.0 makes -0.0 and 0.0 equal, as torch.topk has them.
    """
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    bits = (scores + 0.0).view(integer)
    key = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(scores.isnan(), limits.min, key)


def scores_of_rows(q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None) -> Tensor:
    """score[t, j] = ks[j] * sum_h weights[t, h] * relu(q[t, h] . keys[j]) for a part of the rows, [T, n].

    Heads are taken together only as far as their products stay within ``_REFERENCE_SCORES``.
    """
    dtype = compute_dtype(q.dtype)
    keys_t = keys.to(dtype).T
    T, n = q.shape[0], keys.shape[0]
    scores = torch.zeros(T, n, dtype=dtype, device=q.device)
    together = max(1, _REFERENCE_SCORES // max(1, T * n))
    for q_heads, w_heads in zip(q.split(together, 1), weights.split(together, 1)):
        products = (q_heads.to(dtype) @ keys_t).relu_()  # [T, heads, n]
        scores += torch.einsum("th,thn->tn", w_heads.to(dtype), products)
    return scores if key_scales is None else scores.mul_(key_scales.to(dtype))


def reference(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes=0,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> None:
    """Rows that see at most K keys get them all, without scores; for the others the K best are chosen."""
    T, K = topk_out.shape
    if T == 0:
        return
    pages = pool.shape[0]
    visible = visible.clamp(0, page_table.shape[1] * PAGE).long()
    lanes = torch.arange(K, device=q.device)
    everything = logical_slots(page_table, req_of_row.long()[:, None], lanes[None], pages)
    topk_out.copy_(torch.where(lanes < visible[:, None], everything, -1))
    if positions_out is not None:
        positions_out.copy_(torch.where(topk_out >= 0, lanes, -1))
    if pages == 0:
        return
    keys, key_scales = split_index_pool(pool)
    for request in req_of_row[visible > K].unique().tolist():
        rows = ((req_of_row == request) & (visible > K)).nonzero().flatten()
        n = int(visible[rows].max())
        slots = logical_slots(page_table, request, torch.arange(n, device=q.device), pages)
        at = slots.clamp(min=0) // PAGE, slots.clamp(min=0) % PAGE
        # indexing is not implemented for e4m3: the codes are gathered as bytes
        gathered = keys.view(torch.uint8)[at].view(FP8) if keys.dtype == FP8 else keys[at]
        scales = None if key_scales is None else key_scales[at]
        for part in rows.split(max(1, _REFERENCE_SCORES // n)):
            scores = scores_of_rows(q[part], weights[part], gathered, scales)
            position, end = torch.arange(n, device=q.device), visible[part, None]
            exists = (position < end) & (slots >= 0)
            forced = exists & ((position < init_tokens) | (position >= end - local_tokens))
            chosen = choose(scores.masked_fill_(~exists, torch.nan), forced, K, deterministic)
            topk_out[part] = torch.where(chosen < 0, -1, slots[chosen]).int()
            if positions_out is not None:
                positions_out[part] = chosen.int()


def choose(scores: Tensor, forced: Tensor, K: int, deterministic: bool) -> Tensor:
    """The positions [rows, K] of those ``forced`` and of the best other scores, then -1 where fewer than K are numbers.

    With ``deterministic`` the lowest of equal scores are taken, and positions ascend.
    """
    key = order_key(scores)
    key.masked_fill_(forced, torch.iinfo(key.dtype).max)  # which no score maps to
    if deterministic:
        best_key, best = (x[:, :K] for x in key.sort(dim=-1, descending=True, stable=True))
    else:
        best_key, best = key.topk(K, dim=-1)
    none = scores.shape[1]  # after all positions
    best = torch.where(best_key == torch.iinfo(key.dtype).min, none, best)
    if deterministic:
        best = best.sort(dim=-1).values
    return torch.where(best == none, -1, best)


ARGUMENTS = (
    "Tensor q, Tensor weights, Tensor pool, Tensor page_table, Tensor req_of_row, Tensor visible, "
    "Tensor(a!) topk_out, bool deterministic"
)
OPTIONS = "Tensor(b!)? positions_out=None, int init_tokens=0, int local_tokens=0"
_PROVIDERS = {  # by their times in examples/results/h200-ops.json; torch is for comparisons
    "triton": "compiled_dsa.custom_ops.kernels.index_topk",
    "deep_gemm": "compiled_dsa.custom_ops.providers.deep_gemm",
    "flashinfer": "compiled_dsa.custom_ops.providers.flashinfer",
    "torch": "compiled_dsa.custom_ops.providers.torch_topk",
}

INDEX_TOPK_DECODE = define(
    f"index_topk_decode({ARGUMENTS}, {OPTIONS})", check=check_decode, reference=reference, providers=_PROVIDERS
)
INDEX_TOPK_PREFILL = define(
    f"index_topk_prefill({ARGUMENTS}, int scratch_bytes, {OPTIONS})",
    check=check_prefill,
    reference=reference,
    providers=_PROVIDERS,
    split=True,
    rows={"q": None, "weights": None, "req_of_row": None, "visible": None, "topk_out": -1, "positions_out": -1},
)


def index_topk_decode(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic=False,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
    *,
    provider: str | None = None,
) -> None:
    """Chooses, for every row, the K keys with the best index scores, in place.

        score[t, j] = ks[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])        (DeepSeek-V3.2 report, eq. 1)

    Args:
        q: [T, HI, D], e4m3 for an fp8 pool, else the dtype of the pool.
        weights: fp32 [T, HI], all scales of the query folded in; may be negative.
        pool: index-key pool, see layout.
        page_table: int32 [B, maxP], pages of each request in order; entries outside the pool hold no key.
        req_of_row: int32 [T], the request of each row, in [0, B).
        visible: int32 [T], the row may choose positions [0, visible); 0 for padding rows.
        topk_out: int32 [T, K], written whole: physical slots of min(K, number of visible keys whose score is not NaN)
            distinct keys, unordered without ``deterministic``, then -1. A row that sees at most K keys gets all of them
            in order, no score looked at; a position without a page leaves -1 in its place.
        deterministic: among equal scores the lowest position wins, the keys lie in the order of their positions, and
            replays are bitwise equal. So what a row gets depends on its scores alone, not on the rest of the batch.
        positions_out: int32 [T, K] or None, written whole: the position in its request of each lane of ``topk_out``,
            -1 where that is -1.
        init_tokens, local_tokens: the first ``init_tokens`` and the last ``local_tokens`` of the visible positions are
            always chosen where they have a page, whatever their scores (NaN too); the best others take what is left of
            K. With either, Triton ranks a score of +inf with the largest finite number.

    Raises:
        ValueError: a shape or dtype outside this contract, or more than K tokens that are always chosen.
    """
    torch.ops.compiled_dsa.index_topk_decode(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out, init_tokens,
        local_tokens, provider=provider,
    )  # fmt: skip


def index_topk_prefill(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic=False,
    scratch_bytes=DEFAULT_SCRATCH_BYTES,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
    *,
    provider: str | None = None,
) -> None:
    """``index_topk_decode`` for batches of many rows: on a GPU, all temporary memory fits into ``scratch_bytes``.

    Rows are cut as the budget demands; the result does not depend on the cut. Graphs are split here. The reference
    holds some MB at a time, whatever the budget.
    """
    torch.ops.compiled_dsa.index_topk_prefill(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, scratch_bytes, positions_out,
        init_tokens, local_tokens, provider=provider,
    )  # fmt: skip

"""index_topk with torch.topk, for comparisons and where nothing else is installed."""

import torch

from compiled_dsa.custom_ops.kernels import index_topk as triton_topk
from compiled_dsa.custom_ops.providers import scored

_POSITION_BYTES = 12  # values and int64 positions


def refuses(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes: int | None = None,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> str | None:
    if deterministic:
        return "torch.topk takes any of several equal scores, so it is not deterministic"
    return triton_topk.refuses(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out=positions_out
    ) or scored.refuses_scratch(page_table, topk_out.shape[1], scratch_bytes, _POSITION_BYTES)


def run(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes: int | None = None,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> None:
    K = topk_out.shape[1]

    def select(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        return scores.topk(min(K, scores.shape[1]), dim=1).indices

    scored.run(
        select, _POSITION_BYTES, q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic,
        scratch_bytes, positions_out, init_tokens, local_tokens,
    )  # fmt: skip

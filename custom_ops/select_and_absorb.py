"""select_and_absorb: index_topk_decode beside the absorption of the attention queries, which does not depend on it.

Legend: T rows, H heads, N nope dim, L latent dim.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops import index_topk
from compiled_dsa.custom_ops.layout import check_dtype, check_shape
from compiled_dsa.custom_ops.registry import define

_ABSORB = "Tensor q_nope, Tensor w_uk, Tensor(c!) q_latent"


def check(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent,
    positions_out=None, init_tokens=0, local_tokens=0,
) -> None:  # fmt: skip
    index_topk.check_decode(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out, init_tokens,
        local_tokens,
    )  # fmt: skip
    check_shape("q_nope", q_nope, q.shape[0], None, None)
    check_shape("w_uk", w_uk, q_nope.shape[1], q_nope.shape[2], None)
    check_shape("q_latent", q_latent, q_nope.shape[0], q_nope.shape[1], w_uk.shape[2])
    check_dtype("w_uk", w_uk, q_nope.dtype)
    check_dtype("q_latent", q_latent, q_nope.dtype)


def absorb(q_nope: Tensor, w_uk: Tensor, q_latent: Tensor) -> None:
    """q_latent[t, h] = q_nope[t, h] @ w_uk[h], as one batched GEMM over heads."""
    torch.bmm(q_nope.transpose(0, 1), w_uk, out=q_latent.transpose(0, 1))


def reference(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent,
    positions_out=None, init_tokens=0, local_tokens=0,
) -> None:  # fmt: skip
    index_topk.reference(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out=positions_out,
        init_tokens=init_tokens, local_tokens=local_tokens,
    )  # fmt: skip
    absorb(q_nope, w_uk, q_latent)


SELECT_AND_ABSORB = define(
    f"select_and_absorb({index_topk.ARGUMENTS}, {_ABSORB}, {index_topk.OPTIONS})",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.select_and_absorb"},
)


def select_and_absorb(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    topk_out: Tensor,
    deterministic: bool,
    q_nope: Tensor,
    w_uk: Tensor,
    q_latent: Tensor,
    positions_out: Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
    *,
    provider: str | None = None,
) -> None:
    """``index_topk_decode`` and q_latent[t, h] = q_nope[t, h] @ w_uk[h], beside each other where that is faster.

    A selection leaves most of a GPU idle, whose time is enough to read the weights of the absorption.

    Args:
        q .. deterministic, positions_out, init_tokens, local_tokens: as of ``index_topk_decode``.
        q_nope: [T, H, N]; its last dim dense.
        w_uk: [H, N, L], W_UK of each head, dtype of q_nope.
        q_latent: [T, H, L], dtype of q_nope, head by head or row by row in memory.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.select_and_absorb(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent,
        positions_out, init_tokens, local_tokens, provider=provider,
    )  # fmt: skip

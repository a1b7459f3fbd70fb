"""index_topk with flashinfer's selection (flashinfer-python 0.7.4) of our Triton scores.

``top_k_ragged_transform`` chooses. NaN is taken out of the scores before, since its order has NaN above all numbers;
positions become slots afterwards, since its own page-table transform checks no page. Its kernels are built at the first
call, which takes minutes once a machine: ``warmup``.
"""

import inspect
from collections.abc import Callable
from functools import cache

import torch

from compiled_dsa.custom_ops.kernels import index_topk as triton_topk
from compiled_dsa.custom_ops.providers import common, scored
from compiled_dsa.custom_ops.providers.common import FirstCalls, load

_library = load("flashinfer")
_first = FirstCalls("flashinfer")

MAX_K = 2048  # of its kernels that can be captured or are deterministic
_LOWEST_POSITION = 1  # its tie_break among equal scores
_POSITION_BYTES = 8  # int32 positions and offsets
_PARAMETERS = ("deterministic", "tie_break", "dsa_graph_safe")


@cache
def _has_options(function: Callable | None) -> bool:
    return function is not None and set(_PARAMETERS) <= set(inspect.signature(function).parameters)


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
    if not _has_options(getattr(_library, "top_k_ragged_transform", None)):
        return f"flashinfer {_library.__version__} has no graph-safe top_k_ragged_transform; 0.7.4 has"
    K = topk_out.shape[1]
    if K > MAX_K:
        return f"topk_out has {K} columns; its graph-safe and deterministic kernels choose at most {MAX_K}"
    return (
        scored.refuses_scratch(page_table, K, scratch_bytes, _POSITION_BYTES)
        or common.refuses_device(pool)
        or triton_topk.refuses(
            q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out=positions_out
        )
    )


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
    """In the decode shape, and wherever a capture is under way, the graph-safe kernels run, else the default ones."""
    K = topk_out.shape[1]
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    graph_safe = scratch_bytes is None or capturing

    def select(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        # which kernel runs and how large its workspace is follows from these
        key = (scores.device, scores.shape, K, deterministic, graph_safe)
        _first.require(key)
        positions = _library.top_k_ragged_transform(
            scores,
            torch.zeros_like(visible),
            visible.clamp(0, scores.shape[1]),
            K,
            deterministic=deterministic,
            tie_break=_LOWEST_POSITION if deterministic else 0,
            dsa_graph_safe=graph_safe,
        )
        _first.done(key)
        return positions

    scored.run(
        select, _POSITION_BYTES, q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic,
        scratch_bytes, positions_out, init_tokens, local_tokens,
    )  # fmt: skip


warmup = run

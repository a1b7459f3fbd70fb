"""A draft layer that reuses what its target selected, instead of having an indexer of its own.

The draft layer is a ``SparseAttention`` with ``index_shared``, whose pools belong to the same ``PagePool`` as the
target's: one page table, so slots of the target are slots of the draft. Which row's selection applies to a draft row
is a gather of the caller, that of the last accepted row of the request::

    out, topk = target_layer(x, cos, sin, batch, pools)  # verify, n rows a request
    ...                                                  # sampling gives accepted, int32 [B]
    topk = topk[batch.last_rows(accepted)]               # [B, K]
    for step in batch.steps(k, accepted):
        topk = with_own_keys(topk, step)
        out, _ = draft_layer(x, cos, sin, step, draft_pools, topk)

A target that attends everything (``batch.skip_scores``) selects nothing: then the draft's steps need ``skip_scores``
too, which holds if the bound on kv_len holds for k tokens more; else the verify step is made without the flag.

Legend: B requests = rows of a draft step, K = index_topk.
"""

import torch
from torch import Tensor

from compiled_dsa.batch import Batch


def with_own_keys(topk: Tensor, step: Batch) -> Tensor:
    """The selection of an earlier row, with the key of each draft row itself added.

    A selection that still has room (fewer than K visible keys) grows, so it stays all that is visible. A full one loses
    an arbitrary key for each new one; up to K steps lose none of the keys that they added.

    Args:
        topk: int32 [B, K] of physical slots; the first min(K, visible - 1) lanes of a row are its selection.
        step: one row a request, as ``Batch.steps`` makes them; its slots are the keys added.

    Returns:
        int32 [B, K]; ``topk`` stays as it was.

    Raises:
        ValueError: the number of rows differs.
    """
    if topk.dim() != 2 or topk.shape[0] != step.slots.shape[0]:
        raise ValueError(
            f"topk has shape {tuple(topk.shape)}; it must be [{step.slots.shape[0]}, K], one row a draft row"
        )
    lane = (step.visible.long() - 1) % topk.shape[1]  # K - 1 for padding, which attends nothing
    return topk.scatter(1, lane.unsqueeze(1), step.slots.to(torch.int32).unsqueeze(1))

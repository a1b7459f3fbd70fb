"""encode_queries: ropes of attention and index queries, quantised index queries, and the weights of index heads.

Legend: T rows, H heads, R rope dim, HI index heads, D index head dim.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import FP8, check_dtype, check_shape, compute_dtype
from compiled_dsa.custom_ops.registry import define
from compiled_dsa.custom_ops.rope import rotate, rotate_part
from compiled_dsa.custom_ops.store_index_keys import quantize_rows


def check(
    q_rope, index_q, weights, rope, index, head_weights, cos, sin, fold, interleaved, index_interleaved, scale_ue8m0
) -> None:
    check_shape("q_rope", q_rope, None, None, None)
    check_shape("index_q", index_q, q_rope.shape[0], None, None)
    (T, _, R), (_, HI, D) = q_rope.shape, index_q.shape
    if R % 2 or R > D:
        raise ValueError(f"q_rope has shape {tuple(q_rope.shape)}; its last dim must be even and at most {D}")
    check_shape("weights", weights, T, HI)
    check_shape("rope", rope, *q_rope.shape)
    check_shape("index", index, *index_q.shape)
    check_shape("head_weights", head_weights, T, HI)
    check_shape("cos", cos, T, R // 2)
    check_shape("sin", sin, T, R // 2)
    check_dtype("sin", sin, cos.dtype)
    check_dtype("index_q", index_q, FP8)
    check_dtype("weights", weights, torch.float32)


def reference(
    q_rope, index_q, weights, rope, index, head_weights, cos, sin, fold, interleaved, index_interleaved, scale_ue8m0
) -> None:
    dtype = q_rope.dtype
    wide = compute_dtype(dtype)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    q_rope.copy_(rotate(rope.to(dtype).to(wide), c.to(wide), s.to(wide), interleaved=interleaved))
    q = rotate_part(index.to(dtype).float(), c.float(), s.float(), interleaved=index_interleaved, last=False)
    codes, scales = quantize_rows(q, scale_ue8m0)
    index_q.view(torch.uint8).copy_(codes.view(torch.uint8))
    weights.copy_(head_weights.float() * fold * scales)


ENCODE_QUERIES = define(
    "encode_queries(Tensor(a!) q_rope, Tensor(b!) index_q, Tensor(c!) weights, Tensor rope, Tensor index, "
    "Tensor head_weights, Tensor cos, Tensor sin, float fold, bool interleaved, bool index_interleaved, "
    "bool scale_ue8m0)",
    check=check,
    reference=reference,
    providers={"triton": "compiled_dsa.custom_ops.kernels.encode_queries"},
)


def encode_queries(
    q_rope: Tensor,
    index_q: Tensor,
    weights: Tensor,
    rope: Tensor,
    index: Tensor,
    head_weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    fold: float,
    interleaved: bool,
    index_interleaved: bool,
    scale_ue8m0: bool = False,
    *,
    provider: str | None = None,
) -> None:
    """What attention and index_topk take of the rows' queries, in place. Ropes are computed in fp32.

    Args:
        q_rope: [T, H, R], gets ``rope`` after its rotation, in the dtype of the model.
        index_q: e4m3 [T, HI, D], gets the codes of ``index`` after the rotation of its first R values.
        weights: fp32 [T, HI], gets head_weights * fold * the scale of each head's codes.
        rope, index: [T, H, R] and [T, HI, D], products that are rounded to the dtype of q_rope first; any strides but
            the last.
        head_weights: [T, HI].
        cos, sin: [T, R/2], of one dtype, one angle a pair.
        interleaved, index_interleaved: pairs are (0,1),(2,3).. when True, (0,R/2),(1,R/2+1).. when False.
        scale_ue8m0: as of ``quantize_rows``, which says what the scales are.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.encode_queries(
        q_rope, index_q, weights, rope, index, head_weights, cos, sin, fold, interleaved, index_interleaved,
        scale_ue8m0, provider=provider,
    )  # fmt: skip

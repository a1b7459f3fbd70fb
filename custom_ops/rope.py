"""Rotary embedding in the layouts of the DSA models, in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, deinterleave: bool = False) -> Tensor:
    """Rotates the pairs of the last dim of x.

    Args:
        x: [..., R].
        cos, sin: [..., R/2], broadcast over x; one angle a pair. The arithmetic is done in the promoted dtype.
        interleaved: pairs are (0,1),(2,3).. when True, (0,R/2),(1,R/2+1).. when False.
        deinterleave: with ``interleaved``, return first all even and then all odd elements, the order that
            Hugging Face's ``apply_rotary_pos_emb_interleave`` gives; scores of two such vectors do not change.
    """
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x.chunk(2, dim=-1)
    rotated = a * cos - b * sin, b * cos + a * sin
    if interleaved and not deinterleave:
        return torch.stack(rotated, dim=-1).flatten(-2)
    return torch.cat(rotated, dim=-1)


def rotate_part(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, last: bool, deinterleave: bool = False
) -> Tensor:
    """Rotates the first (or last) R dims of x [..., D], where cos and sin are [..., R/2]; the others pass."""
    R = 2 * cos.shape[-1]
    first = x.shape[-1] - R if last else 0
    before, part, after = x[..., :first], x[..., first : first + R], x[..., first + R :]
    part = rotate(part, cos, sin, interleaved=interleaved, deinterleave=deinterleave)
    return torch.cat([before, part] if last else [part, after], dim=-1)

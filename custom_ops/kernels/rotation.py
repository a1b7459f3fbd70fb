"""Rotary embedding inside kernels."""

import triton
import triton.language as tl


@triton.jit
def pair_of(d, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of elements d of R that are rotated: (the other element of the pair, index of its angle, is d the second?)."""
    if INTERLEAVED:
        return d ^ 1, d // 2, d % 2 == 1
    else:
        second = d >= R // 2
        return tl.where(second, d - R // 2, d + R // 2), d % (R // 2), second


@triton.jit
def rotated(x, other, cos, sin, second):
    """x, the second or first element of a pair whose other element is ``other``, by the angle of cos and sin."""
    return x * cos + tl.where(second, other, -other) * sin

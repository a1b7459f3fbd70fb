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


@triton.jit
def angles(cos, sin, angle, inside):
    """cos and sin of a row, which the pointers are of, in fp32; of no rotation where not ``inside``."""
    c = tl.load(cos + angle, mask=inside, other=1.0).to(tl.float32)
    return c, tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotate_first(x, start, d, there, cos, sin, R: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr):
    """x with the first R elements rotated, where x are the elements d of the vectors at ``start``, in fp32.

    The other elements of the pairs are loaded too, where ``there``, and rounded to DTYPE as those of x were.
    ``cos``, ``sin`` point at the row's angles.
    """
    turned = d < R
    other, angle, second = pair_of(d, R, INTERLEAVED)
    c, s = angles(cos, sin, angle, turned)
    y = tl.load(start + other, mask=there & turned, other=0.0).to(DTYPE).to(tl.float32)
    return tl.where(turned, rotated(x, y, c, s, second), x)

"""encode_queries in Triton: a program takes some heads of a row, of its attention queries or its index queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import (
    dependent_launch,
    early_start,
    refuses_device,
    refuses_dtype,
    refuses_strides,
    wait_for_kernel_in_front,
)
from compiled_dsa.custom_ops.kernels.rope import angles, rotated
from compiled_dsa.custom_ops.kernels.store_index_keys import row_scale
from compiled_dsa.custom_ops.kernels.store_latents import to_e4m3

HEADS, INDEX_HEADS = 32, 16  # of a program


def refuses(
    q_rope, index_q, weights, rope, index, head_weights, cos, sin, fold, interleaved, index_interleaved, scale_ue8m0
) -> str | None:
    return (
        refuses_device(index_q.view(torch.uint8))
        or refuses_dtype(q_rope=q_rope, rope=rope, index=index, head_weights=head_weights, cos=cos)
        or refuses_strides(
            q_rope=q_rope, index_q=index_q, weights=weights, rope=rope, index=index, head_weights=head_weights, cos=cos,
            sin=sin,
        )
    )  # fmt: skip


@triton.jit
def _load_rotated(
    start, there, cos, sin, DTYPE: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """First and second elements [heads, HALF] of the pairs of vectors of R elements at ``start``, rotated, in fp32.

    A thread reads and writes runs of elements, whatever the order of pairs; elements past R are 0.
    """
    pair = tl.arange(0, HALF)[None, :]
    inside = pair < R // 2
    c, s = angles(cos, sin, pair, inside)
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(start + d, mask=there & (d < R), other=0.0).to(DTYPE).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
    else:
        first = tl.load(start + pair, mask=there & inside, other=0.0).to(DTYPE).to(tl.float32)
        second = tl.load(start + (R // 2 + pair), mask=there & inside, other=0.0).to(DTYPE).to(tl.float32)
    return rotated(first, second, c, s, False), rotated(second, first, c, s, True)


@triton.jit
def _store(pointers, x, scale, mask):
    """x [heads, n], in the dtype of the model, or as codes where there is a scale [heads, 1]."""
    x = x.to(pointers.dtype.element_ty) if scale is None else to_e4m3(x, scale)
    tl.store(pointers, x, mask=mask)


@triton.jit
def _store_pairs(start, first, second, scale, there, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    HALF: tl.constexpr = first.shape[1]
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF)[None, :]
        x = tl.reshape(tl.join(first, second), [first.shape[0], 2 * HALF])
        _store(start + d, x, scale, there & (d < R))
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = there & (pair < R // 2)
        _store(start + pair, first, scale, inside)
        _store(start + (R // 2 + pair), second, scale, inside)


@triton.jit
def _attention_heads(
    q_rope, rope, cos, sin, first, heads, q_rope_head, rope_head, DTYPE: tl.constexpr, R: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = first + tl.arange(0, HEADS)[:, None]
    there = head < heads
    x, y = _load_rotated(rope + head * rope_head, there, cos, sin, DTYPE, R, HALF, INTERLEAVED)
    _store_pairs(q_rope + head * q_rope_head, x, y, None, there, R, INTERLEAVED)


@triton.jit
def _index_heads(
    codes, weights, index, head_weights, cos, sin, fold, first, heads, codes_head, index_head, DTYPE: tl.constexpr,
    R: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    number = first + tl.arange(0, HEADS)
    head = number[:, None]
    there = head < heads
    index += head * index_head
    codes += head * codes_head
    largest = tl.zeros([HEADS], tl.float32)
    if R > 0:
        x, y = _load_rotated(index, there, cos, sin, DTYPE, R, HALF, INTERLEAVED)
        largest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=1)
    if D > R:
        d = R + tl.arange(0, REST)[None, :]
        rest = tl.load(index + d, mask=there & (d < D), other=0.0).to(DTYPE).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
    scale = row_scale(largest, UE8M0)
    if R > 0:
        _store_pairs(codes, x, y, scale[:, None], there, R, INTERLEAVED)
    if D > R:
        _store(codes + d, rest, scale[:, None], there & (d < D))
    w = tl.load(head_weights + number, mask=number < heads, other=0.0)
    tl.store(weights + number, w.to(tl.float32) * fold * scale, mask=number < heads)


@triton.jit(do_not_specialize=["heads", "index_heads"])
def _encode(
    q_rope,  # [T, H, R]
    index_q,  # [T, HI, D]
    weights,  # [T, HI]
    rope,
    index,
    head_weights,
    cos,
    sin,
    fold,
    heads,
    index_heads,
    blocks,  # of heads of q_rope; programs after these have index heads
    q_rope_row,
    q_rope_head,
    index_q_row,
    index_q_head,
    weights_row,
    rope_row,
    rope_head,
    index_row,
    index_head,
    head_weights_row,
    cos_row,
    sin_row,
    R: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    UE8M0: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        wait_for_kernel_in_front()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    dtype: tl.constexpr = q_rope.dtype.element_ty
    if block < blocks:
        _attention_heads(
            q_rope + row * q_rope_row, rope + row * rope_row, cos + row * cos_row, sin + row * sin_row, block * HEADS,
            heads, q_rope_head, rope_head, dtype, R, HALF, HEADS, INTERLEAVED,
        )  # fmt: skip
    else:
        _index_heads(
            index_q + row * index_q_row, weights + row * weights_row, index + row * index_row,
            head_weights + row * head_weights_row, cos + row * cos_row, sin + row * sin_row, fold,
            (block - blocks) * INDEX_HEADS, index_heads, index_q_head, index_head, dtype, R, HALF, D, REST, INDEX_HEADS,
            INDEX_INTERLEAVED, UE8M0,
        )  # fmt: skip


def run(
    q_rope: Tensor, index_q: Tensor, weights: Tensor, rope: Tensor, index: Tensor, head_weights: Tensor, cos: Tensor,
    sin: Tensor, fold: float, interleaved: bool, index_interleaved: bool, scale_ue8m0: bool,
) -> None:  # fmt: skip
    (T, H, R), (_, HI, D) = q_rope.shape, index_q.shape
    if T == 0:
        return
    blocks = triton.cdiv(H, HEADS) if R else 0
    programs = blocks + triton.cdiv(HI, INDEX_HEADS)
    if programs == 0:
        return
    _encode[(T, programs)](
        q_rope,
        index_q,
        weights,
        rope,
        index,
        head_weights,
        cos,
        sin,
        fold,
        H,
        HI,
        blocks,
        q_rope.stride(0),
        q_rope.stride(1),
        index_q.stride(0),
        index_q.stride(1),
        weights.stride(0),
        rope.stride(0),
        rope.stride(1),
        index.stride(0),
        index.stride(1),
        head_weights.stride(0),
        cos.stride(0),
        sin.stride(0),
        R=R,
        HALF=triton.next_power_of_2(max(R // 2, 1)),
        D=D,
        REST=triton.next_power_of_2(max(D - R, 1)),
        HEADS=HEADS,
        INDEX_HEADS=INDEX_HEADS,
        INTERLEAVED=interleaved,
        INDEX_INTERLEAVED=index_interleaved,
        UE8M0=scale_ue8m0,
        **early_start(dependent_launch(index_q.device)),
    )

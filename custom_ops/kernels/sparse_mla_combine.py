"""Attention over the splits of a row, combined; the second kernel of sparse_mla where rows are few.

Legend: T rows, H heads, L latent dim, S splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import (
    LOG2E,
    dependent_launch,
    early_start,
    finite,
    multiprocessors,
    wait_for_kernel_in_front,
)

MIN_COLUMNS = 128  # of a program, which is one warp: 8 bytes a thread of a bf16 split


@triton.jit(do_not_specialize=["splits"])
def _combine(
    parts,  # [S, T, H, L], contiguous
    parts_lse,  # [S, T, H], contiguous
    sinks,
    out,  # [T, H, L]
    lse,  # [T, H]
    heads,
    splits,
    parts_split,
    lse_split,
    out_row,
    out_head,
    lse_row,
    lse_head,
    L: tl.constexpr,
    COLUMNS: tl.constexpr,
    S_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row, head and block of latents: the splits weighted by exp of their log-sum-exp.

    A thread has its latents of every split: sums over splits that lie in several warps would go through shared memory.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // heads
    head = pid % heads
    split = tl.arange(0, S_PADDED).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    where = parts + pid * L + column
    if EARLY:
        wait_for_kernel_in_front()  # which writes the splits
    each = tl.load(parts_lse + split * lse_split + pid, mask=split < splits, other=float("-inf"))
    maximum = tl.max(each, axis=0)
    total = tl.sum(tl.exp2((each - finite(maximum)) * LOG2E), axis=0)
    o = tl.zeros([COLUMNS], tl.float32)
    for s in tl.static_range(S_PADDED):
        index = s + tl.arange(0, 1).to(tl.int64)
        one = tl.load(parts_lse + index * lse_split + pid, mask=index < splits, other=float("-inf"))
        part = tl.load(where + index * parts_split, mask=(index < splits) & (column < L), other=0.0)
        # what a split that saw nothing holds must not count
        o += tl.where(one == float("-inf"), 0.0, part * tl.exp2((one - finite(maximum)) * LOG2E))
    log_sum = tl.where(total == 0.0, float("-inf"), maximum + tl.log(total))
    tl.store(lse + row * lse_row + head * lse_head, log_sum, mask=tl.program_id(1) == 0)
    if SINKS:
        sink = tl.load(sinks + head)
        new = tl.maximum(maximum, sink)
        shrink = tl.exp2((maximum - finite(new)) * LOG2E)
        total = total * shrink + tl.exp2((sink - finite(new)) * LOG2E)
        o = o * shrink
    o = o / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * out_row + head * out_head + column, o.to(out.dtype.element_ty), mask=column < L)


def empty_parts(splits: int, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Buffers of the splits of ``out`` [T, H, L] and of their log-sum-exps."""
    parts = torch.empty(splits, *out.shape, dtype=dtype, device=out.device)
    return parts, torch.empty(parts.shape[:-1], dtype=torch.float32, device=out.device)


def combine(parts: Tensor, parts_lse: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Splits [S, T, H, L] and their log-sum-exps [S, T, H], contiguous, to ``out`` and ``lse``.

    Its programs start beside the kernel that writes the splits, if that one lets them, and wait for its end. Each has
    so few latents of a row and head that the device is full.
    """
    S, T, H, L = parts.shape
    columns = max(16, triton.next_power_of_2(L))
    full = 2 * multiprocessors(out.device)
    while columns > MIN_COLUMNS and T * H * triton.cdiv(L, columns) < full:
        columns //= 2
    _combine[(T * H, triton.cdiv(L, columns))](
        parts,
        parts_lse,
        lse if sinks is None else sinks,
        out,
        lse,
        H,
        S,
        parts.stride(0),
        parts_lse.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        L=L,
        COLUMNS=columns,
        S_PADDED=triton.next_power_of_2(S),
        SINKS=sinks is not None,
        num_warps=max(1, columns // 256),
        **early_start(dependent_launch(out.device)),
    )

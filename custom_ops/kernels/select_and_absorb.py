"""select_and_absorb on two streams: the selection on a side stream, the batched GEMM and a prefetch on the caller's.

The GEMM is the caller's, since cuBLAS keeps a workspace for each stream, and graphs must find theirs in their own pool.
One stream has it all where rows are many or long: their keys are read and selected by all of the device, and sharing it
costs more than it saves. A decode layer of V3.2 on an H200 took 142.8 us for 1 row of 8k keys and 187.3 for 16 on two
streams (144.9 and 188.0 on one); for 1 row of 64k keys and 32 rows of 32k, 169.6 and 269.7 (168.4 and 259.8).
"""

import functools
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels import index_topk
from compiled_dsa.custom_ops.kernels.common import refuses_dtype
from compiled_dsa.custom_ops.kernels.select import DIRECT_SCORES
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.custom_ops.select_and_absorb import absorb

MOST_ROWS = 16
AHEAD_BYTES = 20 << 20  # of each tensor; L2 of an H200 has 50 MiB

_LINE = tl.constexpr(128)  # bytes
_LINES = 1024  # of a program


def refuses(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent, ahead,
    positions_out=None, init_tokens=0, local_tokens=0,
) -> str | None:  # fmt: skip
    return refuses_dtype(q_nope=q_nope) or index_topk.refuses(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out=positions_out,
        init_tokens=init_tokens, local_tokens=local_tokens,
    )  # fmt: skip


@functools.cache
def _side_stream(device: torch.device, _thread: int) -> torch.cuda.Stream:
    """One a thread: work of another one must not end up in a graph that this one captures."""
    return torch.cuda.Stream(device)


@triton.jit
def _prefetch_lines(first, first_lines, second, second_lines, LINES: tl.constexpr):
    """Lines of two pieces of memory (uint8) into L2. Not in the interpreter."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    end = tl.cdiv(first_lines, LINES) * LINES  # of the programs of the first piece
    start = tl.where(line < end, first.to(tl.int64), second.to(tl.int64))
    line = tl.where(line < end, tl.minimum(line, first_lines - 1), tl.minimum(line - end, second_lines - 1))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [start + line.to(tl.int64) * _LINE],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch(tensors: list[Tensor]) -> None:
    """The first ``AHEAD_BYTES`` of each contiguous tensor into L2, those of two tensors by one launch."""
    pieces = [
        (tensor.view(torch.uint8), min(tensor.nbytes, AHEAD_BYTES) // _LINE.value)
        for tensor in tensors
        if tensor.is_contiguous() and tensor.nbytes >= _LINE.value
    ]
    for i in range(0, len(pieces), 2):
        first, lines = pieces[i]
        second, more = pieces[i + 1] if i + 1 < len(pieces) else (first, 0)
        programs = triton.cdiv(lines, _LINES) + triton.cdiv(more, _LINES)
        _prefetch_lines[(programs,)](first, lines, second, more, LINES=_LINES)


def run(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent, ahead,
    positions_out=None, init_tokens=0, local_tokens=0,
) -> None:  # fmt: skip
    select = functools.partial(
        index_topk.run, q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic,
        positions_out=positions_out, init_tokens=init_tokens, local_tokens=local_tokens,
    )  # fmt: skip
    short = page_table.shape[1] * PAGE <= DIRECT_SCORES  # one program selects from a row
    if q.device.type != "cuda" or q.shape[0] > MOST_ROWS or not short:
        select()
        absorb(q_nope, w_uk, q_latent)
        return
    caller, side = torch.cuda.current_stream(), _side_stream(q.device, threading.get_ident())
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        select()
    absorb(q_nope, w_uk, q_latent)
    prefetch(ahead)
    caller.wait_stream(side)

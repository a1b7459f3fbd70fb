"""select_and_absorb in Triton: the absorption's programs start beside those of the selection.

A selection is one program a row, or a few, that mostly wait for each other's counts, so the absorption's products find
the device all but idle. The selection's programs let the kernel behind start as soon as they run themselves, and only
the end of that kernel waits for theirs. What it reads is complete by then: the scores, or a selection that needs none,
are launched after the end of all that comes before. What it writes, nobody has in use.

A decode layer of V3.2 on an H200 took 132.8 us for 1 row of 8k keys with both beside each other on two streams, and
130.0 so; for 16 rows of 8k 177.5 and 172.5. With one after the other, 1 row of 64k keys took 146.0 and so 139.8; 32 of
32k 244.0 and 239.4; 128 of 8k 397.5 and 392.2. Weights of later products fetched into L2 meanwhile cost 1 to 10 us.
"""

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels import index_topk
from compiled_dsa.custom_ops.kernels.common import dependent_launch, early_start, refuses_dot, refuses_dtype
from compiled_dsa.custom_ops.select_and_absorb import absorb

MOST_ROWS = 128  # measured up to here; for more, cuBLAS
ROWS = 64
COLUMNS = 128
BLOCK = 64


def refuses(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent,
    positions_out=None, init_tokens=0, local_tokens=0,
) -> str | None:  # fmt: skip
    return refuses_dtype(q_nope=q_nope) or index_topk.refuses(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out=positions_out,
        init_tokens=init_tokens, local_tokens=local_tokens,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _absorb(
    q_nope,  # [T, H, N]
    w_uk,  # [H, N, L]
    q_latent,  # [T, H, L]
    T,
    q_row,
    q_head,
    w_head,
    w_row,
    out_row,
    out_head,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for ROWS rows and COLUMNS columns of a head."""
    head = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)
    real = (t < T)[:, None]
    rows = q_nope + t.to(tl.int64)[:, None] * q_row + head * q_head + k[None, :]
    tile = w_uk + head * w_head + k[:, None] * w_row + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=N // BLOCK):  # all loads at once
        sums = tl.dot(tl.load(rows + start, mask=real, other=0.0), tl.load(tile + start * w_row), sums)
    place = q_latent + t.to(tl.int64)[:, None] * out_row + head * out_head + column[None, :]
    tl.store(place, sums.to(q_latent.dtype.element_ty), mask=real)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # whoever comes after this kernel finds the selection done, too


def _takes(q_nope: torch.Tensor, w_uk: torch.Tensor, q_latent: torch.Tensor) -> bool:
    T, _, N = q_nope.shape
    return (
        0 < T <= MOST_ROWS
        and q_nope.dtype != torch.float32
        and not refuses_dot(q_nope.dtype)
        and N % BLOCK == 0
        and w_uk.shape[2] % COLUMNS == 0
        and q_nope.stride(2) == w_uk.stride(2) == q_latent.stride(2) == 1
    )


def run(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, q_nope, w_uk, q_latent,
    positions_out=None, init_tokens=0, local_tokens=0,
) -> None:  # fmt: skip
    index_topk.run(
        q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic, positions_out=positions_out,
        init_tokens=init_tokens, local_tokens=local_tokens,
    )  # fmt: skip
    if not _takes(q_nope, w_uk, q_latent):
        absorb(q_nope, w_uk, q_latent)
        return
    T, H, N = q_nope.shape
    rows = min(ROWS, max(16, triton.next_power_of_2(T)))
    _absorb[(triton.cdiv(T, rows), w_uk.shape[2] // COLUMNS, H)](
        q_nope,
        w_uk,
        q_latent,
        T,
        q_nope.stride(0),
        q_nope.stride(1),
        w_uk.stride(0),
        w_uk.stride(1),
        q_latent.stride(0),
        q_latent.stride(1),
        N=N,
        ROWS=rows,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        num_warps=4,
        **early_start(dependent_launch(q.device)),
    )

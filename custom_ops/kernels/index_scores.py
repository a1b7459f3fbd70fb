"""Index scores of rows into scratch, in Triton: the first half of index_topk.

The kernel multiplies a block of keys with all index heads of up to ``128 / HI`` rows at once, so that rows of a request
share the loads of its keys; for long rows it also leaves the maximum of every few neighbouring scores. A key that is
always chosen gets a score of +inf; other such scores then become the largest finite number.

Prefills of fp8 pools have a kernel of their own on Hopper (index_scores_gluon.py), with the same scores bit for bit
where half of a weight is exact, which it is but for subnormal ones.

Legend: HI index heads, D index head dim, P pages, W columns of the page table.
"""

import torch
import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import HOPPER, dependent_launch, dot_precision, multiprocessors
from compiled_dsa.custom_ops.layout import PAGE, split_index_pool

TILE_COLUMNS = 128  # rows * index heads of one tile of scores
WAVES = 4  # programs a multiprocessor, where the rows are too few to fill the device
PREFILL_ROWS = 8  # so many rows a request: the scores are bound by arithmetic, with fewer by reading keys
PREFILL_REGISTERS = 128  # a thread: four programs a multiprocessor
STAGES = 5  # pages are read two blocks ahead, their keys and scales one or two
HOPPER_ROWS = 64  # a request: its tiles are 4 to 16 rows, of which those of two requests are multiplied twice
HOPPER_HEADS = (32, 64, 128)
HOPPER_D = 128
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of finite fp32 numbers


@triton.jit(do_not_specialize=["rows", "columns", "pages", "K", "init_tokens", "local_tokens"])
def _scores(
    q,  # [rows, HI, D]
    weights,  # [rows, HI]
    keys,  # [P, 64, D]
    key_scales,  # [P, 64], for an fp8 pool
    page_table,  # [B, W]
    req_of_row,  # [rows]
    visible,  # [rows]
    scores,  # [rows, 64 W]
    maxima,  # [rows, at least 64 W / GROUP], if GROUP
    zeroed,  # int32 [rows, ZEROED]
    rows,
    columns,
    pages,
    K,
    q_row,
    q_head,
    weights_row,
    keys_page,
    scales_page,
    table_row,
    scores_row,
    maxima_row,
    init_tokens,
    local_tokens,
    HI: tl.constexpr,
    HI_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    FORCED: tl.constexpr,  # some tokens are always chosen
    ZEROED: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    lane = tl.arange(0, ROWS)
    row = first + lane
    request = tl.load(req_of_row + row, mask=row < rows, other=-1)
    seen = tl.minimum(tl.load(visible + row, mask=row < rows, other=0), columns)
    seen = tl.where(seen > K, seen, 0)

    # one column of the tile is one head of one row
    column = tl.arange(0, ROWS * HI_PADDED)
    head = column % HI_PADDED
    column_row = first + column // HI_PADDED
    real = (column_row < rows) & (head < HI)
    d = tl.arange(0, D_PADDED)
    q_offsets = column_row.to(tl.int64) * q_row + head * q_head
    q_tile = tl.load(q + q_offsets[None, :] + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0)
    w = tl.load(weights + column_row.to(tl.int64) * weights_row + head, mask=real, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # the selection's programs start and wait
    if tl.max(seen, axis=0) == 0:
        return

    if ZEROED:
        for start in range(tl.program_id(1) * 256, ZEROED, tl.num_programs(1) * 256):
            counter = start + tl.arange(0, 256)
            where = zeroed + row.to(tl.int64)[None, :] * ZEROED + counter[:, None]
            tl.store(where, tl.zeros([256, ROWS], tl.int32), mask=(row < rows)[None, :] & (counter < ZEROED)[:, None])
    lanes = tl.arange(0, BLOCK)
    groups = tl.arange(0, BLOCK // GROUP)
    step = tl.num_programs(1) * BLOCK
    begin = tl.program_id(1) * BLOCK
    lines = scores + row.to(tl.int64)[None, :] * scores_row
    group_lines = maxima + row.to(tl.int64)[None, :] * maxima_row
    # Pass r serves the rows of the tile that belong to the request of row r. Nearly always pass 0 serves them all.
    for r in range(ROWS):
        this = tl.sum(tl.where(lane == r, request, 0), axis=0)
        same = request == this
        served = tl.sum((same & (lane < r)).to(tl.int32), axis=0) > 0
        last = tl.where(served, 0, tl.max(tl.where(same, seen, 0), axis=0))
        table = page_table + this.to(tl.int64) * table_row
        page_ahead = tl.load(table + begin // PAGE, mask=begin < last, other=-1)
        for start in tl.range(begin, last, step, num_stages=STAGES):
            if STAGES is None:
                page = page_ahead
                page_ahead = tl.load(table + (start + step) // PAGE, mask=start + step < last, other=-1)
            else:  # a tensor of one element is read ahead together with scales and keys, a scalar is not
                page = tl.load(table + start // PAGE + tl.arange(0, 1))
            good = (page >= 0) & (page < pages)
            page = tl.where(good, page, 0).to(tl.int64)
            # Unmasked: the page is one of the pool. Scores and maxima past the row's last key are not read.
            if FP8:
                key_scale = tl.load(key_scales + page * scales_page + start % PAGE + lanes)
            offsets = (lanes * D)[:, None] + d[None, :]
            if STAGES is None:
                block = keys + (page * keys_page + start % PAGE * D) + offsets
            else:
                block = keys + (page * keys_page + start % PAGE * D)[:, None] + offsets
            key = tl.load(block) if D == D_PADDED else tl.load(block, mask=(d < D)[None, :], other=0.0)
            dots = tl.dot(key, q_tile, input_precision=PRECISION)
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if HI != HI_PADDED:  # a padded head of zeros times an infinite key is NaN
                dots = tl.where(real[None, :], dots, 0.0)
            score = tl.sum(tl.reshape(dots * w[None, :], [BLOCK, ROWS, HI_PADDED]), axis=2)
            if FP8:  # not before the product, during which scales arrive
                score *= key_scale[:, None]
            score = tl.where(tl.broadcast_to(good, [BLOCK])[:, None], score, float("nan"))
            if FORCED:
                position = (start + lanes)[:, None]
                forced = (position < init_tokens) | (position >= (seen - local_tokens)[None, :])
                forced &= tl.broadcast_to(good, [BLOCK])[:, None]
                score = tl.where(score == float("inf"), _LARGEST, score)
                score = tl.where(forced, float("inf"), score)
            tl.store(lines + (start + lanes)[:, None], score, mask=same[None, :])
            if GROUP > 1:
                best = tl.max(tl.reshape(score, [BLOCK // GROUP, GROUP, ROWS]), axis=1)  # NaN where all are
                tl.store(group_lines + (start // GROUP + groups)[:, None], best, mask=same[None, :])


def on_hopper(q, pool, group: int, rows_per_request: int, forced: int, zeroed: torch.Tensor | None) -> bool:
    """Whether index_scores_gluon does what write_scores is asked for. It copies whole tiles, of dense tensors."""
    return (
        rows_per_request >= HOPPER_ROWS
        and group == forced == 0
        and zeroed is None
        and pool.dtype == torch.uint8
        and q.shape[1] in HOPPER_HEADS
        and q.shape[2] == HOPPER_D
        and q.stride() == (q.shape[1] * HOPPER_D, HOPPER_D, 1)  # of slices of rows too
        and pool.is_contiguous()
        and q.data_ptr() % 16 == pool.data_ptr() % 16 == 0
        and pool.numel() <= 1 << 33  # scales are found by a 32-bit number of fp32 elements
        and pool.device.type == "cuda"
        and torch.cuda.get_device_capability(pool.device) == HOPPER
    )


def write_scores(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    scores,
    maxima,
    K: int,
    group: int,
    rows_per_request: int,
    init_tokens: int = 0,
    local_tokens: int = 0,
    zeroed: torch.Tensor | None = None,
) -> None:
    """Scores [rows, 64 W] of what each row sees, the maxima of ``group`` neighbours if that is not 0, and zeros in
    ``zeroed``, int32 [rows, ...] and contiguous: counters of the selection. Rows that see at most K keys are left out.
    """
    if on_hopper(q, pool, group, rows_per_request, init_tokens + local_tokens, zeroed):
        from compiled_dsa.custom_ops.kernels import index_scores_gluon

        index_scores_gluon.launch(q, weights, pool, page_table, req_of_row, visible, scores, K)
        return
    rows, HI, D = q.shape
    keys, key_scales = split_index_pool(pool)
    fp8 = key_scales is not None
    exact = q.dtype == torch.float32
    HI_padded = max(16, triton.next_power_of_2(HI))
    # as many rows of a tile as requests have on average, so that decoding one token a request wastes none
    tile_rows = 1 if exact else max(1, min(TILE_COLUMNS // HI_padded, 1 << (rows_per_request.bit_length() - 1)))
    block = 16 if exact else PAGE  # divides a page
    prefill = rows_per_request >= PREFILL_ROWS
    tiles = triton.cdiv(rows, tile_rows)
    splits = min(triton.cdiv(scores.shape[1], block), max(1, WAVES * multiprocessors(q.device) // tiles))
    _scores[(tiles, splits)](
        q,
        weights,
        keys,
        key_scales if fp8 else weights,
        page_table,
        req_of_row,
        visible,
        scores,
        maxima,
        scores if zeroed is None else zeroed,
        rows,
        scores.shape[1],
        pool.shape[0],
        K,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        keys.stride(0),
        key_scales.stride(0) if fp8 else 0,
        page_table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        init_tokens,
        local_tokens,
        HI=HI,
        HI_PADDED=HI_padded,
        D=D,
        D_PADDED=max(32, triton.next_power_of_2(D)),
        ROWS=tile_rows,
        BLOCK=block,
        GROUP=group or 1,
        PAGE=PAGE,
        FP8=fp8,
        PRECISION=dot_precision(q.dtype),
        STAGES=None if exact or prefill else STAGES,
        EARLY=dependent_launch(q.device),  # it lets others start early, and does not itself: they read lengths at once
        FORCED=init_tokens + local_tokens > 0,
        ZEROED=0 if zeroed is None else zeroed.shape[1],
        num_warps=4,
        num_stages=1 if exact else 3,
        maxnreg=PREFILL_REGISTERS if prefill and not group and not exact else None,
    )

"""index_topk with DeepGEMM's scores (sgl-deep-gemm 0.1.5) and our selection.

Decode: its paged kernel, one row an item of its batch, over page tables made for each row; its schedule is computed by
a kernel in front of it at every call, so also at every replay of a captured graph. Prefill: its kernel over keys laid
end to end, which are gathered once a call. In both, a product that is NaN counts as 0 (relu by fmaxf); a NaN scale
gives a NaN score, as the contract has it. So NaN among the codes of a key or query is not seen in decode; in prefill
they are marked on the way (gather_index_keys). Tokens that are always chosen are left to other providers, which mark
them where they make the scores.

Legend: T rows, HI index heads, D index head dim, P pages, W columns of the page table.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_dsa.custom_ops.kernels.adapters import mark_pages, rows_of_pages
from compiled_dsa.custom_ops.kernels.common import refuses_strides
from compiled_dsa.custom_ops.kernels.gather_index_keys import gather_index_keys, mark_weights
from compiled_dsa.custom_ops.kernels.in_order import write_selection
from compiled_dsa.custom_ops.kernels.select import group_size, maxima_of, write_slots
from compiled_dsa.custom_ops.kernels.select_listed import list_size, programs_of, write_slots_listed
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.custom_ops.providers import common
from compiled_dsa.custom_ops.providers.common import FirstCalls, load, refuses_alignment

_library = load("deep_gemm")
_first = FirstCalls("deep_gemm")

VERSIONS = "0.1."
HEADS = (32, 64)
DIMS = (64, 128)
_COLUMNS = 256  # rows of its scores are padded to a multiple
_TILE = 128  # rows * heads of its prefill tiles, to whole ones of which rows are padded
_SCHEDULE_ROWS = 32  # its schedule is compiled for a multiple of so many


def refuses(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes: int | None = None,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> str | None:
    _, HI, D = q.shape
    if not _library.__version__.startswith(VERSIONS):
        return f"version {_library.__version__}; the calls are those of sgl-deep-gemm {VERSIONS}5"
    if pool.dtype != torch.uint8:
        return f"the pool has dtype {pool.dtype}; it takes fp8 pools"
    if HI not in HEADS or D not in DIMS:
        return f"{HI} index heads of {D}; it takes {HEADS} of {DIMS}"
    if init_tokens or local_tokens:
        return f"init_tokens={init_tokens}, local_tokens={local_tokens}; its scores know no tokens always chosen"
    if weights.dtype != torch.float32:
        return f"weights has dtype {weights.dtype}; it takes float32"
    reason = (
        common.refuses_device(pool)
        or refuses_alignment(pool)
        or refuses_strides(
            page_table=page_table,
            req_of_row=req_of_row,
            visible=visible,
            topk_out=topk_out,
            positions_out=positions_out,
        )
    )
    if reason is not None or scratch_bytes is None:
        return reason
    if not q.is_contiguous() or q.data_ptr() % 16:
        return "q is not contiguous and aligned to 16 bytes"
    if page_table.numel() * PAGE >= 2**31:
        return f"page_table has {page_table.numel()} entries; keys laid end to end have int32 numbers"
    needed = _held_bytes(q, page_table) + _tile_rows(HI) * _row_bytes(page_table, topk_out.shape[1])
    if scratch_bytes < needed:
        return f"scratch_bytes={scratch_bytes}; the keys laid end to end and scores of one tile need {needed} bytes"
    return None


class _Cut(NamedTuple):
    rows: int  # scored at a time
    programs: int  # of the selection by lists; 0: rows are selected without
    listed: int  # scores of a list


def _held_bytes(q: Tensor, page_table: Tensor) -> int:
    """Of gathered keys and their scales, and of the weights, for the whole call."""
    T, HI, D = q.shape
    return page_table.numel() * PAGE * (D + 4) + 4 * T * HI


def _tile_rows(HI: int) -> int:
    return _TILE // HI


def _row_bytes(page_table: Tensor, K: int) -> int:
    """Of a row's padded scores and maxima, and of the bounds of its keys."""
    columns = page_table.shape[1] * PAGE
    return 4 * (-(-columns // _COLUMNS) * _COLUMNS + maxima_of(columns, group_size(columns, K, True)) + 4)


def run(
    q,
    weights,
    pool,
    page_table,
    req_of_row,
    visible,
    topk_out,
    deterministic,
    scratch_bytes: int | None = None,
    positions_out=None,
    init_tokens=0,
    local_tokens=0,
) -> None:
    T, K = topk_out.shape
    if T == 0 or K == 0:
        return
    if pool.shape[0] == 0 or page_table.numel() == 0:
        for out in (topk_out, positions_out):
            if out is not None:
                out.fill_(-1)
        return
    rows = (page_table, req_of_row, visible)
    if page_table.shape[1] * PAGE <= K:
        unused = torch.empty(1, 1, dtype=torch.float32, device=q.device)
        write_slots(unused, unused, *rows, topk_out, pool.shape[0], 0, False, positions_out)
    elif scratch_bytes is None:
        scores = decode_scores(q, weights, pool, *rows, K)
        _select(scores, *rows, topk_out, pool.shape[0], positions_out, deterministic, prefill=False)
    else:
        _prefill(q, weights, pool, *rows, topk_out, deterministic, scratch_bytes, positions_out)


warmup = run


def decode_scores(q, weights, pool, page_table, req_of_row, visible, K: int) -> Tensor:
    """fp32 [T, 64 W] by logical position, of rows that see more than K keys; without regard to bad pages."""
    T, HI, D = q.shape
    key = (q.device, HI, D, -(-T // _SCHEDULE_ROWS))
    _first.require(key)
    tables, lengths = rows_of_pages(page_table, req_of_row, visible, pool.shape[0], K)
    lengths = lengths[:, None]
    schedule = _library.get_paged_mqa_logits_metadata(lengths, PAGE, _library.get_num_sms())
    scores = _library.fp8_paged_mqa_logits(
        q.contiguous()[:, None],
        pool.view(-1, PAGE, 1, D + 4),
        weights.contiguous(),
        lengths,
        tables,
        schedule,
        page_table.shape[1] * PAGE,
        False,
    )
    _first.done(key)
    return scores


def prefill_scores(q, weights, keys, scales, first: Tensor, end: Tensor, columns: int) -> Tensor:
    """fp32 [rows, columns] over the keys [first, end) of each row, counted from its first; all are contiguous."""
    key = (q.device, *q.shape[1:], "prefill")
    _first.require(key)
    scores = _library.fp8_mqa_logits(q, (keys, scales), weights, first, end, False, max_seqlen_k=columns)
    _first.done(key)
    return scores


def _prefill(
    q, weights, pool, page_table, req_of_row, visible, topk_out, deterministic: bool, scratch_bytes: int, positions_out
) -> None:
    T, K = topk_out.shape
    columns = page_table.shape[1] * PAGE
    cut = _cut(T, q.shape[1], page_table, K, scratch_bytes - _held_bytes(q, page_table), q.device)
    weights = mark_weights(q, weights)
    keys, scales = gather_index_keys(pool, page_table)
    lists = torch.empty(cut.programs, cut.listed, dtype=torch.int64, device=q.device)
    for start in range(0, T, cut.rows):
        part = slice(start, min(start + cut.rows, T))
        first = req_of_row[part] * columns
        end = first + visible[part].clamp(0, columns)
        scores = prefill_scores(q[part], weights[part], keys, scales, first, end, columns)
        positions = None if positions_out is None else positions_out[part]
        rows = (page_table, req_of_row[part], visible[part])
        if cut.programs:
            write = partial(write_slots_listed, scores, lists, early=False)
            write_selection(write, *rows, topk_out[part], pool.shape[0], positions, deterministic)
        else:
            _select(scores, *rows, topk_out[part], pool.shape[0], positions, deterministic, prefill=True)
        del scores  # before the next ones are made


def _cut(T: int, HI: int, page_table: Tensor, K: int, room: int, device: torch.device) -> _Cut:
    """How many rows are scored at a time so that their scores, and lists of the selection, take ``room`` bytes at most.

    Its programs take tiles of rows in turns, one program a multiprocessor; the rows of whole turns cost no more time.
    """
    columns, row_bytes, tile = page_table.shape[1] * PAGE, _row_bytes(page_table, K), _tile_rows(HI)
    listed = list_size(columns, K, True)
    programs = programs_of(T, tile * row_bytes, listed, room, device)
    rows = (room - 8 * listed * programs) // row_bytes // tile * tile
    turn = tile * _library.get_num_sms()
    if turn < rows < T:
        rows = rows // turn * turn
    return _Cut(rows, programs, listed)


def _select(
    scores, page_table, req_of_row, visible, topk_out, pages: int, positions_out, deterministic: bool, prefill: bool
) -> None:
    columns, K = page_table.shape[1] * PAGE, topk_out.shape[1]
    group = group_size(columns, K, prefill)
    maxima = torch.empty(scores.shape[0], maxima_of(columns, group), dtype=torch.float32, device=scores.device)
    rows = (page_table, req_of_row, visible)
    if group or not prefill:  # scores of gathered keys on bad pages are NaN already
        mark_pages(scores, maxima, *rows, pages, K, group)
    write = partial(write_slots, scores, maxima, group=group, early=False)
    write_selection(write, *rows, topk_out, pages, positions_out, deterministic)

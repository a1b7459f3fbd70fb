"""A selection of index_topk in the order of positions.

Which kernel selects depends on the number of rows and on the width of the page table, and each leaves the keys of a row
in an order of its own, which the rounding of attention would depend on. So with ``deterministic`` the selection writes
positions only, into the memory of the slots; the kernel here sorts them and puts the slots in their place.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import paged_slots
from compiled_dsa.custom_ops.layout import PAGE

LANES_PER_THREAD = 8
MOST_WARPS = 8

_LAST = tl.constexpr(0x7FFFFFFF)  # after all positions


@triton.jit(do_not_specialize=["columns", "pages", "K"])
def _put_in_order(
    page_table,
    req_of_row,
    visible,
    topk_out,  # [rows, K]: positions, then slots
    positions_out,  # [rows, K], if POSITIONS
    columns,
    pages,
    K,
    table_row,
    out_row,
    positions_row,
    LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(visible + row), columns)
    table = page_table + tl.load(req_of_row + row).to(tl.int64) * table_row
    lane = tl.arange(0, LANES)
    out = topk_out + row * out_row + lane
    position = tl.load(out, mask=lane < K, other=-1)
    tl.debug_barrier()  # all positions are in registers: their memory takes the slots
    if n > K:  # a row of fewer keys has them in order, and -1 in the place of one that does not exist
        position = tl.sort(tl.where(position < 0, _LAST, position))
        position = tl.where(position == _LAST, -1, position)
    slot = paged_slots(table, position, position >= 0, pages).to(tl.int32)
    tl.store(out, slot, mask=lane < K)
    if POSITIONS:
        tl.store(positions_out + row * positions_row + lane, position, mask=lane < K)


def write_selection(
    write: Callable[..., None],
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    topk_out: Tensor,
    pages: int,
    positions_out: Tensor | None,
    deterministic: bool,
) -> None:
    """Writes ``topk_out`` and, if any, ``positions_out``, both [rows, K] and whole, with ``deterministic`` in the order
    of positions.

    Args:
        write: ``select.write_slots`` or one like it, which has been given all but what stands here.
    """
    rows = (page_table, req_of_row, visible)
    T, K = topk_out.shape
    if not deterministic or page_table.shape[1] * PAGE <= K:  # all rows take all of their keys, in order
        write(*rows, topk_out, pages, positions_out=positions_out)
        return
    write(*rows, None, pages, positions_out=topk_out)
    positions = topk_out if positions_out is None else positions_out
    lanes = max(16, triton.next_power_of_2(K))
    _put_in_order[(T,)](
        *rows,
        topk_out,
        positions,
        page_table.shape[1] * PAGE,
        pages,
        K,
        page_table.stride(0),
        topk_out.stride(0),
        positions.stride(0),
        LANES=lanes,
        POSITIONS=positions_out is not None,
        num_warps=max(1, min(MOST_WARPS, lanes // (32 * LANES_PER_THREAD))),
    )

"""Index scores of prefills on Hopper, in Gluon: fp8 pools, D = 128, and 32, 64 or 128 index heads.

A tile is 512 columns, each a head of a row: 8 rows of 64 heads. Three warpgroups share it:

- the producer has the copy engine bring the queries, once, and then page after page of keys into a ring;
- two consumers multiply each page with 256 columns each, and sum over the heads. While one sums, the other multiplies.

What bounds both together is registers: a product reads and writes its sums there, so that an instruction beside it
delays it, by half a cycle to a whole one. So instructions count: two for an element of a product, ``x + |x|`` (twice
its relu; a maximum takes 9 % longer) and the sum with half of the weight. On an H200, 4096 rows of 64 heads and 32,768
keys take 1.93 ms, DeepGEMM 2.03 (h200-ops.json). In shorter runs, at higher clocks, 1.76; the kernel in Triton 2.08,
these products alone 1.08, with those two instructions 1.45. Turns taken by barriers, and sums over lanes and stores
during the next product, did not shorten it.

This module imports ``triton.experimental.gluon``: import it only where the kernel is about to run.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compiled_dsa.custom_ops.kernels.common import multiprocessors
from compiled_dsa.custom_ops.kernels.gluon_names import tma_load
from compiled_dsa.custom_ops.kernels.index_scores import HOPPER_D
from compiled_dsa.custom_ops.layout import PAGE

D = HOPPER_D
COLUMNS = 256  # of a consumer
STAGES = 6  # pages of the ring
MOST_SPLITS = 32
START = 6  # pages that could be scored while a program starts

_D = gl.constexpr(D)
_COLUMNS = gl.constexpr(COLUMNS)
_STAGES = gl.constexpr(STAGES)
_PAGE = gl.constexpr(PAGE)
_LINES = gl.constexpr(PAGE + 4 * PAGE // D)  # lines of D bytes in a page of the pool: its keys, then their scales
_SCALES = gl.constexpr((PAGE + 4 * PAGE // D) * D // 4)  # scales in the place of a page
_REGISTERS = gl.constexpr((240, 24))  # of a thread of the right consumer and the producer; the left one has the rest

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))
_VECTOR = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=1))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]))


# In _PRODUCT, a thread has products of keys k and k + 8 with the heads 8 i + 2 lane and 8 i + 2 lane + 1 of every row,
# for lane from 0 to 3. Here it has the sums of all four lanes, of every fourth row.
_PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [8, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[PAGE, 4, 2, 2],
    )
)
_OUT = gl.constexpr(gl.SliceLayout(2, gl.SliceLayout(2, _PARTS.value)))


class _Rows(NamedTuple):
    """What says which keys a row scores."""

    req_of_row: gl.tensor  # int32 [T]
    visible: gl.tensor  # int32 [T]
    page_table: gl.tensor  # int32 [B, W]
    table_row: gl.tensor
    number: gl.tensor  # T
    columns: gl.tensor  # 64 W
    pages: gl.tensor  # of the pool
    K: gl.tensor


class _Buffers(NamedTuple):
    queries: gl.shared_memory_descriptor  # e4m3 [2, 256, 128]
    keys: gl.shared_memory_descriptor  # e4m3 [STAGES, 64, 128]
    scales: gl.shared_memory_descriptor  # fp32 [STAGES, 64]
    queries_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def _pass(rows, first, r, ROWS: gl.constexpr):
    """(the request of row r of a tile, the keys that its rows in the tile see). 0 keys where an earlier row of the
    request has already served them: nearly always pass 0 serves all rows."""
    EACH: gl.constexpr = gl.BlockedLayout([ROWS], [32], [4], [0])
    lane = gl.arange(0, ROWS, layout=EACH)
    row = first + lane
    request = gl.load(rows.req_of_row + row, mask=row < rows.number, other=-1)
    seen = gl.minimum(gl.load(rows.visible + row, mask=row < rows.number, other=0), rows.columns)
    seen = gl.where(seen > rows.K, seen, 0)
    this = gl.sum(gl.where(lane == r, request, 0), axis=0)
    same = request == this
    served = gl.sum((same & (lane < r)).to(gl.int32), axis=0) > 0
    return this, gl.where(served, 0, gl.max(gl.where(same, seen, 0), axis=0))


@gluon.jit
def _produce(queries_desc, keys_desc, scales_desc, rows, buffers, HI: gl.constexpr):
    ROWS: gl.constexpr = 2 * _COLUMNS // HI
    first = gl.program_id(0) * ROWS
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    mbarrier.expect(buffers.queries_full, 2 * _COLUMNS * _D)
    tma_load(queries_desc, [first * HI, 0], buffers.queries_full, buffers.queries.index(0))
    tma_load(queries_desc, [first * HI + _COLUMNS, 0], buffers.queries_full, buffers.queries.index(1))
    stage = 0
    phase = 1
    for r in range(ROWS):
        request, last = _pass(rows, first, r, ROWS)
        table = rows.page_table + request.to(gl.int64) * rows.table_row
        end = (last + _PAGE - 1) // _PAGE
        ahead = gl.load(table + split, mask=split < end, other=-1)
        for i in range(split, end, splits):
            page = gl.where((ahead >= 0) & (ahead < rows.pages), ahead, -1)  # before the pool: keys of 0, scales of NaN
            ahead = gl.load(table + i + splits, mask=i + splits < end, other=-1)
            full = buffers.full.index(stage)
            mbarrier.wait(buffers.empty.index(stage), phase)
            mbarrier.expect(full, _PAGE * _D + 4 * _PAGE)
            tma_load(keys_desc, [page * _LINES, 0], full, buffers.keys.index(stage))
            tma_load(scales_desc, [page * _SCALES + _PAGE * _D // 4], full, buffers.scales.index(stage))
            stage += 1
            if stage == _STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _over_heads(x, HI: gl.constexpr):
    """Sums [64, ROWS] of x [64, ROWS HI], in the order of the kernel in Triton, so that scores are the same bits."""
    ROWS: gl.constexpr = _COLUMNS // HI
    x = gl.permute(gl.reshape(x, [_PAGE, ROWS, HI // 8, 4, 2]), (0, 1, 3, 2, 4))
    parts = gl.sum(gl.reshape(x, [_PAGE, ROWS, 4, HI // 4]), axis=3)
    parts = gl.convert_layout(gl.reshape(parts, [_PAGE, ROWS, 2, 2]), _PARTS)
    return gl.sum(gl.sum(parts, axis=2), axis=2)


@gluon.jit
def _consume(weights, weights_row, scores, scores_row, rows, buffers, HI: gl.constexpr, SIDE: gl.constexpr):
    ROWS: gl.constexpr = _COLUMNS // HI
    first = gl.program_id(0) * 2 * ROWS
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, _PRODUCT))
    row = first + SIDE * ROWS + column // HI
    where = weights + row.to(gl.int64) * weights_row + column % HI
    half = gl.expand_dims(gl.load(where, mask=row < rows.number, other=0.0) * 0.5, 0)

    row = first + SIDE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, _OUT))
    request = gl.expand_dims(gl.load(rows.req_of_row + row, mask=row < rows.number, other=-1), 0)
    lines = scores + gl.expand_dims(row.to(gl.int64) * scores_row, 0)
    lines += gl.expand_dims(gl.arange(0, _PAGE, layout=gl.SliceLayout(1, _OUT)), 1)
    queries = buffers.queries.index(SIDE).permute((1, 0))
    mbarrier.wait(buffers.queries_full, 0)
    stage = 0
    phase = 0
    for r in range(2 * ROWS):
        this, last = _pass(rows, first, r, 2 * ROWS)
        for i in range(split, (last + _PAGE - 1) // _PAGE, splits):
            mbarrier.wait(buffers.full.index(stage), phase)
            x = gl.zeros([_PAGE, _COLUMNS], gl.float32, layout=_PRODUCT)
            x = warpgroup_mma(buffers.keys.index(stage), queries, x, use_acc=False, is_async=True)
            scale = buffers.scales.index(stage).load(gl.SliceLayout(1, _OUT))
            x = warpgroup_mma_wait(0, deps=[x])
            mbarrier.arrive(buffers.empty.index(stage), count=1)
            score = _over_heads((x + gl.abs(x)) * half, HI) * gl.expand_dims(scale, 1)
            gl.store(lines + i * _PAGE, score, mask=request == this)
            stage += 1
            if stage == _STAGES:
                stage = 0
                phase ^= 1


@gluon.jit(do_not_specialize=["number", "columns", "pages", "K"])
def _scores(
    queries_desc,  # e4m3 [T HI, 128]
    keys_desc,  # e4m3 [P LINES, 128]
    scales_desc,  # fp32 [P SCALES]
    weights,  # fp32 [T, HI]
    page_table,
    req_of_row,
    visible,
    scores,  # fp32 [T, 64 W]
    weights_row,
    table_row,
    scores_row,
    number,
    columns,
    pages,
    K,
    HI: gl.constexpr,
):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = _Buffers(
        queries=gl.allocate_shared_memory(gl.float8e4nv, [2, _COLUMNS, _D], _TILE),
        keys=gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _PAGE, _D], _TILE),
        scales=gl.allocate_shared_memory(gl.float32, [_STAGES, _PAGE], _VECTOR),
        queries_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        full=gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
    )
    mbarrier.init(buffers.queries_full, count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(buffers.full.index(stage), count=1)
        mbarrier.init(buffers.empty.index(stage), count=2)
    fence_async_shared()
    rows = _Rows(req_of_row, visible, page_table, table_row, number, columns, pages, K)
    gl.warp_specialize(
        [
            (_consume, (weights, weights_row, scores, scores_row, rows, buffers, HI, 0)),
            (_consume, (weights, weights_row, scores, scores_row, rows, buffers, HI, 1)),
            (_produce, (queries_desc, keys_desc, scales_desc, rows, buffers, HI)),
        ],
        [4, 4],
        [_REGISTERS[0], _REGISTERS[1]],
    )


def splits_of_tiles(tiles: int, rows: int, requests: int, pages: int, programs: int) -> int:
    """Programs that share the keys of a tile of ``rows`` rows, so that the last of their waves is nearly full.

    A tile multiplies the keys of each of its requests by itself: one of as many requests as rows must not be what all
    wait for.
    """
    most = min(rows, requests)

    def time(splits: int) -> float:
        return -(-tiles * splits // programs) * (pages / splits + START) + (most - 1) * pages / splits

    return min(range(1, MOST_SPLITS + 1), key=time)


def descriptors(q: Tensor, pool: Tensor) -> tuple[TensorDescriptor, ...]:
    """What the copy engine reads: tiles of queries, the keys of a page, its scales, which are NaN outside the pool."""
    return (
        TensorDescriptor.from_tensor(q.view(-1, D), [COLUMNS, D], _TILE.value),
        TensorDescriptor.from_tensor(pool.view(q.dtype).view(-1, D), [PAGE, D], _TILE.value),
        TensorDescriptor.from_tensor(pool.view(torch.float32).view(-1), [PAGE], _VECTOR.value, padding="nan"),
    )


def launch(q, weights, pool, page_table, req_of_row, visible, scores, K: int) -> None:
    """As index_scores.write_scores, of arguments that ``on_hopper`` accepts."""
    T, HI, _ = q.shape
    B, W = page_table.shape
    tile_rows = 2 * COLUMNS // HI
    tiles = triton.cdiv(T, tile_rows)
    splits = splits_of_tiles(tiles, tile_rows, B, W, multiprocessors(q.device))
    _scores[(tiles, splits)](
        *descriptors(q, pool),
        weights,
        page_table,
        req_of_row,
        visible,
        scores,
        weights.stride(0),
        page_table.stride(0),
        scores.stride(0),
        T,
        W * PAGE,
        pool.shape[0],
        K,
        HI=HI,
        num_warps=4,
    )

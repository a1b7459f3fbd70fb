"""Causal attention of mla_prefill over expanded keys and values, for rows that attend the first tokens of a request.

A token is expanded once for all rows of its request: k = W_UK c and v = W_UV c of every head, in the dtype of queries,
as a layer without absorption has them. A row then multiplies N + R + V numbers a key where the absorbed form multiplies
2L + R: 320 instead of 1088 in DeepSeek-V3.2. Which rows these are is decided before (mla_prefill_short.py).

Expected for 2048 tokens from position 0 and 128 heads on an H200, by arithmetic, not measured: 69 GFLOP of expansion in
0.13 ms and 172 GFLOP of attention in 0.4 ms; absorbed, 69 and 584 GFLOP in 1.2 ms.

Tiles and their order depend on the position of a key alone, so a row's result does on nothing but the row and its keys.
As in any kernel of this kind one thing passes between rows: a NaN or infinity of a later token, one that some row of
the same request attends, reaches the other rows of its tile.

Legend: T rows, H heads, N nope dim, R rope dim, V value dim, L latent dim, S places of requests in scratch, C room for
the tokens of one, G heads that are expanded at a time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.kernels.common import dot_precision, paged_slots
from compiled_dsa.custom_ops.layout import LATENT_GROUP, PAGE, split_latent_pool

_PAGE = tl.constexpr(PAGE)
_LOG2E = tl.constexpr(1.4426950408889634)
_NOWHERE = tl.constexpr(2**31 - 1)

_SHARED_BYTES = 220 << 10  # of 227 KiB that a program may have on Hopper


class Tiling(NamedTuple):
    """Attributes:
    rows, keys, warps, stages: of the attention.
    tokens, columns, depth, expand_warps, expand_stages: of the expansion; ``tokens`` is a multiple of ``keys``.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    tokens: int
    columns: int
    depth: int
    expand_warps: int
    expand_stages: int


def tiling(N: int, R: int, V: int, dtype: torch.dtype) -> Tiling | None:
    """Tiles of the two kernels, or None where the dims are too large for any.

    The accumulator of the attention is to stay in registers, queries and two stages of keys in shared memory.
    """
    columns = min(256, _padded(N + V))
    if dtype == torch.float32:  # exact dots run on the ordinary units, unrolled: small tiles
        return Tiling(32, 32, 4, 1, 32, min(32, columns), 32, 4, 1) if _padded(V) <= 256 else None
    first, second = chunks(N)
    key = first + second + (_padded(R) if R else 0)
    for rows, keys in ((128, 128), (128, 64), (64, 64), (64, 32), (64, 16)):
        held = rows * key + 2 * keys * (key + _padded(V))
        if held * dtype.itemsize <= _SHARED_BYTES and rows * _padded(V) <= 128 * 256:
            return Tiling(rows, keys, 8 if rows == 128 else 4, 2, 128, columns, 64, 8, 3)
    return None


def chunks(N: int) -> tuple[int, int]:
    """N as the sizes of one or two dots: 192 is 128 and 64; the last is padded, 0 where there is none."""
    first = max(16, 1 << (N.bit_length() - 1)) if N else 16
    return first, _padded(N - first) if first < N else 0


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _columns(rows, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """[n, SIZE] columns of what [n, 1] pointers point at, zeros from column END."""
    column = (FIRST + tl.arange(0, SIZE))[None, :]
    return tl.load(rows + column) if FIRST + SIZE <= END else tl.load(rows + column, mask=column < END, other=0.0)


@triton.jit(do_not_specialize=["places", "room", "pages", "first_head"])
def _expand(
    latents,  # [slots, L] codes or model dtype
    latent_scales,  # [slots, groups], for an fp8 pool
    pool_rope,  # [slots, R]
    page_table,
    kv_b,  # [H, N + V, L]
    placed,  # [3, S]
    keys,  # [G, S, C, N + V]
    rope,  # [S, C, R]
    places,
    room,
    pages,
    first_head,
    latents_slot,
    scales_slot,
    rope_slot,
    table_row,
    w_head,
    w_row,
    WIDTH: tl.constexpr,  # N + V
    L: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of tokens and columns of one head. Tokens without a page become zeros."""
    column_blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    column_block = tl.program_id(0) % column_blocks
    token_block = tl.program_id(0) // column_blocks
    head = tl.program_id(1)
    blocks = room // TOKENS
    place = token_block // blocks
    start = token_block % blocks * TOKENS
    tokens = tl.load(placed + places + place)
    if start < tokens:
        request = tl.load(placed + place)
        position = start + tl.arange(0, TOKENS)
        slot = paged_slots(page_table + request.to(tl.int64) * table_row, position, position < tokens, pages)
        there = (slot >= 0)[:, None]
        slot = tl.where(slot >= 0, slot, 0)[:, None]
        dtype = keys.dtype.element_ty
        column = column_block * COLUMNS + tl.arange(0, COLUMNS)
        w = kv_b + (first_head + head).to(tl.int64) * w_head + column[None, :] * w_row
        acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for first in range(0, L, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            in_latent = depth < L
            loaded = there if L % DEPTH == 0 else there & in_latent[None, :]
            c = tl.load(latents + slot * latents_slot + depth[None, :], mask=loaded, other=0.0)
            if FP8:
                s = tl.load(latent_scales + slot * scales_slot + first // GROUP, mask=there, other=0.0)
                c = (c.to(tl.float32) * s).to(dtype)
            if WIDTH % COLUMNS == 0 and L % DEPTH == 0:
                weights = tl.load(w + depth[:, None])
            else:
                weights = tl.load(w + depth[:, None], mask=(column < WIDTH)[None, :] & in_latent[:, None], other=0.0)
            acc = tl.dot(c, weights, acc=acc, input_precision=PRECISION)
        token = place.to(tl.int64) * room + position
        where = keys + (head.to(tl.int64) * places * room + token[:, None]) * WIDTH + column[None, :]
        if WIDTH % COLUMNS == 0:
            tl.store(where, acc.to(dtype))
        else:
            tl.store(where, acc.to(dtype), mask=(column < WIDTH)[None, :])
        if R > 0 and first_head + head == 0 and column_block == 0:
            r = tl.arange(0, R_PADDED)[None, :]
            k = tl.load(pool_rope + slot * rope_slot + r, mask=there & (r < R), other=0.0)
            tl.store(rope + token[:, None] * R + r, k.to(dtype), mask=r < R)


@triton.jit
def _scores(
    q,
    q_more,
    q_rope,
    key,
    key_rope,
    N: tl.constexpr,
    N_FIRST: tl.constexpr,
    N_MORE: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """fp32 [rows, keys] of the keys that [n, 1] pointers point at, without scale."""
    scores = tl.dot(q, tl.trans(_columns(key, 0, N_FIRST, N)), input_precision=PRECISION)
    if N_MORE > 0:
        scores = tl.dot(q_more, tl.trans(_columns(key, N_FIRST, N_MORE, N)), acc=scores, input_precision=PRECISION)
    if R > 0:
        scores = tl.dot(q_rope, tl.trans(_columns(key_rope, 0, R_PADDED, R)), acc=scores, input_precision=PRECISION)
    return scores


@triton.jit
def _accumulate(acc, total, maximum, scores, unit, values, PRECISION: tl.constexpr):
    """One block of online softmax: (acc, total, maximum), the maximum in units of log2."""
    new = tl.maximum(maximum, tl.max(scores, axis=1) * unit)
    finite = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores * unit - finite[:, None])
    shrink = tl.exp2(maximum - finite)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc=acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new


@triton.jit(do_not_specialize=["rows", "width", "places", "room", "pages", "first_head"])
def _attend(
    q_nope,  # [T, H, N]
    q_rope,  # [T, H, R]
    keys,  # [G, S, C, N + V]
    rope,  # [S, C, R]
    count,  # [T]
    place,  # [T]
    placed,  # [3, S]
    page_table,
    sinks,  # [H], if SINKS
    out,  # [T, H, V]
    scale,
    rows,
    width,
    places,
    room,
    pages,
    first_head,
    qn_row,
    qn_head,
    qr_row,
    qr_head,
    table_row,
    out_row,
    out_head,
    N: tl.constexpr,
    N_FIRST: tl.constexpr,
    N_MORE: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    EVERYTHING: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows and one head, once for each dense request that has rows in the block.

    The blocks of a head are neighbours, since they read the same keys, and the latest comes first, since it reads most.
    """
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    head = (first_head + tl.program_id(1)).to(tl.int64)
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    of_row = tl.load(place + row, mask=inside, other=-1)
    column = tl.arange(0, V_PADDED)[None, :]
    to = out + row[:, None] * out_row + head * out_head + column
    if EVERYTHING:  # else the sparse path has written rows that attend nothing
        nothing = (inside & (of_row < 0))[:, None] & (column < V)
        tl.store(to, tl.zeros([ROWS, V_PADDED], out.dtype.element_ty), mask=nothing)

    left = tl.where(of_row >= 0, of_row, _NOWHERE)
    current = tl.min(left, axis=0)
    while current < _NOWHERE:
        mine = left == current
        n = tl.where(mine, tl.minimum(tl.load(count + row, mask=inside, other=0), width), 0)
        end = tl.max(n, axis=0)
        whole = tl.min(tl.where(mine, n, _NOWHERE), axis=0) // KEYS * KEYS  # these keys are seen by every row
        whole = tl.where(tl.load(placed + 2 * places + current) > 0, 0, whole)
        table = page_table + tl.load(placed + current).to(tl.int64) * table_row

        # rows that do not exist read the last one; what they give is not stored
        from_row = tl.minimum(row, rows - 1)[:, None]
        nope = q_nope + from_row * qn_row + head * qn_head
        q = _columns(nope, 0, N_FIRST, N)
        q_more = _columns(nope, N_FIRST, N_MORE, N) if N_MORE > 0 else q
        qr = _columns(q_rope + from_row * qr_row + head * qr_head, 0, R_PADDED, R) if R > 0 else q
        lane = tl.arange(0, KEYS)
        first = current.to(tl.int64) * room
        of_head = keys + (tl.program_id(1).to(tl.int64) * places * room + first) * (N + V)
        of_rope = rope + first * R
        unit = scale * _LOG2E
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_PADDED], tl.float32)
        for start in range(0, whole, KEYS):
            position = (start + lane)[:, None]
            key = of_head + position * (N + V)
            scores = _scores(q, q_more, qr, key, of_rope + position * R, N, N_FIRST, N_MORE, R, R_PADDED, PRECISION)
            values = _columns(key + N, 0, V_PADDED, V)
            acc, total, maximum = _accumulate(acc, total, maximum, scores, unit, values, PRECISION)
        for start in range(whole, end, KEYS):
            position = (start + lane)[:, None]
            key = of_head + position * (N + V)
            scores = _scores(q, q_more, qr, key, of_rope + position * R, N, N_FIRST, N_MORE, R, R_PADDED, PRECISION)
            values = _columns(key + N, 0, V_PADDED, V)
            page = tl.load(table + (start + lane) // _PAGE, mask=start + lane < end, other=-1)
            there = ((page >= 0) & (page < pages))[None, :] & ((start + lane)[None, :] < n[:, None])
            scores = tl.where(there, scores, float("-inf"))
            acc, total, maximum = _accumulate(acc, total, maximum, scores, unit, values, PRECISION)

        if SINKS:
            sink = tl.load(sinks + head) * _LOG2E
            new = tl.maximum(maximum, sink)
            finite = tl.where(new == float("-inf"), 0.0, new)
            shrink = tl.exp2(maximum - finite)
            total = total * shrink + tl.exp2(sink - finite)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mine[:, None] & (column < V))
        left = tl.where(mine, _NOWHERE, left)
        current = tl.min(left, axis=0)


def attend(
    q_nope, q_rope, pool, count, page_table, kv_b, scale, sinks, out, width: int, rows, plan, tile: Tiling
) -> None:
    """Writes the dense rows of ``out``; where the plan is ``everything``, also zeros for those that attend nothing.

    ``rows`` and ``plan`` are mla_prefill_short's, ``tile`` the one of the plan; others as of the op, see ``refuses``.
    """
    T, H, N = q_nope.shape
    R, L, V = q_rope.shape[2], kv_b.shape[2], out.shape[2]
    latents, latent_scales, pool_rope = split_latent_pool(pool, L, R)
    fp8 = latent_scales is not None
    keys = q_nope.new_empty(plan.heads, plan.places, plan.tokens, N + V)
    rope = q_nope.new_empty(plan.places, plan.tokens, R)
    first, more = chunks(N)
    for head in range(0, H, plan.heads):
        heads = min(plan.heads, H - head)
        _expand[(triton.cdiv(N + V, tile.columns) * plan.places * (plan.tokens // tile.tokens), heads)](
            latents,
            latent_scales if fp8 else latents,
            pool_rope,
            page_table,
            kv_b,
            rows.requests,
            keys,
            rope,
            plan.places,
            plan.tokens,
            pool.shape[0],
            head,
            latents.stride(1),
            latent_scales.stride(1) if fp8 else 0,
            pool_rope.stride(1),
            page_table.stride(0),
            kv_b.stride(0),
            kv_b.stride(1),
            WIDTH=N + V,
            L=L,
            R=R,
            R_PADDED=_padded(R),
            GROUP=LATENT_GROUP,
            TOKENS=tile.tokens,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            FP8=fp8,
            PRECISION=dot_precision(q_nope.dtype),
            num_warps=tile.expand_warps,
            num_stages=tile.expand_stages,
        )
        _attend[(triton.cdiv(T, tile.rows), heads)](
            q_nope,
            q_rope,
            keys,
            rope,
            count,
            rows.place,
            rows.requests,
            page_table,
            sinks if sinks is not None else count,
            out,
            scale,
            T,
            width,
            plan.places,
            plan.tokens,
            pool.shape[0],
            head,
            q_nope.stride(0),
            q_nope.stride(1),
            q_rope.stride(0),
            q_rope.stride(1),
            page_table.stride(0),
            out.stride(0),
            out.stride(1),
            N=N,
            N_FIRST=first,
            N_MORE=more,
            R=R,
            R_PADDED=_padded(R),
            V=V,
            V_PADDED=_padded(V),
            ROWS=tile.rows,
            KEYS=tile.keys,
            EVERYTHING=plan.everything,
            SINKS=sinks is not None,
            PRECISION=dot_precision(q_nope.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def refuses(q_nope: Tensor, kv_b: Tensor, out: Tensor, scale: float) -> str | None:
    """Why these arguments of the op, accepted otherwise, cannot be attended with expanded keys."""
    if not scale > 0:
        return f"scale={scale} is not above 0; maxima are taken before scores are scaled"
    for name, tensor in (("q_nope", q_nope), ("kv_b", kv_b), ("out", out)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} has strides {tensor.stride()}; its last dim must be dense"
    return None

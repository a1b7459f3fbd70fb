"""Causal attention of mla_prefill over expanded keys and values: every row attends the first tokens of its request.

A token is expanded once for all rows of its request: k = W_UK c and v = W_UV c of every head, in the dtype of queries,
as a layer without absorption has them. A row then multiplies N + R + V numbers a key where the absorbed form multiplies
2L + R: 320 instead of 1088 in DeepSeek-V3.2. When this is done, and what it gains: mla_prefill_plan.py.

Tiles and their order depend on the position of a key alone, so a row's result does on nothing but the row and its keys.
As in any kernel of this kind one thing passes between rows: a NaN or infinity of a later token, one that some row of
the same request attends, reaches the other rows of its tile.

Legend: T rows, B requests, H heads, N nope dim, R rope dim, V value dim, L latent dim, C room for the tokens of one
request in scratch, G heads that are expanded at a time.
"""

import triton
import triton.language as tl

from compiled_dsa.custom_ops.kernels.common import LOG2E, dot_precision, finite, paged_slots
from compiled_dsa.custom_ops.kernels.mla_prefill_plan import Plan, chunks, padded
from compiled_dsa.custom_ops.layout import LATENT_GROUP, PAGE, split_latent_pool

_PAGE = tl.constexpr(PAGE)
_NOWHERE = tl.constexpr(2**31 - 1)

_ROWS = 128  # of a program that looks at counts


@triton.jit(do_not_specialize=["rows", "width"])
def _measure(
    count,  # [T]
    req_of_row,  # [T]
    spans,  # [2, B], zeros; first row: tokens of each request that some row attends
    rows,
    width,
    BLOCK: tl.constexpr,
):
    """How much of each request has to be expanded; nothing of one whose rows are all padding."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.minimum(tl.load(count + row, mask=row < rows, other=0), width)
    request = tl.load(req_of_row + row, mask=n > 0, other=0)
    tl.atomic_max(spans + request, n, mask=n > 0, sem="relaxed")


@triton.jit
def _columns(rows, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """[n, SIZE] columns of what [n, 1] pointers point at, zeros from column END."""
    column = (FIRST + tl.arange(0, SIZE))[None, :]
    return tl.load(rows + column) if FIRST + SIZE <= END else tl.load(rows + column, mask=column < END, other=0.0)


@triton.jit(do_not_specialize=["requests", "room", "pages", "first_head"])
def _expand(
    latents,  # [slots, L] codes or model dtype
    latent_scales,  # [slots, groups], for an fp8 pool
    pool_rope,  # [slots, R]
    page_table,
    kv_b,  # [H, N + V, L]
    spans,  # [2, B]; second row: 1 where one of these tokens has no page, else 0
    keys,  # [G, B, C, N + V]
    rope,  # [B, C, R]
    requests,
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
    request = (token_block // blocks).to(tl.int64)
    start = token_block % blocks * TOKENS
    end = tl.load(spans + request)
    if start < end:
        position = start + tl.arange(0, TOKENS)
        slot = paged_slots(page_table + request * table_row, position, position < end, pages)
        once = (first_head + head == 0) & (column_block == 0)
        if once:
            tl.store(spans + requests + request + 0 * position, 1, mask=(position < end) & (slot < 0))
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
        token = request * room + position
        where = keys + (head.to(tl.int64) * requests * room + token[:, None]) * WIDTH + column[None, :]
        if WIDTH % COLUMNS == 0:
            tl.store(where, acc.to(dtype))
        else:
            tl.store(where, acc.to(dtype), mask=(column < WIDTH)[None, :])
        if R > 0 and once:
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
    subtracted = finite(new)
    p = tl.exp2(scores * unit - subtracted[:, None])
    shrink = tl.exp2(maximum - subtracted)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc=acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new


@triton.jit(do_not_specialize=["rows", "width", "requests", "room", "pages", "first_head"])
def _attend(
    q_nope,  # [T, H, N]
    q_rope,  # [T, H, R]
    keys,  # [G, B, C, N + V]
    rope,  # [B, C, R]
    count,  # [T]
    req_of_row,  # [T]
    spans,  # [2, B]
    page_table,
    sinks,  # [H], if SINKS
    out,  # [T, H, V]
    scale,
    rows,
    width,
    requests,
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
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows and one head, once for each request that has rows in the block.

    The blocks of a head are neighbours, since they read the same keys, and the latest comes first, since it reads most.
    """
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    head = (first_head + tl.program_id(1)).to(tl.int64)
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    n = tl.minimum(tl.load(count + row, mask=inside, other=0), width)
    column = tl.arange(0, V_PADDED)[None, :]
    to = out + row[:, None] * out_row + head * out_head + column
    nothing = (inside & (n <= 0))[:, None] & (column < V)
    tl.store(to, tl.zeros([ROWS, V_PADDED], out.dtype.element_ty), mask=nothing)

    left = tl.load(req_of_row + row, mask=n > 0, other=_NOWHERE)
    current = tl.min(left, axis=0)
    while current < _NOWHERE:
        mine = left == current
        seen = tl.where(mine, n, 0)
        end = tl.max(seen, axis=0)
        whole = tl.min(tl.where(mine, n, _NOWHERE), axis=0) // KEYS * KEYS  # these keys are seen by every row
        whole = tl.where(tl.load(spans + requests + current) > 0, 0, whole)
        table = page_table + current.to(tl.int64) * table_row

        # rows that do not exist read the last one; what they give is not stored
        from_row = tl.minimum(row, rows - 1)[:, None]
        nope = q_nope + from_row * qn_row + head * qn_head
        q = _columns(nope, 0, N_FIRST, N)
        q_more = _columns(nope, N_FIRST, N_MORE, N) if N_MORE > 0 else q
        qr = _columns(q_rope + from_row * qr_row + head * qr_head, 0, R_PADDED, R) if R > 0 else q
        lane = tl.arange(0, KEYS)
        first = current.to(tl.int64) * room
        of_head = keys + (tl.program_id(1).to(tl.int64) * requests * room + first) * (N + V)
        of_rope = rope + first * R
        unit = scale * LOG2E
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
            there = ((page >= 0) & (page < pages))[None, :] & ((start + lane)[None, :] < seen[:, None])
            scores = tl.where(there, scores, float("-inf"))
            acc, total, maximum = _accumulate(acc, total, maximum, scores, unit, values, PRECISION)

        if SINKS:
            sink = tl.load(sinks + head) * LOG2E
            new = tl.maximum(maximum, sink)
            shrink = tl.exp2(maximum - finite(new))
            total = total * shrink + tl.exp2(sink - finite(new))
            acc = acc * shrink[:, None]
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mine[:, None] & (column < V))
        left = tl.where(mine, _NOWHERE, left)
        current = tl.min(left, axis=0)


def attend(
    q_nope, q_rope, pool, count, page_table, req_of_row, kv_b, scale, sinks, out, width: int, plan: Plan
) -> None:
    """The op as ``plan`` says, without ``topk``; ``width``: tokens that a row attends at most."""
    T, H, N = q_nope.shape
    R, L, V = q_rope.shape[2], kv_b.shape[2], out.shape[2]
    latents, latent_scales, pool_rope = split_latent_pool(pool, L, R)
    fp8 = latent_scales is not None
    B, tile = page_table.shape[0], plan.tile
    spans = count.new_zeros(2, B)
    keys = q_nope.new_empty(plan.heads, B, plan.tokens, N + V)
    rope = q_nope.new_empty(B, plan.tokens, R)
    first, more = chunks(N)
    _measure[(triton.cdiv(T, _ROWS),)](count, req_of_row, spans, T, width, BLOCK=_ROWS)
    for head in range(0, H, plan.heads):
        heads = min(plan.heads, H - head)
        _expand[(triton.cdiv(N + V, tile.columns) * B * (plan.tokens // tile.tokens), heads)](
            latents,
            latent_scales if fp8 else latents,
            pool_rope,
            page_table,
            kv_b,
            spans,
            keys,
            rope,
            B,
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
            R_PADDED=padded(R),
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
            req_of_row,
            spans,
            page_table,
            sinks if sinks is not None else count,
            out,
            scale,
            T,
            width,
            B,
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
            R_PADDED=padded(R),
            V=V,
            V_PADDED=padded(V),
            ROWS=tile.rows,
            KEYS=tile.keys,
            SINKS=sinks is not None,
            PRECISION=dot_precision(q_nope.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

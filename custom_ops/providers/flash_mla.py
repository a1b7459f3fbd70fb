"""sparse_mla_decode with FlashMLA (sgl-flash-mla 1.0.0, its legacy kernels for Hopper).

fp8 pools go through its decode kernel, which reads our 656-byte rows as they are and splits the keys of a row, on a
schedule that a kernel in front of it computes at every call; bf16 pools through its sparse prefill kernel, one row a
request. Around both: ids are cleaned first, since the decode kernel takes any id but -1 for a token; heads are padded
to 64 or 128 where there are others; results are copied into the caller's buffers, the +inf of rows without keys turned
into -inf. The decode kernel rounds scales to bf16: exact for powers of two, within 2^-8 for others.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.kernels.adapters import clean_ids, write_attention
from compiled_dsa.custom_ops.kernels.common import refuses_strides
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.custom_ops.providers import common
from compiled_dsa.custom_ops.providers.common import FirstCalls, load, refuses_alignment

_library = load("flash_mla")
_first = FirstCalls("flash_mla")

L = 512
HEADS = (64, 128)
DECODE_LANES, PREFILL_LANES = 64, 128  # lanes of a selection are padded to multiples
MAX_DECODE_ROWS = 64  # at 64 heads: 128 rows were seen to fault (H200, replays of a CUDA graph)


def refuses_attention(
    q_rope: Tensor, pool: Tensor, latent_dim: int, topk: Tensor | None, scale: float, deterministic: bool
) -> str | None:
    """What both of its kernels refuse of an attention over L + R; shared with flash_mla_prefill."""
    H, R = q_rope.shape[1:]
    if not (hasattr(_library, "has_legacy") and _library.has_legacy()):
        return "this flash_mla has no kernels for Hopper behind use_legacy; sgl-flash-mla 1.0.0 has"
    if q_rope.dtype != torch.bfloat16:
        return f"queries have dtype {q_rope.dtype}; it takes bfloat16"
    if latent_dim != L or R not in ((64,) if pool.dtype == torch.uint8 else (0, 64)):
        return f"latents of {latent_dim}+{R}; it takes 512+64, and 512+0 of a bfloat16 pool"
    if not 0 < H <= HEADS[-1]:
        return f"{H} heads; it takes 1 to {HEADS[-1]}"
    if topk is None:
        return "topk is None; it attends selected tokens only"
    if not scale > 0:
        return f"scale={scale} is not above 0"
    if deterministic:
        return "deterministic=True; how it splits and schedules a row may depend on the other rows"
    return common.refuses_device(pool) or refuses_alignment(pool) or refuses_strides(topk=topk, q_rope=q_rope)


def refuses(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, deterministic=False
) -> str | None:
    T, H, latent_dim = q_latent.shape
    reason = refuses_attention(q_rope, pool, latent_dim, topk, scale, deterministic) or refuses_strides(
        q_latent=q_latent, count=count, sinks=sinks, out=out
    )
    if reason is None and pool.dtype == torch.uint8 and padded_heads(H) == HEADS[0] and T > MAX_DECODE_ROWS:
        return (
            f"{T} rows of {H} heads; its decode kernel faults at 128 rows of 64 heads, {MAX_DECODE_ROWS} are known good"
        )
    return reason


def padded_heads(H: int) -> int:
    return next(heads for heads in HEADS if heads >= H)


def padded_sinks(sinks: Tensor | None) -> Tensor | None:
    """[H] -> [64 or 128]; what the added heads give is not used."""
    return None if sinks is None else torch.nn.functional.pad(sinks, (0, padded_heads(sinks.shape[0]) - sinks.shape[0]))


def joined_queries(T: int, H: int, R: int, like: Tensor) -> Tensor:
    """A buffer [T, 64 or 128, L + R] for queries of H heads; added heads are 0."""
    make = like.new_empty if padded_heads(H) == H else like.new_zeros
    return make(T, padded_heads(H), L + R)


def sparse_prefill(q: Tensor, pool: Tensor, topk, count, scale: float, sinks: Tensor | None, want_lse: bool):
    """Its prefill kernel over a bf16 pool: (o [T, heads, L], lse [T, heads] or None) of joined queries."""
    key = ("prefill", q.device, q.shape[1:], sinks is None)
    _first.require(key)
    ids = clean_ids(topk, count, pool.shape[0], PREFILL_LANES)
    o, _, lse = _library.flash_mla_sparse_fwd(
        q,
        pool.view(-1, 1, pool.shape[2]),
        ids[:, None],
        scale,
        d_v=L,
        attn_sink=sinks,
        topk_length=count.clamp(0, topk.shape[1]),
        use_legacy=True,
        return_log2_lse=None if want_lse else False,
    )
    _first.done(key)
    return o, lse


def sparse_decode(q: Tensor, pool: Tensor, topk, count, scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Its decode kernel over an fp8 pool: (o [T, heads, L], lse [T, heads]) of joined queries."""
    T, heads = q.shape[:2]
    key = ("decode", q.device, heads, sinks is None)
    _first.require(key)
    ids = clean_ids(topk, count, pool.shape[0], DECODE_LANES)
    schedule, _ = _library.get_mla_metadata()  # an empty one: the call computes it, on the device
    o, lse = _library.flash_mla_with_kvcache(
        q[:, None],
        pool.view(-1, PAGE, 1, pool.shape[2]),
        None,
        None,
        L,
        schedule,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=ids[:, None],
        attn_sink=sinks,
        use_legacy=True,
    )
    _first.done(key)
    return o.view(T, heads, L), lse.reshape(T, heads)


def run(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale, sinks, out, lse, deterministic=False
) -> None:
    T, H, R = q_rope.shape
    if T == 0:
        return
    if pool.shape[0] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    q = joined_queries(T, H, R, q_latent)
    q[:, :H, :L] = q_latent
    q[:, :H, L:] = q_rope
    sinks = padded_sinks(sinks)
    if pool.dtype == torch.uint8:
        o, o_lse = sparse_decode(q, pool, topk, count, scale, sinks)
    else:
        o, o_lse = sparse_prefill(q, pool, topk, count, scale, sinks, want_lse=True)
    write_attention(o, o_lse, out, lse)


warmup = run

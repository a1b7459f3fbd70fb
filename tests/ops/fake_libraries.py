"""Stand-ins for DeepGEMM, flashinfer and FlashMLA on a CPU: what they compute, by the contracts of the versions that
the providers call, with their checks of arguments and their ways with what they do not check."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.custom_ops.sparse_mla import gather_latents

SMS = 132


def _scores(q, keys, scales, weights):
    """[HI, D], [n, D], [n], [HI] -> [n]; a product of NaN counts as 0."""
    products = (q.float() @ keys.float().T).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).relu()
    return (weights @ products) * scales


def deep_gemm() -> SimpleNamespace:
    def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
        assert context_lens.dim() == 2 and context_lens.is_contiguous() and context_lens.dtype == torch.int32
        assert block_kv == PAGE and (context_lens > 0).all()
        return torch.full((num_sms + 1, 2), context_lens.sum(), dtype=torch.int32)

    def fp8_paged_mqa_logits(q, cache, weights, lengths, tables, schedule, max_len, clean_logits=False):
        B, n, HI, D = q.shape
        assert n == 1 and HI in (32, 64) and D in (64, 128) and q.dtype == FP8 and q.is_contiguous()
        assert cache.dtype == torch.uint8 and cache.shape[1:] == (PAGE, 1, D + 4) and weights.is_contiguous()
        assert tables.shape[0] == B and tables.stride(1) == 1 and schedule.shape == (SMS + 1, 2)
        assert (schedule == lengths.sum()).all(), "a schedule of other lengths"
        assert ((tables >= 0) & (tables < cache.shape[0])).all(), "a page outside the pool is read"
        flat = cache.flatten(1)
        logits = torch.full((B, -(-max_len // 256) * 256), 1e30)
        for row in range(B):
            pages = flat[tables[row].long()]
            keys = pages[:, : PAGE * D].reshape(-1, D).view(FP8)
            scales = pages[:, PAGE * D :].contiguous().view(torch.float32).flatten()
            length = int(lengths[row, 0])
            logits[row, :length] = _scores(q[row, 0], keys, scales, weights[row])[:length]
        return logits[:, :max_len]

    def fp8_mqa_logits(q, kv, weights, start, end, clean_logits=False, max_seqlen_k=0):
        (keys, scales), T = kv, q.shape[0]
        assert keys.is_contiguous() and scales.is_contiguous() and scales.shape == keys.shape[:1]
        assert q.is_contiguous() and weights.stride(1) == 1 and start.dtype == end.dtype == torch.int32
        assert (start <= end).all() and (end <= keys.shape[0]).all() and (end - start <= max_seqlen_k).all()
        logits = torch.full((T, -(-max_seqlen_k // 256) * 256), 1e30)
        for row, (a, b) in enumerate(zip(start.tolist(), end.tolist())):
            logits[row, : b - a] = _scores(q[row], keys[a:b], scales[a:b], weights[row])
        return logits[:, :max_seqlen_k]

    return SimpleNamespace(
        __version__="0.1.5",
        get_num_sms=lambda: SMS,
        get_paged_mqa_logits_metadata=get_paged_mqa_logits_metadata,
        fp8_paged_mqa_logits=fp8_paged_mqa_logits,
        fp8_mqa_logits=fp8_mqa_logits,
    )


def flashinfer() -> SimpleNamespace:
    def top_k_ragged_transform(input, offsets, lengths, k, deterministic=False, tie_break=0, dsa_graph_safe=False):
        assert offsets.shape == lengths.shape == input.shape[:1] and (lengths >= 0).all() and k <= 2048
        assert tie_break == 1 or not deterministic
        out = torch.full((input.shape[0], k), -1, dtype=torch.int32)
        for row, n in enumerate(lengths.tolist()):
            scores = input[row, :n].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            best = torch.arange(n) if n <= k else scores.sort(descending=True, stable=True).indices[:k]
            out[row, : best.numel()] = best.flip(0).int() + offsets[row]
        return out

    return SimpleNamespace(__version__="0.7.4", top_k_ragged_transform=top_k_ragged_transform)


def _attend(q, latents, rope, there, scale, sink) -> tuple[Tensor, Tensor]:
    """One row: ([heads, L] bf16, [heads]); +inf where nothing is attended."""
    L = latents.shape[1]
    scores = (q[:, :L].float() @ latents.T + q[:, L:].float() @ rope.T) * scale
    scores = scores.masked_fill(~there, -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink)
    weights = (scores - total[:, None]).exp().masked_fill(~there, 0.0)
    out = (weights @ latents).bfloat16()
    return out, torch.where(lse == -torch.inf, torch.inf, lse)


def flash_mla() -> SimpleNamespace:
    def check(q, indices, multiple):
        assert q.dtype == torch.bfloat16 and q.shape[-2] in (64, 128) and q.stride(-1) == 1
        assert indices.dtype == torch.int32 and indices.shape[-1] % multiple == 0 and indices.shape[-1] > 0

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, *, softmax_scale, is_fp8_kvcache, indices,
        attn_sink, use_legacy,
    ):  # fmt: skip
        check(q, indices, 64)
        B, n, heads, dim = q.shape
        assert (n, dim, head_dim_v) == (1, 576, 512) and B > 0 and is_fp8_kvcache and use_legacy
        assert k_cache.dtype == torch.uint8 and k_cache.shape[1:] == (PAGE, 1, 656) and schedule.fresh
        schedule.fresh = False
        assert ((indices >= -1) & (indices < k_cache.shape[0] * PAGE)).all(), "an id that is no token and not -1"
        out, lse = torch.empty(B, 1, heads, 512, dtype=torch.bfloat16), torch.empty(B, 1, heads)
        for row in range(B):
            there = indices[row, 0] >= 0
            latents, rope = gather_latents(k_cache[:, :, 0], indices[row, 0].clamp(min=0), 512, 64, torch.float32)
            latents = latents.masked_fill(~there[:, None], 0.0)
            out[row, 0], lse[row, 0] = _attend(q[row, 0], latents, rope, there, softmax_scale, attn_sink)
        return out, lse.transpose(1, 2)

    def flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, *, d_v, attn_sink, topk_length, use_legacy, return_log2_lse
    ):  # fmt: skip
        check(q, indices, 128)
        T, heads, dim = q.shape
        assert dim in (512, 576) and d_v == 512 and use_legacy and kv.dtype == torch.bfloat16 and kv.shape[1] == 1
        assert ((topk_length >= 0) & (topk_length <= indices.shape[-1])).all()
        out, lse = torch.empty(T, heads, 512, dtype=torch.bfloat16), torch.empty(T, heads)
        for row in range(T):
            ids = indices[row, 0, : int(topk_length[row])].long()
            there = (ids >= 0) & (ids < kv.shape[0])
            keys = kv[ids.clamp(0, kv.shape[0] - 1), 0].float().masked_fill(~there[:, None], 0.0)
            out[row], lse[row] = _attend(q[row], keys[:, :512], keys[:, 512:], there, sm_scale, attn_sink)
        return (out, None, None) if return_log2_lse is False else (out, lse * math.nan, lse)

    return SimpleNamespace(
        __version__="1.0.0",
        has_legacy=lambda: True,
        get_mla_metadata=lambda: (SimpleNamespace(fresh=True), None),
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        flash_mla_sparse_fwd=flash_mla_sparse_fwd,
    )

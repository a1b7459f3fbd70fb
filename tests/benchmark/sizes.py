"""Sizes for a CPU, and the calls of libraries in plain torch."""

from dataclasses import replace

import torch

from compiled_dsa import DSAConfig
from compiled_dsa.benchmark.cases import LAYER, BenchCase, layer_config
from compiled_dsa.custom_ops.index_topk import scores_of_rows
from compiled_dsa.custom_ops.layout import split_index_pool
from compiled_dsa.testing import dequantised_latents


def small_config(model: str, **sizes) -> DSAConfig:
    small = {
        "hidden_size": 64,
        "num_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "scale": 32**-0.5,
    }
    return replace(layer_config(model), **{**small, **sizes})


def decode(model: str, batch: int, context: int, modes=("off",), peers=()) -> BenchCase:
    return BenchCase(model, LAYER, "decode", batch, context, batch, modes, peers)


def prefill(model: str, rows: int, context: int, modes=("off",), peers=()) -> BenchCase:
    return BenchCase(model, LAYER, "prefill", 1, context, rows, modes, peers)


def _attend(q, latents, ids, scale, L):
    """[T, H, L] of queries [T, H, L + R] over latents [n, L + R] at ids [T, K], -1: none."""
    keys = latents[ids.clamp(min=0).long()].float()
    scores = (q.float() @ keys.transpose(1, 2) * scale).masked_fill((ids < 0)[:, None], -torch.inf)
    return (scores.softmax(-1) @ keys[..., :L]).to(q.dtype)


def torch_libraries(composition):
    """The ``Libraries`` of examples/peer_composition.py without a library.

    Args:
        composition: that module.
    """

    def decode_scores(q, weights, pool, page_table, lengths, plan):
        keys, scales = (t[page_table.long()].flatten(1, 2) for t in split_index_pool(pool))  # [B, 64 W, .]
        return torch.cat([scores_of_rows(q[b : b + 1], weights[b : b + 1], keys[b], scales[b]) for b in range(len(q))])

    def decode_attention(q, pool, slots, scale, L, plan):
        latents = dequantised_latents(pool, L, q.shape[2] - L).flatten(0, 1)
        return _attend(q, latents.to(q.dtype), slots, scale, L)

    return composition.Libraries(
        names={"scores": "torch", "topk": "torch.topk", "attention": "torch"},
        plan=lambda lengths: None,
        decode_scores=decode_scores,
        prefill_scores=lambda q, weights, keys, scales, visible: scores_of_rows(q, weights, keys, scales),
        select=composition.torch_select,
        decode_attention=decode_attention,
        prefill_attention=lambda q, latents, positions, count, scale, L: _attend(q, latents, positions, scale, L),
    )

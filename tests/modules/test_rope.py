"""Rope in every layout against transformers' functions, and which dims the indexer and the attention rotate."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from compiled_dsa import DSAConfig, Indexer, SparseAttention
from compiled_dsa.batch import Batch
from compiled_dsa.custom_ops.rope import rotate, rotate_part
from tests.huggingface.tiny_models import ALL_MODEL_TYPES, tiny_config, tiny_model


def angles(positions: torch.Tensor, R: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [T, R/2]"""
    inverse = 1e4 ** -(torch.arange(0, R, 2, dtype=torch.float64) / R)
    angle = positions.double()[:, None] * inverse
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.fixture
def vectors():
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 3, 16, dtype=torch.float64)  # [T, H, R] each
    return q, k, *angles(torch.arange(3, 8), 16)


def stock(function, q, k, cos, sin):
    """transformers' rope of [T, H, R]; its cos and sin repeat the angles."""
    cos, sin = (torch.cat([x, x], -1) for x in (cos, sin))
    return function(q, k, cos, sin, unsqueeze_dim=1)


def test_half_split(vectors):
    q, k, cos, sin = vectors
    for x, want in zip((q, k), stock(apply_rotary_pos_emb, q, k, cos, sin)):
        torch.testing.assert_close(rotate(x, cos[:, None], sin[:, None], interleaved=False), want)


def test_interleaved(vectors):
    q, k, cos, sin = vectors
    for x, want in zip((q, k), stock(apply_rotary_pos_emb_interleave, q, k, cos, sin)):
        got = rotate(x, cos[:, None], sin[:, None], interleaved=True, deinterleave=True)
        assert torch.equal(got, want)
        in_place = rotate(x, cos[:, None], sin[:, None], interleaved=True)
        assert torch.equal(torch.cat([in_place[..., 0::2], in_place[..., 1::2]], -1), want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distances_only(vectors, interleaved):
    q, k, _, _ = vectors
    scores = []
    for first in (0, 1000):
        turned = (
            rotate(x[:1], *(a[:, None] for a in angles(torch.tensor([first + at]), 16)), interleaved=interleaved)
            for x, at in ((q, 7), (k, 3))
        )
        scores.append(torch.linalg.vecdot(*turned))
    torch.testing.assert_close(*scores)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("deinterleave", [False, True])
@pytest.mark.parametrize("D", [8, 11])
def test_part(interleaved, last, deinterleave, D):
    x = torch.randn(4, D, dtype=torch.float64)
    cos, sin = angles(torch.arange(4), 8)
    how = {"interleaved": interleaved, "deinterleave": deinterleave}
    got = rotate_part(x, cos, sin, last=last, **how)
    part = slice(D - 8, D) if last else slice(0, 8)
    assert torch.equal(got[:, part], rotate(x[:, part], cos, sin, **how))
    rest = torch.ones(D, dtype=torch.bool)
    rest[part] = False
    assert torch.equal(got[:, rest], x[:, rest])


def v32_config(**changes) -> DSAConfig:
    """The head sizes of DeepSeek-V3.2: 128 + 64 for MLA, 128 for the indexer with its rope in the first 64."""
    hf = tiny_config("deepseek_v32", qk_nope_head_dim=128, qk_rope_head_dim=64, index_head_dim=128, index_topk=64)
    return dataclasses.replace(DSAConfig.from_hf(hf), **changes)


def touched(x: torch.Tensor) -> list[list[int]]:
    """Where each row of x is not zero."""
    return [row.nonzero().flatten().tolist() for row in x.abs() > 1e-6]


class NoNorm(nn.Identity):
    weight = torch.ones((), dtype=torch.float64)


def test_pairs_of_the_indexer_at_position_5():
    config = v32_config(hidden_size=128)
    indexer = Indexer(config, dtype=torch.float64)
    indexer.wk.weight.data = torch.eye(128, dtype=torch.float64)
    indexer.k_norm = NoNorm()
    cos, sin = (a.expand(128, -1) for a in angles(torch.tensor([5]), 64))
    keys = indexer.make_keys(torch.eye(128, dtype=torch.float64), cos, sin, fp8=False)  # row i: what dim i turns into
    want = [sorted((i, (i + 32) % 64)) for i in range(64)] + [[i] for i in range(64, 128)]
    assert touched(keys) == want


def test_pairs_of_the_attention_at_position_5():
    config = v32_config(hidden_size=192, q_lora_rank=192, kv_lora_rank=128, num_heads=1)
    attention = SparseAttention(config, dtype=torch.float64)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"):
        getattr(attention, name).weight.data = torch.eye(192, dtype=torch.float64)
    cos, sin = (a.expand(192, -1) for a in angles(torch.tensor([5]), 64))
    p = attention.project(torch.eye(192, dtype=torch.float64), cos, sin)
    assert touched(p.q_nope.flatten(1)) == [[i] for i in range(128)] + [[]] * 64
    assert touched(p.latents) == [[i] for i in range(128)] + [[]] * 64
    pairs = [[]] * 128 + [[i // 2 * 2, i // 2 * 2 + 1] for i in range(64)]
    assert touched(p.q_rope.flatten(1)) == pairs
    assert touched(p.k_rope) == pairs


class KeysOnly(Exception):
    pass


class StockIndexCache:
    """What transformers' indexer needs of a cache; ends the call once it has keys, while ``keys_only``."""

    keys_only = True

    def __init__(self):
        self.keys: list[torch.Tensor] = []

    def update_indexer(self, keys, layer_idx):
        self.keys.append(keys)
        if self.keys_only:
            raise KeysOnly
        return torch.cat(self.keys, 1)


@pytest.mark.parametrize("model_type", [name for name in ALL_MODEL_TYPES if name != "mistral_large4_text"])
def test_selection_among_4096_keys_is_the_stock_indexer_s(model_type):
    """With few keys, or none left out, a wrong layout of the indexer's rope would not show. (mistral_large4's is GLM's,
    and it is called otherwise.)"""
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 64}
    model = tiny_model(model_type, head_dim=64, **sizes)
    stock_indexer = model.model.layers[0].self_attn.indexer
    indexer = Indexer(DSAConfig.from_hf(model.config))
    indexer.load_state_dict(stock_indexer.state_dict(), strict=True)
    n, T = 4096, 12
    torch.manual_seed(2)
    x, q_lora = torch.randn(1, n, 64), torch.randn(1, n, 48)
    cos, sin = angles(torch.arange(n), 64, torch.float32)
    cache = StockIndexCache()
    full = [torch.cat([a, a], -1).unsqueeze(0) for a in (cos, sin)]
    with torch.no_grad():
        with pytest.raises(KeysOnly):
            stock_indexer(x[:, :-T], q_lora[:, :-T], [a[:, :-T] for a in full], None, None, cache)
        cache.keys_only = False
        mask = (torch.arange(n) <= torch.arange(n - T, n)[:, None]).unsqueeze(0)
        want = stock_indexer(x[:, -T:], q_lora[:, -T:], [a[:, -T:] for a in full], mask, None, cache)[0]
        pool = indexer.make_keys(x[0], cos, sin, fp8=False).view(n // 64, 64, 128)
        page_table = torch.arange(n // 64, dtype=torch.int32).unsqueeze(0)
        batch = Batch.from_lengths(torch.tensor([T]), torch.tensor([n]), page_table, T)
        got = indexer.select(x[0, -T:], q_lora[0, -T:], cos[-T:], sin[-T:], batch, pool)
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)
    assert (want < n - 64).any()  # it is not the latest keys that win

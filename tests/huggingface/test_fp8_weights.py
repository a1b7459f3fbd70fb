"""Checkpoints in fp8 with block scales: transformers' FP8Linear in place of every projection.

Its GEMM needs a GPU. Here it is replaced by a product with the dequantised weights, which leaves out the quantisation
of activations: stock and converted models then differ by fp32 roundings only.
"""

import copy

import pytest
import torch
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.weights import FP8, dequantize_weight
from tests.huggingface.tiny_models import CACHES, Pair, prompt, tiny_model

OPTIONS = {"do_sample": False, "max_new_tokens": 6}
BLOCKS = {"one": (128, 128), "many": (16, 24)}


def quantize(linear: nn.Linear, block_size: tuple[int, int]) -> FP8Linear:
    out_features, in_features = linear.weight.shape
    quantized = FP8Linear(in_features, out_features, block_size=block_size)
    rows, columns = block_size
    with torch.no_grad():
        for i, j in torch.cartesian_prod(*map(torch.arange, quantized.weight_scale_inv.shape)).tolist():
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale = linear.weight[part].abs().max() / 448
            quantized.weight_scale_inv[i, j] = scale
            quantized.weight[part] = (linear.weight[part] / scale).to(FP8)
    return quantized.requires_grad_(False)


def quantize_attention(model: nn.Module, block_size: tuple[int, int] = (16, 24), kept=("weights_proj",)) -> nn.Module:
    """Every projection except for those that transformers keeps in their dtype when it loads such a checkpoint."""
    for layer in model.get_decoder().layers:
        for parent in (layer.self_attn, layer.self_attn.indexer):
            for name, linear in [] if parent is None else list(parent.named_children()):
                if type(linear) is nn.Linear and name not in kept:
                    setattr(parent, name, quantize(linear, block_size))
    return model


def reference_linear(x, weight, scale, block_size, bias, activation_scale, allow_deepgemm):
    return nn.functional.linear(x, dequantize_weight(weight, scale, block_size, x.dtype), bias)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", reference_linear)


def fp8_pair(model_type: str, blocks: str = "many", **changes) -> Pair:
    stock = quantize_attention(tiny_model(model_type, **changes), BLOCKS[blocks])
    return Pair(stock, replace_attention(copy.deepcopy(stock)))


def up_projections(pair: Pair) -> list[FP8Linear]:
    return [layer.self_attn.kv_b_proj for layer in pair.ours.get_decoder().layers]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"])
def test_tokens_are_the_stock_ones(model_type, cache):
    pair = fp8_pair(model_type, "one" if cache == "none" else "many")
    want = pair.stock.generate(prompt(2, 24), **OPTIONS)
    assert torch.equal(pair.ours.generate(prompt(2, 24), **OPTIONS, **pair.cache(cache, 2, 32)), want)
    assert pair.ours.dsa_stats.calls and not pair.ours.dsa_stats.stock_calls


def dequantized(model: nn.Module) -> nn.Module:
    """A copy with plain linear layers of the same values."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, fp8 in list(parent.named_children()):
            if isinstance(fp8, FP8Linear):
                plain = nn.Linear(fp8.in_features, fp8.out_features, bias=False)
                plain.weight = nn.Parameter(
                    dequantize_weight(fp8.weight, fp8.weight_scale_inv, fp8.block_size, torch.float32)
                )
                setattr(parent, name, plain)
    return model


@pytest.mark.parametrize("cache", ["fp8", "model"])
@pytest.mark.parametrize("kept", [(), ("weights_proj",)], ids=["all-fp8", "weights_proj-kept"])
def test_head_weights_of_the_indexer(kept, cache, monkeypatch):
    """``weights_proj`` never multiplies in fp8, whatever it is and the cache holds: its rounding decides the selection.

    Stock models would cast the activations to fp8, so the comparison is with the dequantised model.
    """
    fp8 = quantize_attention(tiny_model("deepseek_v32"), kept=kept)
    wide = dequantized(fp8)
    called = []

    def linear(x, weight, *args):
        called.append(id(weight))
        return reference_linear(x, weight, *args)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)
    dtypes = {"latent_dtype": FP8, "index_dtype": FP8} if cache == "fp8" else {}
    logits = []
    for model in map(replace_attention, (fp8, wide)):
        with torch.no_grad():
            logits.append(model(prompt(2, 24), past_key_values=PagedCache(model.config, 2, 32, **dtypes)).logits)
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)
    head_weights = {id(layer.self_attn.indexer.weights_proj.weight) for layer in fp8.model.layers}
    assert called and not head_weights & set(called)


def random_fp8(like: FP8Linear) -> FP8Linear:
    torch.manual_seed(3)
    return quantize(nn.Linear(like.in_features, like.out_features, bias=False), like.block_size)


def test_the_dequantized_weight_is_kept():
    pair = fp8_pair("deepseek_v32")
    first = up_projections(pair)[0]
    keys = pair.ours.state_dict().keys()
    pair.ours.generate(prompt(2, 24), past_key_values=PagedCache(pair.config, 2, 32), **OPTIONS)
    held, address = first.held_weight, first.held_weight.data_ptr()
    assert pair.ours.state_dict().keys() == keys
    changes = {
        "in place": lambda m: m.weight_scale_inv.mul_(1.5),
        "loaded": lambda m: m.load_state_dict(random_fp8(m).state_dict()),
        "assigned": lambda m: setattr(m, "weight", nn.Parameter(m.weight.float().neg().to(FP8), requires_grad=False)),
    }
    for change in changes.values():
        for model in (pair.ours, pair.stock):
            with torch.no_grad():
                change(model.model.layers[0].self_attn.kv_b_proj)
        got = pair.ours.generate(prompt(2, 24), past_key_values=PagedCache(pair.config, 2, 32), **OPTIONS)
        assert torch.equal(got, pair.stock.generate(prompt(2, 24), **OPTIONS))
        assert first.held_weight is held and held.data_ptr() == address
        want = dequantize_weight(first.weight, first.weight_scale_inv, (16, 24), torch.float32)
        assert torch.equal(held, want)


def test_a_copy_keeps_its_own():
    pair = fp8_pair("deepseek_v32")
    with torch.no_grad():
        pair.ours(prompt(1, 20))
        other = copy.deepcopy(pair.ours)
        other.model.layers[0].self_attn.kv_b_proj.weight_scale_inv.mul_(2)
        changed = other(prompt(1, 20)).logits
        again = pair.ours(prompt(1, 20)).logits
        torch.testing.assert_close(again, pair.stock(prompt(1, 20)).logits, rtol=1e-4, atol=1e-4)
    assert (changed - again).abs().max() > 1e-2


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled():
    """New weights reach compiled code without a compile: they are written where it reads."""
    pair = fp8_pair("deepseek_v32", num_hidden_layers=1, first_k_dense_replace=1)
    compile_model(pair.ours, backend="aot_eager")
    cache = PagedCache(pair.config, 2, 32)
    for _ in range(2):
        got = pair.ours.generate(prompt(2, 24), past_key_values=cache, **OPTIONS)
        assert torch.equal(got, pair.stock.generate(prompt(2, 24), **OPTIONS))
        assert pair.ours.graph_stats()["compiles"] == 2
        cache.reset()
        with torch.no_grad():
            for model in (pair.ours, pair.stock):
                model.model.layers[0].self_attn.kv_b_proj.weight_scale_inv.mul_(-1.5)
    assert pair.ours.dsa_stats.traced == 2 and not pair.ours.dsa_stats.traced_stock


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_without_the_hook():
    """A forward that is called by itself finds nothing kept, and dequantises on its way."""
    pair = fp8_pair("deepseek_v32", num_hidden_layers=1, first_k_dense_replace=1)
    compiled = torch.compile(pair.ours.model.layers[0].self_attn, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 20, pair.config.hidden_size)
    angles = pair.stock.model.rotary_emb(x, torch.arange(20).unsqueeze(0))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        for _ in range(2):
            want = pair.stock.model.layers[0].self_attn(x, angles, mask)[0]
            torch.testing.assert_close(compiled(x, angles)[0], want, rtol=1e-4, atol=1e-4)
            for model in (pair.ours, pair.stock):
                model.model.layers[0].self_attn.kv_b_proj.weight_scale_inv.mul_(-1.5)
    assert "held_weight" not in up_projections(pair)[0]._buffers


def test_what_is_not_known_runs_the_stock_forward():
    """Packed fp4 codes, as an example."""
    pair = fp8_pair("deepseek_v32", num_hidden_layers=1)
    up = up_projections(pair)[0]
    up.weight = nn.Parameter(up.weight.view(torch.int8), requires_grad=False)
    with torch.no_grad(), pytest.raises(ValueError, match="kv_b_proj: .* PagedCache"):
        pair.ours(prompt(1, 20), past_key_values=PagedCache(pair.config, 1, 32))
    assert pair.ours.model.layers[0].self_attn.weights_reason() == "kv_b_proj"

"""LoRA adapters on any projection: called where projections are called, added to the weight where it is read."""

import copy

import pytest
import torch
from torch import nn

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.weights import FP8, effective_weight
from tests.huggingface.tiny_models import CACHES, Pair, assert_same_tokens, prompt, tiny_model

OPTIONS = {"do_sample": False, "max_new_tokens": 6}
ATTENTION = ["q_a_proj", "q_b_proj", "q_gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
INDEXER = ["wq_b", "wk", "weights_proj"]


def add_adapter(model: nn.Module, name: str, targets: list[str], seed: int = 0, **options) -> None:
    """A LoRA adapter whose matrices change the tokens."""
    import peft

    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, **options), name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            nn.init.normal_(parameter.data, std=0.1, generator=generator)
        parameter.requires_grad_(False)


def adapted_pair(model_type: str, targets: list[str], **changes) -> Pair:
    stock = tiny_model(model_type, **changes)
    add_adapter(stock, "first", targets)
    return Pair(stock, replace_attention(copy.deepcopy(stock)))


def small(model_type: str = "deepseek_v32", targets: list[str] = ATTENTION + INDEXER) -> Pair:
    return adapted_pair(model_type, targets, num_hidden_layers=1, first_k_dense_replace=1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_tokens_are_the_stock_ones(model_type, cache):
    pair = adapted_pair(model_type, ATTENTION + INDEXER)
    want = pair.stock.generate(prompt(2, 24), **OPTIONS)
    assert torch.equal(pair.ours.generate(prompt(2, 24), **OPTIONS, **pair.cache(cache, 2, 32)), want)
    assert not pair.ours.dsa_stats.stock_calls


@pytest.mark.parametrize("targets", [["kv_b_proj"], ["weights_proj"]])
@pytest.mark.parametrize("dtypes", [{}, {"latent_dtype": FP8, "index_dtype": FP8}], ids=["model", "fp8"])
def test_as_the_merged_model(targets, dtypes):
    pair = adapted_pair("deepseek_v32", targets)
    merged, plain = copy.deepcopy(pair.ours), copy.deepcopy(pair.ours)
    for module in merged.modules():
        if hasattr(module, "get_delta_weight"):
            module.merge()
    plain.disable_adapters()
    with torch.no_grad():
        adapted, want, without = (
            m(prompt(2, 24), past_key_values=PagedCache(m.config, 2, 32, **dtypes)).logits
            for m in (pair.ours, merged, plain)
        )
    torch.testing.assert_close(adapted, want, rtol=1e-3, atol=1e-3)
    assert (adapted - without).abs().max() > 1e-2


def test_adapters_may_change():
    """Added, switched, together, disabled, changed in place, merged: the kept weight follows, at its address."""
    pair = adapted_pair("deepseek_v32", ["kv_b_proj", "q_b_proj"])
    up = pair.ours.model.layers[0].self_attn.kv_b_proj
    seen = [assert_same_tokens(pair)]
    held, address = up.held_weight, up.held_weight.data_ptr()

    def change(what):
        for model in (pair.ours, pair.stock):
            with torch.no_grad():
                what(model)
        seen.append(assert_same_tokens(pair))
        assert up.held_weight is held and held.data_ptr() == address
        assert torch.equal(held, effective_weight(up, torch.float32))

    change(lambda m: add_adapter(m, "second", ["kv_b_proj"], seed=5))
    change(lambda m: m.set_adapter(["first", "second"]))
    change(lambda m: m.model.layers[0].self_attn.kv_b_proj.lora_B["second"].weight.neg_())
    change(lambda m: m.disable_adapters())
    change(lambda m: m.enable_adapters())
    for model in (pair.ours, pair.stock):
        for module in model.modules():
            if hasattr(module, "get_delta_weight"):
                module.merge()
    assert torch.equal(assert_same_tokens(pair), seen[-1])
    assert not pair.ours.dsa_stats.stock_calls and not torch.equal(seen[0], seen[1])


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled():
    pair = small()
    compile_model(pair.ours, backend="eager")
    cache = PagedCache(pair.config, 2, 32)
    first = assert_same_tokens(pair, cache)
    assert pair.ours.graph_stats()["compiles"] == 2
    with torch.no_grad():
        for model in (pair.ours, pair.stock):
            model.model.layers[0].self_attn.kv_b_proj.lora_B["first"].weight.mul_(-2)
    second = assert_same_tokens(pair, cache)
    assert pair.ours.graph_stats()["compiles"] == 2
    for model in (pair.ours, pair.stock):
        model.disable_adapters()
    third = assert_same_tokens(pair, cache)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert not pair.ours.dsa_stats.traced_stock


def test_get_peft_model():
    """peft's own wrapper around a converted model."""
    import peft

    pair = Pair(tiny_model("deepseek_v32"), replace_attention(tiny_model("deepseek_v32")))
    config = peft.LoraConfig(r=4, target_modules=ATTENTION + INDEXER, init_lora_weights=False)
    outputs = []
    for model in (pair.stock, pair.ours):
        torch.manual_seed(2)
        wrapped = peft.get_peft_model(model, config).eval()
        cache = {"past_key_values": PagedCache(model.config, 2, 32)} if model is pair.ours else {}
        tokens = wrapped.generate(input_ids=prompt(2, 24), **cache, **OPTIONS)
        with torch.no_grad():
            outputs.append((tokens, wrapped(prompt(2, 24)).logits))
    assert torch.equal(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-4, atol=1e-4)
    assert not pair.ours.dsa_stats.stock_calls


def test_training_an_adapter_runs_the_stock_forward():
    pair = small()
    for model in (pair.stock, pair.ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        model.train()(prompt(2, 24), labels=prompt(2, 24)).loss.backward()
    gradients = dict(pair.stock.named_parameters())
    for name, parameter in pair.ours.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)
    assert pair.ours.dsa_stats.stock_calls == {"gradients": 1}
    assert "held_weight" not in pair.ours.model.layers[0].self_attn.kv_b_proj._buffers


@pytest.mark.parametrize("kind", ["dora", "dropout"])
def test_more_than_an_added_matrix_on_kv_b_proj(kind):
    """The stock forward calls it; a PagedCache cannot."""
    stock = tiny_model("deepseek_v32")
    add_adapter(stock, "first", ["kv_b_proj"], **({"use_dora": True} if kind == "dora" else {"lora_dropout": 0.5}))
    pair = Pair(stock, replace_attention(copy.deepcopy(stock)))
    outputs = []
    with torch.no_grad():
        for model in (pair.stock, pair.ours):
            model.train(kind == "dropout")
            torch.manual_seed(6)
            outputs.append(model(prompt(2, 24)).logits)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
        assert pair.ours.dsa_stats.stock_calls == {"kv_b_proj": 3}
        with pytest.raises(ValueError, match="kv_b_proj: .* merge the adapter"):
            pair.ours(prompt(2, 24), past_key_values=PagedCache(pair.config, 2, 32))

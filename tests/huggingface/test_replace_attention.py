"""replace_attention changes which code runs and nothing else about a model."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from compiled_dsa import Indexer, SparseAttention, huggingface
from compiled_dsa.huggingface import PagedCache, replace_attention
from tests.huggingface.tiny_models import CACHES, YARN, Pair, left_padding, needs, prompt, tiny_config, tiny_model


def stock_attentions(model) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.base_model.layers]


def same_logits(a, b, **kwargs) -> None:
    with torch.no_grad():
        assert torch.equal(a(prompt(2, 24), **kwargs).logits, b(prompt(2, 24), **kwargs).logits)


def test_returns_the_model_itself_and_once_is_enough(fresh_pair):
    model = fresh_pair.ours
    classes = [type(m) for m in model.modules()]
    stats, hooks = model.dsa_stats, len(model._forward_pre_hooks)
    assert replace_attention(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert model.dsa_stats is stats and len(model._forward_pre_hooks) == hooks


def test_stock_classes_are_still_matched(fresh_pair):
    for stock, ours in zip(stock_attentions(fresh_pair.stock), stock_attentions(fresh_pair.ours)):
        assert isinstance(ours, type(stock)) and isinstance(ours, SparseAttention)
        if stock.indexer is not None:
            assert isinstance(ours.indexer, type(stock.indexer)) and isinstance(ours.indexer, Indexer)


def test_parameters_stay_the_same_objects(pairs):
    for pair in pairs.values():
        model = copy.deepcopy(pair.stock)
        before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
        keys = list(model.state_dict())
        replace_attention(model)
        assert list(model.state_dict()) == keys
        for name, parameter in model.named_parameters():
            assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


def test_checkpoints_are_those_of_the_stock_model(any_fresh_pair, tmp_path):
    any_fresh_pair.ours.save_pretrained(tmp_path)
    loaded = type(any_fresh_pair.stock).from_pretrained(tmp_path)
    stock = any_fresh_pair.stock.state_dict()
    assert loaded.state_dict().keys() == stock.keys()
    assert all(torch.equal(value, stock[name]) for name, value in loaded.state_dict().items())
    same_logits(loaded, any_fresh_pair.stock)
    same_logits(replace_attention(loaded), any_fresh_pair.ours)


@needs("hy_v4")
def test_parameters_that_stay_in_fp32(tmp_path):
    """hy_v4 keeps sinks, the norm of index keys and the index weights in fp32 whatever the model's dtype."""
    tiny_model("hy_v4", index_topk=64).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    attention = stock.model.layers[0].self_attn
    kept = attention.sinks, attention.indexer.k_norm.weight, attention.indexer.weights_proj.weight
    assert {p.dtype for p in kept} == {torch.float32} and attention.q_b_proj.weight.dtype == torch.bfloat16
    ours = replace_attention(copy.deepcopy(stock))
    options = {"do_sample": False, "max_new_tokens": 6}
    want = stock.generate(prompt(2, 24), **options)
    assert torch.equal(ours.generate(prompt(2, 24), **options), want)
    assert torch.equal(ours.generate(prompt(2, 24), past_key_values=PagedCache(ours.config, 2, 32), **options), want)


def test_the_saved_config_names_no_attention_of_ours(fresh_pair, tmp_path):
    fresh_pair.ours.save_pretrained(tmp_path)
    assert "compiled_dsa" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_duplicates_work_and_are_independent(fresh_pair, duplicate):
    model = duplicate(fresh_pair.ours)
    calls = fresh_pair.ours.dsa_stats.calls
    cache = PagedCache(model.config, 2, 32)
    got = model.generate(prompt(2, 24), do_sample=False, max_new_tokens=4, past_key_values=cache)
    assert fresh_pair.ours.dsa_stats.calls == calls
    assert model.dsa_stats.calls == 3 * 4
    assert torch.equal(got, fresh_pair.stock.generate(prompt(2, 24), do_sample=False, max_new_tokens=4))
    with pytest.raises(ValueError, match="2D attention_mask"), torch.no_grad():  # hooks check the duplicate's own calls
        model(prompt(2, 3), attention_mask=torch.ones(2, 1, 3, 3), past_key_values=PagedCache(model.config, 2, 32))


def test_base_model(pairs):
    for pair in pairs.values():
        stock = copy.deepcopy(pair.stock.model)
        ours = replace_attention(copy.deepcopy(stock))
        with torch.no_grad():
            want = stock(prompt(2, 24)).last_hidden_state
            for cache in (None, PagedCache(ours.config, 2, 32)):
                got = ours(prompt(2, 24), past_key_values=cache).last_hidden_state
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert ours.dsa_stats.calls == 6


def test_base_model_of_a_causal_model(pairs):
    """Replacing inside ``model.model`` and running the whole model works with stock caches and a PagedCache."""
    for pair in pairs.values():
        model = copy.deepcopy(pair.stock)
        replace_attention(model.model)
        options = {"do_sample": False, "max_new_tokens": 4}
        want = pair.stock.generate(prompt(2, 24), **options)
        assert torch.equal(model.generate(prompt(2, 24), **options), want)
        cache = PagedCache(model.config, 2, 32)
        assert torch.equal(model.generate(prompt(2, 24), **options, past_key_values=cache), want)


@pytest.mark.parametrize("order", [("base", "whole"), ("whole", "base")], ids=lambda order: " then ".join(order))
def test_replacing_base_model_and_whole_model(pairs, order):
    for pair in pairs.values():
        model = copy.deepcopy(pair.stock)
        for part in order:
            replace_attention(model if part == "whole" else model.model)
        assert model.dsa_stats is model.model.dsa_stats
        cache = PagedCache(model.config, 2, 32)
        options = {"do_sample": False, "max_new_tokens": 4}
        want = pair.stock.generate(prompt(2, 24), **options)
        assert torch.equal(model.generate(prompt(2, 24), **options, past_key_values=cache), want)


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny_llama, "model_type='llama' is not supported: it is not a model with a lightning indexer"),
        (lambda: torch.nn.Linear(2, 2), "model is a Linear; it must be a transformers PreTrainedModel"),
        (lambda: tiny_model("axk2").model.layers[0], "it must be a transformers PreTrainedModel"),
    ],
)
def test_other_models_are_refused_and_unchanged(model, message):
    model = model()
    classes, members = [type(m) for m in model.modules()], set(vars(model))
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ValueError, match=message):
        replace_attention(model)
    assert [type(m) for m in model.modules()] == classes and set(vars(model)) == members
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == implementation


def test_a_model_whose_first_layer_shares_is_refused_and_unchanged(pairs):
    model = copy.deepcopy(pairs["glm_moe_dsa"].stock)
    model.config.indexer_types = ["shared", "full", "full"]
    with pytest.raises(ValueError, match="the first layer must be 'full'"):
        replace_attention(model)
    assert type(model.model.layers[0].self_attn) is type(pairs["glm_moe_dsa"].stock.model.layers[0].self_attn)
    assert not hasattr(model, "dsa_stats")


def test_stock_models_in_the_process_stay_stock(fresh_pair):
    assert fresh_pair.stock.config._attn_implementation == "sdpa"
    with torch.no_grad():
        out = type(fresh_pair.stock)._from_config(fresh_pair.stock.config, attn_implementation="eager")(
            prompt(1, 20), output_attentions=True
        )
    assert len(out.attentions) == 3 and out.attentions[0].shape == (1, 4, 20, 20)


def test_stock_implementation_can_be_chosen_again(fresh_pair):
    """set_attn_implementation("sdpa") gives square masks, for which transformers' own forward runs."""
    model = fresh_pair.ours
    model.set_attn_implementation("sdpa")
    same_logits(model, fresh_pair.stock)
    assert model.dsa_stats.calls == 0 and model.dsa_stats.stock_calls == {"mask": 3}


def test_hidden_states_and_hooks(fresh_pair):
    model, seen = fresh_pair.ours, []
    for attention in stock_attentions(model):
        attention.register_forward_hook(lambda module, args, output: seen.append((module.layer_idx, output[0].shape)))
        attention.indexer and attention.indexer.wk.register_forward_hook(lambda m, a, o: seen.append("wk"))
    with torch.no_grad():
        want = fresh_pair.stock(prompt(2, 24), output_hidden_states=True)
        got = model(prompt(2, 24), output_hidden_states=True, past_key_values=PagedCache(fresh_pair.config, 2, 32))
    assert [s for s in seen if s != "wk"] == [(i, (2, 24, 64)) for i in range(3)]
    assert seen.count("wk") == sum(a.indexer is not None for a in stock_attentions(model))
    assert len(got.hidden_states) == len(want.hidden_states) == 4
    for ours, stock in zip(got.hidden_states, want.hidden_states):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert got.attentions is None


def test_weights_can_be_replaced_under_a_converted_model(fresh_pair):
    """Absorbed and fused weights are made from the parameters at every call, so there is nothing stale to refresh."""
    other = tiny_model(fresh_pair.config.model_type, seed=4)
    fresh_pair.ours.load_state_dict(other.state_dict(), strict=True)
    options = {"do_sample": False, "max_new_tokens": 4}
    cache = PagedCache(fresh_pair.config, 2, 32)
    got = fresh_pair.ours.generate(prompt(2, 24), past_key_values=cache, **options)
    assert torch.equal(got, other.generate(prompt(2, 24), **options))


def test_odd_sizes():
    """Nothing is a power of two, and rope, latent and head sizes differ."""
    sizes = {
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 44,
        "q_lora_rank": 36,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 10,
        "v_head_dim": 14,
        "index_head_dim": 20,
        "index_n_heads": 17,
        "index_topk": 13,
    }
    stock = tiny_model("deepseek_v32", **sizes)
    ours = replace_attention(copy.deepcopy(stock))
    options = {"do_sample": False, "max_new_tokens": 6}
    want = stock.generate(prompt(2, 21), **options)
    assert torch.equal(ours.generate(prompt(2, 21), **options), want)
    assert torch.equal(ours.generate(prompt(2, 21), past_key_values=PagedCache(ours.config, 2, 32), **options), want)


def test_yarn():
    stock = tiny_model("deepseek_v32", rope_parameters=YARN)
    ours = replace_attention(copy.deepcopy(stock))
    with torch.no_grad():
        want = stock(prompt(2, 100)).logits
        got = ours(prompt(2, 100), past_key_values=PagedCache(ours.config, 2, 128)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_longer_model_with_several_shared_layers():
    config = tiny_config("glm_moe_dsa", num_hidden_layers=5)
    assert config.indexer_types == ["full", "shared", "full", "full", "shared"]
    types = ["full", "shared", "shared", "full", "shared"]
    stock = tiny_model("glm_moe_dsa", num_hidden_layers=5, indexer_types=types)
    ours = replace_attention(copy.deepcopy(stock))
    options = {"do_sample": False, "max_new_tokens": 4}
    want = stock.generate(prompt(2, 24), **options)
    assert torch.equal(ours.generate(prompt(2, 24), past_key_values=PagedCache(ours.config, 2, 32), **options), want)


@needs("mistral_large4_text")
@pytest.mark.parametrize("cache", CACHES)
def test_latents_of_both_kinds_are_shared(cache):
    """Layers without rope take those of layer 1, layers with rope those of layer 0 and later of layer 4."""
    stock = tiny_model(
        "mistral_large4_text",
        num_hidden_layers=7,
        no_rope_layers=[1, 0, 1, 0, 1, 0, 1],
        kv_source_layers=[0, 1, 0, 1, 4, 1, 4],
        indexer_types=["full", "shared", "full", "full", "shared", "shared", "full"],
    )
    pair = Pair(stock, replace_attention(copy.deepcopy(stock)))
    options = {"do_sample": False, "max_new_tokens": 6, "num_beams": 2, "attention_mask": left_padding(2, 24)}
    want = stock.generate(prompt(2, 24), **options)
    assert torch.equal(pair.ours.generate(prompt(2, 24), **options, **pair.cache(cache, 4, 32)), want)
    assert pair.ours.dsa_stats.calls == 7 * 6 and not pair.ours.dsa_stats.stock_calls


@needs("mistral_large4_text")
def test_images_stay_with_the_stock_tower():
    """Only the text part of a composite model gets our attention implementation."""
    stock = tiny_model("mistral_large4_text")
    ours = replace_attention(copy.deepcopy(stock))
    assert ours.config.vision_config._attn_implementation == "sdpa"
    torch.manual_seed(0)
    ids = torch.cat([torch.full((1, 2), ours.config.image_token_index), prompt(1, 20) % 100], 1)
    image = {"pixel_values": torch.randn(1, 3, 16, 8), "image_sizes": torch.tensor([[16, 8]])}
    options = {"do_sample": False, "max_new_tokens": 4, **image}
    want = stock.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), want)
    assert torch.equal(ours.generate(ids, **options, past_key_values=PagedCache(ours.config, 1, 32)), want)


@pytest.mark.parametrize("version", ["5.16.2", "5.24.0", "6.0.0.dev0"])
def test_other_releases_of_transformers_are_refused(pairs, monkeypatch, version):
    model = copy.deepcopy(pairs["deepseek_v32"].stock)
    monkeypatch.setattr(huggingface.transformers, "__version__", version)
    with pytest.raises(ValueError, match=rf"{version} is not supported.*5\.17 to 5\.23"):
        replace_attention(model)
    assert not hasattr(model, "dsa_stats")

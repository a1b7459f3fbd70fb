"""Packed projections in transformers models: tokens, checkpoints, adapters and compiled code stay what they were."""

import copy
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8

from compiled_dsa import compile_model, pack_projections, unpack_projections
from compiled_dsa.huggingface import PagedCache, replace_attention
from tests.huggingface.test_fp8_weights import quantize_attention, reference_linear
from tests.huggingface.tiny_models import CACHES, Pair, assert_same_tokens, make_pair, prompt, small_pair, tiny_model

OPTIONS = {"do_sample": False, "max_new_tokens": 6}


def packed(model: nn.Module) -> list[int]:
    """How many projections each layer has packed."""
    return [sum(len(pack.weights) for pack in (layer.packs or {}).values()) for layer in model.dsa_layers]


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_are_the_stock_ones(any_fresh_pair, cache):
    pair = any_fresh_pair
    want = pair.stock.generate(prompt(2, 24), **OPTIONS)
    pack_projections(pair.ours)
    assert packed(pair.ours)[0] >= 4
    assert torch.equal(pair.ours.generate(prompt(2, 24), **OPTIONS, **pair.cache(cache, 2, 32)), want)
    unpack_projections(pair.ours)
    assert torch.equal(pair.ours.generate(prompt(2, 24), **OPTIONS, **pair.cache(cache, 2, 32)), want)


def test_layers_that_share_selections_pack_what_they_have(fresh_pair):
    counts = {"deepseek_v32": [6, 6, 6], "glm_moe_dsa": [6, 2, 6], "axk2": [4, 4, 4]}
    assert packed(pack_projections(fresh_pair.ours)) == counts[fresh_pair.config.model_type]


def test_checkpoints(fresh_pair, tmp_path):
    """Saved packed: the same files as unpacked, which stock models load, and which load into packed models."""
    stock, model = fresh_pair.stock, pack_projections(fresh_pair.ours)
    model.save_pretrained(tmp_path / "model")
    stock.save_pretrained(tmp_path / "stock")
    saved, want = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "stock"))
    assert saved.keys() == want.keys() and all(torch.equal(saved[name], want[name]) for name in want)
    assert min(packed(model)) >= 2  # saving leaves it packed
    again = replace_attention(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert_same_tokens(Pair(stock, pack_projections(again)))
    state = {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}  # tied in some
    save_file(state, tmp_path / "plain.safetensors")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    for loaded in (load_file(tmp_path / "plain.safetensors"), torch.load(tmp_path / "plain.pt")):
        stock.load_state_dict(loaded, strict=len(loaded) == len(stock.state_dict()))
        model.load_state_dict(loaded, strict=len(loaded) == len(stock.state_dict()))
        assert_same_tokens(Pair(stock, model))


def test_sharded_checkpoints(tmp_path):
    pair = make_pair("deepseek_v32")
    pack_projections(pair.ours).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_tokens(Pair(AutoModelForCausalLM.from_pretrained(tmp_path), pair.ours))


def test_fp8_weights_stay_outside(monkeypatch):
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", reference_linear)
    stock = quantize_attention(tiny_model("deepseek_v32"))
    pair = Pair(stock, replace_attention(copy.deepcopy(stock)))
    assert packed(pack_projections(pair.ours)) == [0, 0, 0]  # weights_proj alone is plain
    assert_same_tokens(pair)


def test_adapters_stay_outside():
    import peft

    pair = make_pair("deepseek_v32")
    pack_projections(pair.ours)
    first = assert_same_tokens(pair)
    for model in (pair.ours, pair.stock):  # on packed layers: their groups are called one by one
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["wk", "q_b_proj"], init_lora_weights=False))
        model.requires_grad_(False)
    second = assert_same_tokens(pair)
    assert packed(pack_projections(pair.ours)) == [3, 3, 3]  # q_a_proj, kv_a_proj_with_mqa, weights_proj
    assert torch.equal(assert_same_tokens(pair), second) and not torch.equal(first, second)


def test_adapters_merged_into_packed_weights():
    """peft merges by assignment to ``.data``, and takes its layers off again."""
    import peft

    pair = make_pair("deepseek_v32")
    pack_projections(pair.ours)
    merged = []
    for model in (pair.stock, pair.ours):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["wk", "q_a_proj", "q_b_proj"], init_lora_weights=False)
        merged.append(peft.get_peft_model(model, config).merge_and_unload())
    stock, ours = merged
    before = packed(ours)
    assert before == [6, 6, 6]
    assert_same_tokens(Pair(stock, ours))
    for layer in ours.dsa_layers:
        assert layer.packed_hidden.data_ptr() == layer.q_a_proj.weight.data_ptr()


def change_weights(pair: Pair, seed: int, how) -> None:
    """Other values in all packed weights of both models."""
    for model in (pair.stock, pair.ours):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if (
                any(part in name for part in ("q_a_proj", "kv_a_proj", "q_b_proj", "indexer.w"))
                and parameter.dim() == 2
            ):
                how(parameter, torch.randn(parameter.shape, generator=generator) * parameter.std())


def assign_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.data = values


def write(parameter: nn.Parameter, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("model_type", "backend"), [("deepseek_v32", "inductor"), ("glm_moe_dsa", "aot_eager")])
def test_compiled(model_type, backend):
    """Packed by compile_model; weights written or assigned are followed without compiling again."""
    pair = small_pair(model_type)
    compile_model(pair.ours, backend=backend)
    assert min(packed(pair.ours)) >= 2
    cache = PagedCache(pair.config, 2, 32)
    tokens = [assert_same_tokens(pair, cache)]
    compiles = pair.ours.graph_stats()["compiles"]
    for seed, how in ((1, write), (2, assign_data)):
        change_weights(pair, seed, how)
        tokens.append(assert_same_tokens(pair, cache))
    assert pair.ours.graph_stats()["compiles"] == compiles
    assert not torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[1], tokens[2])


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_notices_other_parameters():
    pair = small_pair("deepseek_v32")
    compile_model(pair.ours, backend="aot_eager")
    cache = PagedCache(pair.config, 2, 32)
    assert_same_tokens(pair, cache)
    for model in (pair.stock, pair.ours):
        layer = model.model.layers[0].self_attn
        layer.q_a_proj.weight = nn.Parameter(layer.q_a_proj.weight.detach().roll(1, 0).clone())
    assert_same_tokens(pair, cache)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("graphs", ["off", "piecewise"])
def test_packing_is_an_option(graphs):
    pair = small_pair("glm_moe_dsa")
    compile_model(pair.ours, graphs=graphs, backend="eager", pack=False)
    assert packed(pair.ours) == [0, 0]
    assert_same_tokens(pair)


def test_moved_after_packing(fresh_pair):
    for model in (fresh_pair.stock, pack_projections(fresh_pair.ours)):
        model.double().float()
    change_weights(fresh_pair, 1, write)
    assert_same_tokens(fresh_pair)
    copied = Pair(copy.deepcopy(fresh_pair.stock), copy.deepcopy(fresh_pair.ours))
    change_weights(copied, 2, write)
    assert_same_tokens(copied)
    assert_same_tokens(fresh_pair)


# matrix products with weights a layer: without packing, and with it
PRODUCTS = {
    "scores": (7, 3),  # q_a, kv_a, wk, weights_proj | q_b, wq_b | o
    "no scores": (5, 3),  # without wq_b and weights_proj
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("variant", PRODUCTS)
def test_products_in_the_graph(variant):
    """Of a prefill, then of a decode step."""
    pair = small_pair("deepseek_v32")
    counts: list[Counter] = []

    def count(graph_module, inputs):
        counts.append(Counter(node.target for node in graph_module.graph.nodes if node.op == "call_function"))
        return graph_module.forward

    mm, copies = torch.ops.aten.mm.default, torch.ops.aten.clone.default
    compiled = []
    for pack in (False, True):
        torch._dynamo.reset()
        model = compile_model(copy.deepcopy(pair.ours), backend=aot_autograd(fw_compiler=count), pack=pack)
        cache = PagedCache(pair.config, 2, 64)
        held = 5 if variant == "no scores" else 30
        with torch.no_grad():
            for tokens in (held, 1):
                model(prompt(2, tokens), past_key_values=cache)
                compiled.append(counts[-1])
    assert len(counts) == 4
    for unpacked, packed_ in zip(compiled[:2], compiled[2:]):
        assert unpacked[mm] - packed_[mm] == PRODUCTS[variant][0] - PRODUCTS[variant][1]
        assert packed_[mm] == 3 + 3 + 1  # of the layer, its MLP and the head
        assert packed_[copies] <= unpacked[copies]

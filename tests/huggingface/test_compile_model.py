"""compile_model: one graph a variant of a step, none per length, and the tokens of the stock model."""

import copy

import pytest
import torch

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache
from tests.huggingface.tiny_models import INDEX_TOPK, Pair, left_padding, prompt, small_pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled_pair(model_type: str) -> Pair:
    pair = small_pair(model_type)
    assert compile_model(pair.ours, backend="eager") is pair.ours
    return pair


def generate(pair: Pair, cache: PagedCache, batch_size: int, length: int, new: int = 4, mask=None, **options) -> int:
    """Checks generate() against the stock model and returns how many graphs it compiled."""
    before = pair.ours.graph_stats()["compiles"]
    options = {"do_sample": False, "max_new_tokens": new, "attention_mask": mask, **options}
    ids = prompt(batch_size, length, seed=length)
    cache.reset()
    got = pair.ours.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, pair.stock.generate(ids, **options))
    return pair.ours.graph_stats()["compiles"] - before


def test_compiles_of_generate():
    """Prefill and decode compile once each, with scores and (below index_topk) without; other lengths never."""
    pair = compiled_pair("glm_moe_dsa")
    cache = PagedCache(pair.config, 3, 128)
    assert generate(pair, cache, 2, 24) == 2  # many tokens a row, and one
    assert generate(pair, cache, 2, 37) == 0
    assert generate(pair, cache, 2, 100) == 0
    assert generate(pair, cache, 2, 10, new=INDEX_TOPK - 10) == 2  # the same without scores
    assert generate(pair, cache, 2, 12, new=20) == 0  # from one to the other
    assert generate(pair, cache, 3, 50) == 0  # another batch size
    assert generate(pair, PagedCache(pair.config, 3, 128), 2, 31) == 0  # another cache of that size
    for length in range(100, 111):
        assert generate(pair, cache, 2, length, new=2) == 0
    assert pair.ours.dsa_stats.calls == 0 and pair.ours.dsa_stats.traced == 4 * pair.config.num_hidden_layers


def test_compiles_of_padded_batches():
    pair = compiled_pair("glm_moe_dsa")
    cache = PagedCache(pair.config, 3, 128)
    assert generate(pair, cache, 2, 24, mask=left_padding(2, 24)) == 2
    assert generate(pair, cache, 2, 40, mask=left_padding(2, 40)) == 0
    assert generate(pair, cache, 3, 30, mask=left_padding(3, 30)) == 0


def test_compiles_of_one_row():
    """torch specialises a size of 1: a batch of one row is a variant of its own."""
    pair = compiled_pair("deepseek_v32")
    cache = PagedCache(pair.config, 1, 128)
    assert generate(pair, cache, 1, 24) == 2
    assert generate(pair, cache, 1, 40) == 0


def test_compiles_of_prompt_lookup():
    """Prefill, verify steps of 2 to 5 tokens (decode-shaped), and steps of one."""
    pair = compiled_pair("deepseek_v32")
    cache = PagedCache(pair.config, 1, 128)
    assert generate(pair, cache, 1, 30, new=12, prompt_lookup_num_tokens=4) == 3
    assert generate(pair, cache, 1, 44, new=12, prompt_lookup_num_tokens=4) == 0


def test_beams_and_chunks():
    pair = compiled_pair("glm_moe_dsa")
    cache = PagedCache(pair.config, 6, 128)
    assert generate(pair, cache, 2, 24, num_beams=3) == 2
    assert generate(pair, cache, 2, 70, num_beams=3) == 0
    assert generate(pair, cache, 2, 60, prefill_chunk_size=25) == 0


def test_training_falls_back_inside_one_graph():
    pair = compiled_pair("glm_moe_dsa")
    for model in (pair.stock, pair.ours):
        model.train()
        model(prompt(2, 24), labels=prompt(2, 24), use_cache=False).loss.backward()
    stock = dict(pair.stock.named_parameters())
    for name, parameter in pair.ours.named_parameters():
        assert (parameter.grad is None) == (stock[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, stock[name].grad, rtol=1e-3, atol=1e-6)
    assert pair.ours.graph_stats()["compiles"] == 1
    assert pair.ours.dsa_stats.traced_stock == {"gradients": 2}


def test_arguments(pairs):
    model = copy.deepcopy(pairs["axk2"].ours)
    with pytest.raises(ValueError, match="graphs='fast'; it must be one of auto, off, full"):
        compile_model(model, graphs="fast")
    assert not hasattr(model, "graph_stats")
    compile_model(model, backend="eager")
    assert model.graph_stats()["compiles"] == 0
    with pytest.raises(ValueError, match="model is compiled already"):
        compile_model(model)

"""A PagedCache says the truth about what it holds, whatever went wrong or was in force before."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache
from tests.huggingface.tiny_models import VOCABULARY, prompt, small_pair


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def test_a_forward_that_fails_before_its_layers_leaves_the_cache_as_it_was(pair):
    ids = prompt(2, 30)
    cache, untouched = PagedCache(pair.config, 3, 64), PagedCache(pair.config, 3, 64)
    for held in (cache, untouched):
        logits(pair.ours, ids[:, :20], past_key_values=held)
    with pytest.raises(IndexError):
        logits(pair.ours, torch.full((2, 5), VOCABULARY + 7), past_key_values=cache)
    assert cache.get_seq_length() == 20
    for held in (cache, untouched):
        held.crop(-5)
    assert cache.get_seq_length() == 15
    results = [logits(pair.ours, ids[:, 15:], past_key_values=held) for held in (cache, untouched)]
    assert torch.equal(*results)


def test_an_empty_cache_takes_any_batch_size_after_a_forward_that_failed(pair):
    cache = PagedCache(pair.config, 3, 64)
    with pytest.raises(IndexError):
        logits(pair.ours, torch.full((2, 5), VOCABULARY + 7), past_key_values=cache)
    ids = prompt(3, 20)
    assert torch.equal(
        logits(pair.ours, ids, past_key_values=cache),
        logits(pair.ours, ids, past_key_values=PagedCache(pair.config, 3, 64)),
    )


def test_a_cache_filled_in_inference_mode_serves_outside_of_it(pair):
    ids = prompt(2, 30)
    cache = PagedCache(pair.config, 2, 64)
    with torch.inference_mode():
        pair.ours(ids[:, :20], past_key_values=cache)
    got = logits(pair.ours, ids[:, 20:], past_key_values=cache)
    whole = logits(pair.ours, ids, past_key_values=PagedCache(pair.config, 2, 64))
    torch.testing.assert_close(got, whole[:, 20:], rtol=1e-4, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_pools_go_with_the_last_reference(pair):
    cache = PagedCache(pair.config, 2, 64)
    logits(pair.ours, prompt(2, 20), past_key_values=cache)
    pool = weakref.ref(cache.pool.layers[0].latents)
    gc.disable()  # a cycle would keep the pools until the next collection
    try:
        del cache
        assert pool() is None
    finally:
        gc.enable()


def test_a_step_of_no_tokens_is_named(pair):
    with pytest.raises(ValueError, match="query_length=0"):
        logits(pair.ours, prompt(2, 20)[:, :0], past_key_values=PagedCache(pair.config, 2, 64))


def test_a_compiled_model_refuses_to_be_copied(fresh_pair):
    compile_model(fresh_pair.ours, backend="eager")
    with pytest.raises(ValueError, match="copy it before"):
        copy.deepcopy(fresh_pair.ours)


@pytest.mark.parametrize("take", [lambda c: c.batch_select_indices(torch.tensor([1])), None])
def test_columns_after_padding_that_is_gone_are_counted(pair, take):
    """Row 0 is padded and then replaced by row 1; what follows is cropped."""
    ids, mask = prompt(2, 40), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    ours, stock = PagedCache(pair.config, 2, 64), DynamicCache(config=pair.config)
    results = []
    for model, cache in ((pair.ours, ours), (pair.stock, stock)):
        logits(model, ids[:, :10], attention_mask=mask, past_key_values=cache)
        if take is None:
            cache.reorder_cache(torch.tensor([1, 1]))
        else:
            take(cache)
        rows = 2 if take is None else 1
        logits(model, ids[:rows, 10:14], past_key_values=cache)
        cache.crop(-1)
        results.append(logits(model, ids[:rows, 20:23], past_key_values=cache))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_forward_that_fails_between_layers_is_taken_back(pair):
    ids = prompt(2, 30)
    cache, untouched = PagedCache(pair.config, 2, 64), PagedCache(pair.config, 2, 64)
    for held in (cache, untouched):
        logits(pair.ours, ids[:, :20], past_key_values=held)

    def fail(*args):
        raise RuntimeError("planted")

    handle = pair.ours.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        logits(pair.ours, ids[:, 20:25], past_key_values=cache)
    handle.remove()
    assert cache.get_seq_length() == 20
    results = [logits(pair.ours, ids[:, 20:25], past_key_values=held) for held in (cache, untouched)]
    assert torch.equal(*results)


def test_a_hook_on_the_absorbed_projection_counts(fresh_pair):
    ids = prompt(2, 30)
    for model in (fresh_pair.ours, fresh_pair.stock):
        model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out * 1.5)
    torch.testing.assert_close(logits(fresh_pair.ours, ids), logits(fresh_pair.stock, ids), rtol=1e-4, atol=1e-4)
    assert fresh_pair.ours.dsa_stats.stock_calls["kv_b_proj"] == 1
    cache = PagedCache(fresh_pair.config, 2, 64)
    with pytest.raises(ValueError, match="kv_b_proj"):
        logits(fresh_pair.ours, ids, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_overflow_of_whole_compiled_forwards_is_named():
    pair = small_pair("deepseek_v32")
    whole = torch.compile(pair.ours, backend="eager")
    cache = PagedCache(pair.config, 2, 40, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        whole(prompt(2, 30), past_key_values=cache)
        whole(prompt(2, 30), past_key_values=cache)
    with pytest.raises(ValueError, match="max_cache_len=40"):
        cache.get_seq_length()
    cache.reset()
    assert cache.get_seq_length() == 0


def test_compile_model_leaves_the_arguments_of_other_modules_alone():
    class Writes(torch.nn.Module):
        def forward(self, x, store):
            store["y"] = x + 1
            return x

    store: dict[str, torch.Tensor] = {}
    compile_model(Writes(), backend="eager")(torch.ones(2), store)
    assert store["y"].tolist() == [2, 2]

"""A PagedCache says the truth about what it holds, whatever went wrong or was in force before."""

import copy
import gc
import weakref

import pytest
import torch

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache
from tests.huggingface.tiny_models import VOCABULARY, prompt


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

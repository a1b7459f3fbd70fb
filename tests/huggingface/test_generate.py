"""generate() with a converted model gives the tokens of the stock model, whatever the cache and the decoding."""

import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from compiled_dsa.huggingface import PagedCache
from tests.huggingface.tiny_models import (
    ALL_MODEL_TYPES,
    CACHES,
    INDEX_TOPK,
    MODEL_TYPES,
    left_padding,
    make_pair,
    needs,
    prompt,
    small_pair,
    tiny_model,
)

NEW = 8  # tokens generated; prompts are longer than index_topk, so that keys are left out from the start
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
every_cache = pytest.mark.parametrize("cache", CACHES)


@every_cache
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_greedy(any_pair, cache, padded):
    ids = prompt(2, 24)
    mask = left_padding(2, 24) if padded else torch.ones_like(ids)
    want = any_pair.stock_tokens(ids, attention_mask=mask, **GREEDY)
    got = any_pair.ours.generate(ids, attention_mask=mask, **GREEDY, **any_pair.cache(cache, 2, 32))
    assert torch.equal(got, want)


@every_cache
def test_crossing_topk_while_decoding(any_pair, cache):
    ids = prompt(2, INDEX_TOPK - 4)
    want = any_pair.stock_tokens(ids, **GREEDY)
    assert torch.equal(any_pair.ours.generate(ids, **GREEDY, **any_pair.cache(cache, 2, 32)), want)


@every_cache
def test_sampling_with_the_same_seed(pair, cache):
    ids = prompt(2, 24)
    options = {"do_sample": True, "top_p": 0.9, "temperature": 1.3, "max_new_tokens": NEW}
    torch.manual_seed(3)
    want = pair.stock.generate(ids, **options)
    torch.manual_seed(3)
    assert torch.equal(pair.ours.generate(ids, **options, **pair.cache(cache, 2, 32)), want)
    assert not torch.equal(want, pair.stock_tokens(ids, **GREEDY))


@every_cache
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_beams(any_pair, cache, padded):
    ids = prompt(2, 24)
    mask = left_padding(2, 24) if padded else torch.ones_like(ids)
    options = {**GREEDY, "num_beams": 3, "attention_mask": mask}
    want = any_pair.stock_tokens(ids, **options)
    assert torch.equal(any_pair.ours.generate(ids, **options, **any_pair.cache(cache, 6, 32)), want)


def test_beams_reorder_pages_beyond_the_first(pair):
    """70 columns take two pages, and both go with their beam."""
    ids = prompt(1, 62)
    options = {"do_sample": False, "max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 3}
    want = pair.stock_tokens(ids, **options)
    assert torch.equal(pair.ours.generate(ids, **options, **pair.cache("paged", 3, 80)), want)


def test_return_sequences(pair):
    ids = prompt(2, 20)
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": NEW}
    torch.manual_seed(5)
    want = pair.stock.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(pair.ours.generate(ids, **options, **pair.cache("paged", 4, 32)), want)


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_prompt_lookup(pair, cache):
    ids = prompt(1, 6).repeat(1, 5)  # repetitions, so that there is something to look up
    options = {"do_sample": False, "max_new_tokens": 12}
    want = pair.stock_tokens(ids, **options)
    held = pair.cache(cache, 1, 64)
    assert torch.equal(pair.ours.generate(ids, **options, **held, prompt_lookup_num_tokens=4), want)


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("assistant", ["itself", "another"])
def test_assistant_model(pair, cache, assistant):
    """As its own assistant the model accepts every candidate; another one's candidates are cropped away."""
    ids = prompt(1, 24)
    helper = pair.stock if assistant == "itself" else tiny_model(pair.config.model_type, seed=9, num_hidden_layers=1)
    want = pair.stock_tokens(ids, **GREEDY)
    got = pair.ours.generate(ids, assistant_model=helper, **GREEDY, **pair.cache(cache, 1, 64))
    assert torch.equal(got, want)


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
@pytest.mark.parametrize("chunk", [7, 20])
def test_chunked_prefill(any_pair, cache, chunk):
    if cache == "static" and any_pair.config.model_type == "dots3_note_text":
        pytest.skip("transformers allocates the static cache with sizes that are not the model's")
    ids = prompt(2, 40)
    mask = left_padding(2, 40)
    want = any_pair.stock_tokens(ids, attention_mask=mask, **GREEDY)
    got = any_pair.ours.generate(
        ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY, **any_pair.cache(cache, 2, 64)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_continuing_a_cache(any_pair, padded):
    """A second generate() over the whole conversation reads the first one's keys from the cache."""
    ids, more = prompt(2, 20), prompt(2, 6, seed=2)
    mask = left_padding(2, 20) if padded else torch.ones_like(ids)
    cache = PagedCache(any_pair.config, 2, 64)
    first = any_pair.ours.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    held = cache.get_seq_length()
    assert held == first.shape[1] - 1  # the last token was not fed back
    ids = torch.cat([first, more], dim=1)
    mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
    want = any_pair.stock_tokens(ids, attention_mask=mask, **GREEDY)
    before = any_pair.ours.dsa_stats.calls
    assert torch.equal(any_pair.ours.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY), want)
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1
    assert any_pair.ours.dsa_stats.calls - before == len(any_pair.ours.get_decoder().layers) * NEW


@pytest.mark.parametrize("cache", ["paged", "static"])
def test_scores(pair, cache):
    ids = prompt(2, 24)
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    want = pair.stock.generate(ids, **options)
    got = pair.ours.generate(ids, **options, **pair.cache(cache, 2, 32))
    assert torch.equal(got.sequences, want.sequences)
    # logits of about unit size after a few hundred fp32 roundings
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), rtol=1e-4, atol=1e-4)


def test_input_embeddings(pair):
    embeddings = pair.stock.get_input_embeddings()(prompt(2, 24)).detach()
    want = pair.stock.generate(inputs_embeds=embeddings, **GREEDY)
    assert torch.equal(pair.ours.generate(inputs_embeds=embeddings, **GREEDY, **pair.cache("paged", 2, 32)), want)


def test_fewer_rows_than_the_cache_has_and_reset(pair):
    cache = PagedCache(pair.config, 4, 64)
    for batch_size, length in ((2, 24), (4, 18), (1, 40)):
        ids = prompt(batch_size, length)
        want = pair.stock_tokens(ids, **GREEDY)
        assert torch.equal(pair.ours.generate(ids, past_key_values=cache, **GREEDY), want)
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_other_dtypes_are_as_exact_as_the_stock_model(model_type, dtype):
    pair = make_pair(model_type, dtype, first_k_dense_replace=4)  # transformers' grouped experts have no fp64
    exact = copy.deepcopy(pair.stock).double()
    ids = prompt(8, 64)
    caches = {"past_key_values": PagedCache(pair.config, 8, 64)}, {"past_key_values": DynamicCache(config=pair.config)}
    with torch.no_grad():
        truth, stock = (model(ids, use_cache=False).logits.double() for model in (exact, pair.stock))
        for cache in (*caches, {"use_cache": False}):
            ours = pair.ours(ids, **cache).logits
            assert ours.dtype == dtype
            if dtype == torch.float64:
                torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)  # the stock norms are computed in fp32
            else:
                # roundings differ, and with them a few of the indexer's choices: the size of the error must agree
                assert (ours - truth).norm() < 1.2 * (stock - truth).norm()


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
def test_generate_in_bf16(cache):
    """With everything selected no near tie of the indexer can differ, and tokens agree in bf16 too."""
    for model_type in MODEL_TYPES:
        pair = make_pair(model_type, torch.bfloat16, index_topk=64)
        want = pair.stock.generate(prompt(2, 24), **GREEDY)
        assert torch.equal(pair.ours.generate(prompt(2, 24), **GREEDY, **pair.cache(cache, 2, 32)), want)


def generates_as_stock(pair, cache: str, masks) -> None:
    for mask in masks:
        options = {"do_sample": False, "max_new_tokens": 4, "attention_mask": mask}
        want = pair.stock.generate(prompt(2, 24), **options)
        held = pair.cache(cache, 2, 32, **({"device": "cpu", "dtype": torch.float32} if cache == "paged" else {}))
        assert torch.equal(pair.ours.generate(prompt(2, 24), **options, **held), want)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("model_type", "cache"), [("glm_moe_dsa", "paged"), ("axk2", "static")])
def test_compiled_by_generate(model_type, cache):
    """generate() compiles the decode steps of a cache that says it is compileable; it does so by itself on a GPU."""
    pair = small_pair(model_type)
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    pair.ours.generation_config.compile_config = config
    generates_as_stock(pair, cache, [None, left_padding(2, 24)])
    assert pair.ours.dsa_stats.traced > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("how", "model_type", "cache"),
    [
        ("model.compile", "deepseek_v32", "paged"),
        ("model.forward", "axk2", "paged"),
        ("model.forward", "glm_moe_dsa", "static"),
        ("model.forward", "glm_moe_dsa", "dynamic"),
        pytest.param("model.forward", "hy_v4", "paged", marks=needs("hy_v4")),
        pytest.param("model.forward", "dots3_note_text", "paged", marks=needs("dots3_note_text")),
        pytest.param("model.forward", "mistral_large4_text", "paged", marks=needs("mistral_large4_text")),
    ],
)
def test_compiled_whole(how, model_type, cache):
    pair = small_pair(model_type)
    if how == "model.compile":
        pair.ours.compile(backend="eager", fullgraph=True)
    else:
        pair.ours.forward = torch.compile(pair.ours.forward, backend="eager", fullgraph=True)
    generates_as_stock(pair, cache, [left_padding(2, 24) if how == "model.compile" else None])
    assert pair.ours.dsa_stats.traced > 0 and pair.ours.dsa_stats.calls == 0

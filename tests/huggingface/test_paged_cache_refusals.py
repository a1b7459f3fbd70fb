"""PagedCache: a refused call says why and changes nothing."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache
from tests.huggingface.conversation import CLOSE, FP8, Conversation, pool_bytes, talk
from tests.huggingface.tiny_models import Pair, left_padding, prompt, small_pair, tiny_config


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 64), {}, "max_batch_size=0; it must be an integer of at least 1"),
        ((-1, 64), {}, "max_batch_size=-1"),
        ((2.0, 64), {}, "max_batch_size=2.0"),
        ((2, 0), {}, "max_cache_len=0"),
        ((2, "64"), {}, "max_cache_len='64'"),
        ((2, 64), {"latent_dtype": torch.int8}, "latent_dtype=torch.int8; it must be a model dtype or"),
        ((2, 64), {"index_dtype": torch.float8_e5m2}, "index_dtype=torch.float8_e5m2"),
        ((2, 64), {"dtype": torch.int64}, "dtype=torch.int64"),
        ((2, 64), {"dtype": FP8}, "dtype=torch.float8_e4m3fn; it must be a model dtype"),
    ],
)
def test_constructor_arguments(pair, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(pair.config, *arguments, **options)


def test_constructor_with_another_model():
    with pytest.raises(ValueError, match="model_type='llama' is not supported"):
        PagedCache(LlamaConfig(), 1, 64)


def compiled(pair: Pair) -> Pair:
    return Pair(pair.stock, compile_model(copy.deepcopy(pair.ours), backend="eager"))


def too_long(c: Conversation) -> None:
    c.pair.ours(prompt(2, 81), past_key_values=c.cache)


def too_many_rows(c: Conversation) -> None:
    c.pair.ours(prompt(4, 2), past_key_values=c.cache)


def other_rows(c: Conversation) -> None:
    c.pair.ours(prompt(3, 2), past_key_values=c.cache)


def earlier_columns_masked(c: Conversation) -> None:
    mask = torch.ones(2, 22, dtype=torch.int64)
    mask[1, 7] = 0
    c.pair.ours(prompt(2, 2), attention_mask=mask, past_key_values=c.cache)


def mask_of_the_new_columns_only(c: Conversation) -> None:
    c.pair.ours(prompt(2, 2), attention_mask=torch.ones(2, 2), past_key_values=c.cache)


def mask_of_other_rows(c: Conversation) -> None:
    c.pair.ours(prompt(2, 2), attention_mask=torch.ones(3, 22), past_key_values=c.cache)


def generate_too_long(c: Conversation) -> None:
    c.pair.ours.generate(torch.cat([c.ids, prompt(2, 81)], 1), past_key_values=c.cache, max_new_tokens=2)


def crop_too_much(c: Conversation) -> None:
    c.cache.crop(-21)


def crop_to_a_length(c: Conversation) -> None:
    c.cache.crop(5)


def too_many_beams(c: Conversation) -> None:
    c.cache.batch_repeat_interleave(2)


def stock_model(c: Conversation) -> None:
    c.pair.stock(prompt(2, 2), past_key_values=c.cache)


REFUSED_CALLS = {
    too_long: r"20 \+ 81 tokens do not fit max_cache_len=100",
    generate_too_long: "tokens do not fit max_cache_len=100",
    too_many_rows: "batch size 4 does not fit max_batch_size=3",
    other_rows: r"batch size 3; the cache holds 2 rows, call reset\(\) first",
    earlier_columns_masked: "attention_mask changes columns that are already cached",
    mask_of_the_new_columns_only: r"attention_mask has shape \(2, 2\); with PagedCache it must be \[2, 22\]",
    mask_of_other_rows: r"attention_mask has shape \(3, 22\)",
    crop_too_much: "tokens_to_remove=-21; it must be between -20 and 0",
    crop_to_a_length: "tokens_to_remove=5; it must be between -20 and 0",
    too_many_beams: "4 rows do not fit max_batch_size=3",
    stock_model: "this model's attention is stock",
}


def refused_and_unchanged(conversation: Conversation, call, message: str) -> None:
    cache = conversation.cache
    before, held = pool_bytes(cache), cache.get_seq_length()
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(conversation)
    assert cache.get_seq_length() == held
    assert all(map(torch.equal, before, pool_bytes(cache)))
    conversation.feed(2, 3)


@pytest.mark.parametrize("call", REFUSED_CALLS, ids=lambda f: f.__name__)
def test_refused_calls_change_nothing(pair, call):
    conversation = talk(pair)
    conversation.feed(2, 20)
    refused_and_unchanged(conversation, call, REFUSED_CALLS[call])


@pytest.mark.parametrize("call", [too_long, generate_too_long], ids=lambda f: f.__name__)
def test_too_long_for_an_empty_cache(pair, call):
    conversation = talk(pair, max_cache_len=80)
    conversation.ids = torch.zeros(2, 0, dtype=torch.int64)
    refused_and_unchanged(conversation, call, "0 .* 81 tokens do not fit max_cache_len=80")


def mask_dropped(c: Conversation) -> None:
    c.pair.ours(prompt(2, 2), past_key_values=c.cache)


def padding_unmasked(c: Conversation) -> None:
    c.pair.ours(prompt(2, 2), attention_mask=torch.ones(2, 22), past_key_values=c.cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [(mask_dropped, "attention_mask=None; the cache holds padding"), (padding_unmasked, "changes columns")],
)
def test_padding_must_stay_masked(pair, call, message):
    conversation = talk(pair)
    conversation.feed(2, 20, left_padding(2, 20))
    refused_and_unchanged(conversation, call, message)


@pytest.mark.usefixtures("fresh_dynamo")
def test_refused_calls_of_a_compiled_model():
    pair = compiled(small_pair("deepseek_v32"))
    conversation = talk(pair, device="cpu", dtype=torch.float32)
    conversation.feed(2, 20)
    for call in (too_long, too_many_rows, other_rows, earlier_columns_masked, mask_of_the_new_columns_only):
        conversation.cache.crop(20 - conversation.cache.get_seq_length())
        conversation.ids, conversation.mask = conversation.ids[:, :20], conversation.mask[:, :20]
        refused_and_unchanged(conversation, call, REFUSED_CALLS[call])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtype_of_another_model(pair, dtype):
    cache = PagedCache(pair.config, 2, 64, dtype=dtype)
    with torch.no_grad(), pytest.raises(ValueError, match=f"latent_dtype={dtype}; the model computes in torch.float32"):
        pair.ours(prompt(2, 20), past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.pool is None


def test_a_cache_of_another_config(pairs):
    for config in (
        tiny_config("axk2", num_hidden_layers=2),
        tiny_config("axk2", kv_lora_rank=36),
        tiny_config("axk2", index_topk=17),
        tiny_config("glm_moe_dsa"),
    ):
        cache = PagedCache(config, 2, 64)
        with torch.no_grad(), pytest.raises(ValueError, match="is not that of the model"):
            pairs["axk2"].ours(prompt(2, 20), past_key_values=cache)
        assert cache.get_seq_length() == 0


def test_offloading_is_refused(pair):
    cache = PagedCache(pair.config, 2, 64)
    for call in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(ValueError, match="PagedCache cannot be offloaded"):
            call()


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_stock_caches_made_by_hand(pair, cache):
    options = {"max_cache_len": 64} if cache is StaticCache else {}
    held = cache(config=pair.config, **options)
    with torch.no_grad():
        ids = prompt(2, 30)
        got = torch.cat([pair.ours(part, past_key_values=held).logits for part in ids.split([20, 1, 9], 1)], 1)
        torch.testing.assert_close(got, pair.stock(ids, use_cache=False).logits, **CLOSE)

"""PagedCache: what it holds after every call."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from compiled_dsa.huggingface import PagedCache
from tests.huggingface.conversation import CLOSE, FP8, Conversation, talk
from tests.huggingface.tiny_models import MODEL_TYPES, left_padding, make_pair, needs, prompt, tiny_config


def test_steps_of_all_sizes(pair):
    conversation = talk(pair)
    for length in (1, 5, 30, 1, 1, 9, 40, 13):
        conversation.feed(2, length)


def masks_with(zeros: list[tuple[int, int]], length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.int64)
    for row, column in zeros:
        mask[row, column] = 0
    return mask


@pytest.mark.parametrize(
    "zeros",
    [
        [(0, c) for c in range(9)],
        [(1, c) for c in range(20, 30)],
        [(0, 4), (0, 5), (0, 17), (1, 28), (1, 2)],
        [(0, 0), (0, 29), (1, 13), (1, 14)],
    ],
    ids=["left", "right", "holes", "both ends"],
)
def test_padding_anywhere(pair, zeros):
    """Padding takes no slot, the rows go on after it, and a later step may have padding of its own."""
    conversation = talk(pair)
    conversation.feed(2, 30, masks_with(zeros, 30))
    for length in (1, 9):
        conversation.feed(2, length)
    conversation.feed(2, 4, masks_with([(0, 2), (0, 3), (1, 0)], 4))
    conversation.feed(2, 1, masks_with([(1, 0)], 1))
    conversation.feed(2, 20)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no-cache", "dynamic"])
def test_padding_anywhere_without_a_paged_cache(pair, use_cache):
    mask = masks_with([(0, 0), (0, 4), (0, 17), (1, 28), (1, 29)], 30)
    real, cache = mask.bool(), DynamicCache(config=pair.config) if use_cache else None
    with torch.no_grad():
        want = pair.stock(prompt(2, 30), attention_mask=mask, use_cache=False).logits
        if use_cache:
            parts = zip(prompt(2, 30).split([20, 9, 1], 1), (20, 29, 30))
            steps = [pair.ours(ids, attention_mask=mask[:, :n], past_key_values=cache).logits for ids, n in parts]
            got = torch.cat(steps, 1)
        else:
            got = pair.ours(prompt(2, 30), attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[real], want[real], **CLOSE)


class ScoringOps(TorchDispatchMode):
    """Counts the ops that compute index scores."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "index_topk" in func.name()
        return func(*args, **(kwargs or {}))


def test_scores_are_computed_from_the_step_on_that_leaves_keys_out(pair):
    """Up to index_topk = 16 columns everything is selected."""
    full_layers = sum(not c.index_shared for c in PagedCache(pair.config, 1, 64).layer_configs)
    conversation = talk(pair)
    for length, scored in ((15, False), (1, False), (1, True), (9, True)):
        with ScoringOps() as ops:
            conversation.feed(2, length)
        assert ops.count == scored * full_layers


def test_padding_that_begins_later(pair):
    conversation = talk(pair)
    conversation.feed(2, 18)
    conversation.feed(2, 5, masks_with([(0, 3), (0, 4)], 5))
    conversation.feed(2, 2)


def test_a_row_of_padding_only_harms_no_other(pair):
    conversation = talk(pair)
    conversation.feed(2, 20, masks_with([(0, c) for c in range(20)], 20))
    conversation.feed(2, 3)


def test_padded_rows_take_the_slots_of_real_tokens_only(pair):
    cache = PagedCache(pair.config, 2, 100)
    with torch.no_grad():
        pair.ours(prompt(2, 24), attention_mask=left_padding(2, 24), past_key_values=cache)
    latents = cache.pool.layers[0].latents.flatten(0, 1)
    written = [int((latents[page * 64 : page * 64 + 64] != 0).any(-1).sum()) for page in cache.pool.page_table[:, 0]]
    assert written == left_padding(2, 24).sum(1).tolist() == [21, 24]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("removed", [1, 6, 27, 30])
def test_crop(pair, padded, removed):
    conversation = talk(pair)
    conversation.feed(2, 30, masks_with([(0, 0), (0, 1), (1, 25), (1, 26)], 30) if padded else None)
    conversation.crop(0)
    assert conversation.cache.get_seq_length() == 30
    conversation.crop(removed)
    assert conversation.cache.get_seq_length() == 30 - removed
    conversation.feed(2, 3)
    conversation.feed(2, 20)


def test_crop_by_a_tensor_counts_on_the_host(pair):
    conversation = talk(pair)
    conversation.feed(2, 20)
    conversation.cache.crop(torch.tensor(-4))
    assert type(conversation.cache.get_seq_length()) is int and conversation.cache.get_seq_length() == 16


def test_cropping_the_only_padding_away(pair):
    """After it a mask is no longer needed."""
    conversation = talk(pair)
    conversation.feed(2, 20)
    conversation.feed(2, 4, masks_with([(0, 3)], 4))
    conversation.crop(4)
    conversation.feed(2, 5)


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [1, 1]])
def test_reorder(pair, order):
    conversation = talk(pair)
    conversation.feed(2, 70, masks_with([(0, c) for c in range(3)], 70))
    order = torch.tensor(order)
    conversation.cache.reorder_cache(order)
    conversation.rows(order)
    conversation.feed(2, 1)
    conversation.feed(2, 12)


def test_repeat_and_select_rows(pair):
    conversation = talk(pair, max_batch_size=6)
    conversation.feed(2, 22, masks_with([(1, 0), (1, 1)], 22))
    conversation.cache.batch_repeat_interleave(3)
    conversation.rows(torch.tensor([0, 0, 0, 1, 1, 1]))
    conversation.feed(6, 2)
    conversation.cache.batch_select_indices(torch.tensor([5, 0, 2]))
    conversation.rows(torch.tensor([5, 0, 2]))
    conversation.feed(3, 2)


def test_reset_allows_another_batch(pair):
    cache = PagedCache(pair.config, 3, 64)
    for batch_size in (3, 1, 2):
        conversation = Conversation(pair, cache)
        conversation.feed(batch_size, 25, left_padding(batch_size, 25))
        conversation.feed(batch_size, 2)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_a_copy_goes_its_own_way(pair):
    """One prompt, several continuations: the recipe of transformers with ``copy.deepcopy(prompt_cache)``."""
    conversation = talk(pair)
    conversation.feed(2, 20)
    other = Conversation(pair, copy.deepcopy(conversation.cache), conversation.ids, conversation.mask, step=5)
    for length in (1, 3):
        conversation.feed(2, length)
        other.feed(2, length)
    assert other.cache.pool.page_table.data_ptr() != conversation.cache.pool.page_table.data_ptr()


def test_two_caches_with_one_model(pair):
    first, second = talk(pair), talk(pair, max_cache_len=64)
    first.feed(2, 20)
    second.feed(1, 30)
    first.feed(2, 1)
    second.feed(1, 1)


def test_pools_keep_their_addresses(pair):
    conversation = talk(pair, device="cpu", dtype=torch.float32)
    cache = conversation.cache
    pools = [t.data_ptr() for layer in cache.pool.layers for t in layer.tensors()]
    conversation.feed(2, 20)
    cache.reorder_cache(torch.tensor([1, 0]))
    conversation.crop(3)
    cache.reset()
    assert [t.data_ptr() for layer in cache.pool.layers for t in layer.tensors()] == pools


def test_sizes_and_layers(pair):
    cache = PagedCache(pair.config, 3, 100, device="cpu", dtype=torch.bfloat16)
    assert len(cache) == 3 and cache.get_max_length() == 100 and cache.is_compileable
    shared = [c.index_shared for c in cache.layer_configs]
    assert [p.index_keys is None for p in cache.pool.layers] == shared
    assert cache.pool.layers[0].latents.shape == (6, 64, 32 + 8)  # two pages for 100 tokens, latent 32 and rope 8
    assert cache.pool.layers[0].index_keys.shape == (6, 64, 32)
    assert {t.dtype for layer in cache.pool.layers for t in layer.tensors()} == {torch.bfloat16}


@needs("dots3_note_text")
def test_windows_count_columns_of_padding_too(all_pairs):
    """Padding between tokens takes columns of a window, as in transformers, though it takes no place in the pages."""
    conversation = talk(all_pairs["dots3_note_text"])
    gaps = left_padding(3, 9)
    for length, mask in ((20, left_padding(3, 20)), (9, gaps), (1, None), (9, gaps.flip(1)), (1, None), (30, None)):
        conversation.feed(3, length, mask)


@needs("dots3_note_text")
def test_a_first_layer_with_a_window_is_refused():
    config = tiny_config("dots3_note_text", num_hidden_layers=2, layer_types=["sliding_attention", "indexed_attention"])
    with pytest.raises(ValueError, match=r"layer_types\[0\]='sliding_attention'; the first layer must be indexed"):
        PagedCache(config, 2, 32)


def test_a_cache_of_one_column(pair):
    conversation = talk(pair, max_batch_size=1, max_cache_len=1)
    conversation.feed(1, 1)
    with pytest.raises(ValueError, match="max_cache_len=1"):
        conversation.feed(1, 1)


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def test_fp8_pools_have_the_fp8_layout(pair):
    cache = PagedCache(pair.config, 2, 64, latent_dtype=FP8, index_dtype=FP8, device="cpu", dtype=torch.float32)
    assert cache.pool.layers[0].latents.shape == (2, 64, 32 + 4 + 16)
    assert cache.pool.layers[0].index_keys.shape == (2, 64 * 32 + 256)


@pytest.mark.parametrize("index_topk", [16, 64], ids=["sparse", "everything selected"])
@pytest.mark.parametrize("dtypes", [(FP8, None), (None, FP8), (FP8, FP8)], ids=["latents", "index", "both"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_fp8_stays_close(model_type, dtypes, index_topk):
    """e4m3 has 3 mantissa bits: relative rounding errors up to 2^-4, 2^-4/sqrt(3) rms, in each of 3 layers. Where the
    choice is free, keys of nearly equal scores change places besides."""
    latent_dtype, index_dtype = dtypes
    pair = make_pair(model_type, index_topk=index_topk, first_k_dense_replace=3)  # a router's choices would flip
    ids = prompt(2, 60)
    with torch.no_grad():
        want = pair.stock(ids, use_cache=False).logits
        cache = PagedCache(pair.config, 2, 64, latent_dtype=latent_dtype, index_dtype=index_dtype)
        got = torch.cat([pair.ours(part, past_key_values=cache).logits for part in ids.split([40, 5, 1, 14], 1)], 1)
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).mean()
    all_selected = error[:, :index_topk].mean()
    if latent_dtype is None:
        assert all_selected < 1e-5
    else:
        assert 1e-4 < all_selected < 3**0.5 * 2**-4
    if index_topk == 16:
        assert 1e-4 < error[:, 16:].mean() < 0.3


def test_fp8_generates(pair):
    options = {"do_sample": False, "max_new_tokens": 6, "num_beams": 2}
    cache = PagedCache(pair.config, 4, 64, latent_dtype=FP8, index_dtype=FP8)
    got = pair.ours.generate(prompt(2, 24), past_key_values=cache, **options)
    assert got.shape == (2, 30)
    assert torch.equal(pair.ours.generate(prompt(2, 24), past_key_values=_reset(cache), **options), got)


def _reset(cache: PagedCache) -> PagedCache:
    cache.reset()
    return cache

"""Options of replace_attention: what no checkpoint decides reaches every layer and its indexer."""

import copy

import pytest
import torch

from compiled_dsa import DSAConfig, compile_model
from compiled_dsa.config import OPTIONS
from compiled_dsa.huggingface import PagedCache, capture_indices, replace_attention
from tests.huggingface.tiny_models import make_pair, prompt, tiny_config, tiny_model

GIVEN = {"deterministic": True, "scratch_bytes": 1 << 20, "index_init_tokens": 2, "index_local_tokens": 3}


def configs(model) -> list[DSAConfig]:
    """Of every layer and every indexer."""
    return [part.dsa_config for layer in model.dsa_layers for part in (layer, layer.indexer) if part is not None]


def test_every_layer_and_indexer_gets_them():
    stock = tiny_model("glm_moe_dsa")
    plain = [DSAConfig.from_hf(stock.config, i) for i in range(3)]
    model = replace_attention(stock, **GIVEN)
    assert len(configs(model)) == 5  # the second layer has no indexer
    assert all({name: getattr(c, name) for name in OPTIONS} == GIVEN for c in configs(model))
    defaults = {name: getattr(plain[0], name) for name in OPTIONS}
    assert [layer.dsa_config.with_options(**defaults) for layer in model.dsa_layers] == plain


def test_without_options_the_config_decides():
    model = replace_attention(tiny_model("deepseek_v32", index_init_tokens=4), scratch_bytes=1 << 20)
    assert {(c.index_init_tokens, c.scratch_bytes, c.deterministic) for c in configs(model)} == {(4, 1 << 20, False)}


def test_later_calls_change_what_they_name():
    """Also of the layers of a part that was replaced before, and of a copy."""
    model = tiny_model("deepseek_v32")
    replace_attention(model.model, deterministic=True, scratch_bytes=1 << 20)
    replace_attention(model, scratch_bytes=1 << 21)
    assert {(c.deterministic, c.scratch_bytes) for c in configs(model)} == {(True, 1 << 21)}
    twin = replace_attention(copy.deepcopy(model), deterministic=False)
    assert {(c.deterministic, c.scratch_bytes) for c in configs(twin)} == {(False, 1 << 21)}
    assert {c.deterministic for c in configs(model)} == {True}
    replace_attention(model)
    assert {(c.deterministic, c.scratch_bytes) for c in configs(model)} == {(True, 1 << 21)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_topk": 4}, "index_topk=4 is no option; there are deterministic, scratch_bytes, index_init_tokens"),
        ({"determinstic": True}, "determinstic=True is no option"),
        ({"deterministic": 1}, "deterministic=1; it must be True or False"),
        ({"scratch_bytes": 0}, "scratch_bytes=0; it must be an integer of at least 1"),
        ({"scratch_bytes": 1e9}, "scratch_bytes=1000000000.0; it must be an integer"),
        ({"index_init_tokens": True}, "index_init_tokens=True; it must be an integer of at least 0"),
        ({"index_local_tokens": -1}, "index_local_tokens=-1; it must be an integer of at least 0"),
        ({"index_init_tokens": 9, "index_local_tokens": 8}, "init_tokens=9, local_tokens=8; .* 16 are selected"),
    ],
)
@pytest.mark.parametrize("replaced", [False, True], ids=["stock", "replaced"])
def test_others_are_refused_and_change_nothing(options, message, replaced):
    model = tiny_model("deepseek_v32")
    if replaced:
        before = configs(replace_attention(model))
    with pytest.raises(ValueError, match=message):
        replace_attention(model, **{"scratch_bytes": 1 << 20, **options})
    assert configs(model) == before if replaced else not hasattr(model, "dsa_stats")


def test_options_of_a_compiled_model_are_refused():
    model = compile_model(replace_attention(tiny_model("deepseek_v32")), backend="eager")
    assert replace_attention(model) is model
    with pytest.raises(ValueError, match="the model is compiled; deterministic must be given before compile_model"):
        replace_attention(model, deterministic=True)


@pytest.mark.parametrize("paged", [False, True], ids=["no cache", "paged"])
def test_forced_tokens_are_selected(paged):
    model = replace_attention(tiny_model("deepseek_v32"), index_init_tokens=2, index_local_tokens=3)
    cache = {"past_key_values": PagedCache(model.config, 1, 64)} if paged else {"use_cache": False}
    with torch.no_grad(), capture_indices(model) as captured:
        model(prompt(1, 40), **cache)
    for rows in captured[0].values():
        for row, positions in enumerate(rows):
            kept = {0, 1, *range(row - 2, row + 1)} & set(range(row + 1))
            assert kept <= set(positions.tolist())


def test_a_small_budget_gives_the_same_logits_and_too_small_a_one_is_refused():
    pair = make_pair("deepseek_v32")
    with torch.no_grad():
        want = pair.ours(prompt(1, 40)).logits
        small = replace_attention(pair.ours, scratch_bytes=1 << 16)
        torch.testing.assert_close(small(prompt(1, 40)).logits, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="scratch_bytes=1; one row"):
            replace_attention(small, scratch_bytes=1)(prompt(1, 40))


def test_configs_of_ones_own():
    config = DSAConfig.from_hf(tiny_config("deepseek_v32"))
    assert config.with_options() == config
    assert config.with_options(deterministic=True).deterministic and not config.deterministic

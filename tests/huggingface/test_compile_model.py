"""compile_model: one graph a variant of a step, none per length, and the tokens of the stock model."""

import copy

import pytest
import torch

from compiled_dsa import compile_model
from compiled_dsa.compile import GraphMissError
from compiled_dsa.custom_ops import Op
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
    """Prefill and decode compile once each, with scores and (below index_topk) without; other lengths, beams and chunks
    never."""
    pair = compiled_pair("glm_moe_dsa")
    cache = PagedCache(pair.config, 6, 128)
    assert generate(pair, cache, 2, 24) == 2  # many tokens a row, and one
    assert generate(pair, cache, 2, 37) == 0
    assert generate(pair, cache, 2, 100) == 0
    assert generate(pair, cache, 2, 10, new=INDEX_TOPK - 10) == 2  # the same without scores
    assert generate(pair, cache, 2, 12, new=20) == 0  # from one to the other
    assert generate(pair, cache, 3, 50) == 0  # another batch size
    assert generate(pair, PagedCache(pair.config, 6, 128), 2, 31) == 0  # another cache of that size
    for length in range(100, 111):
        assert generate(pair, cache, 2, length, new=2) == 0
    for length, options in ((24, {"num_beams": 3}), (70, {"num_beams": 3}), (60, {"prefill_chunk_size": 25})):
        assert generate(pair, cache, 2, length, **options) == 0
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graphs": "fast"}, "graphs='fast'; it must be one of off, auto, full, breakable, piecewise"),
        ({"graphs": "full"}, "graphs='full'; CUDA graphs need a model on a GPU"),
        ({"graphs": "breakable"}, "graphs='breakable'; CUDA graphs need a model on a GPU"),
        ({"token_sizes": (0, 16)}, r"token_sizes=\(0, 16\); it must be integers of at least 1"),
        ({"batch_sizes": ()}, r"batch_sizes=\(\); it must be"),
        ({"token_sizes": (True,)}, r"token_sizes=\(True,\); it must be integers"),
        ({"token_sizes": 16}, "token_sizes=16; it must be integers"),
        ({"batch_sizes": ("a", 1)}, r"batch_sizes=\('a', 1\); it must be integers"),
        ({"max_cache_len": 0}, "max_cache_len=0; it must be an integer of at least 1 or None"),
        ({"max_cache_len": 5.5}, "max_cache_len=5.5; it must be an integer"),
        ({"max_cache_len": True}, "max_cache_len=True; it must be an integer"),
        ({"max_cache_len": "5"}, "max_cache_len='5'; it must be an integer"),
        ({"on_miss": "ignore"}, "on_miss='ignore'; it must be one of warn, raise"),
        ({"pack": "yes"}, "pack='yes'; it must be True or False"),
    ],
)
def test_bad_arguments(pairs, arguments, message):
    model = pairs["axk2"].ours
    with pytest.raises(ValueError, match=message):
        compile_model(model, **arguments)
    assert not hasattr(model, "graph_stats")


def test_a_function_is_no_model():
    with pytest.raises(ValueError, match="model=<built-in.*it must be a torch.nn.Module"):
        compile_model(torch.relu)


def test_a_model_is_compiled_once(pairs):
    model = copy.deepcopy(pairs["axk2"].ours)
    compile_model(model, backend="eager")
    assert model.graph_stats()["compiles"] == 0
    with pytest.raises(ValueError, match="model is compiled already"):
        compile_model(model)


class Scale(torch.nn.Module):
    def forward(self, x, negative=False):
        return -x if negative else 2 * x


@pytest.mark.parametrize("on_miss", ["warn", "raise"])
def test_compiles_after_the_warm_up_warn_once_or_raise(on_miss):
    model = compile_model(Scale(), backend="eager", on_miss=on_miss)
    x = torch.ones(3)
    with torch.no_grad():
        model(x)
        model.end_warm_up()
        model(x)
        assert model.graph_stats()["recompiles"] == 0
        if on_miss == "raise":
            with pytest.raises(GraphMissError, match="compiled after the warm-up"):
                model(x, negative=True)
            model(x)
        else:
            with pytest.warns(UserWarning, match="compiled after the warm-up"):
                model(x, negative=True)
            assert model.graph_stats()["recompiles"] == 1


def test_piecewise_cuts_at_the_split_ops_and_gives_the_same_tokens():
    pair = small_pair("glm_moe_dsa")
    compile_model(pair.ours, graphs="piecewise", backend="eager")
    ids = prompt(2, 24)
    cache = PagedCache(pair.config, 2, 64)
    got = pair.ours.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, pair.stock.generate(ids, max_new_tokens=4, do_sample=False))
    stats = pair.ours.graph_stats()
    # prefill: one of two layers selects, both attend: three cuts; decode has none
    assert (stats["graphs"], stats["compiles"], stats["pieces"]) == ("piecewise", 2, 4 + 1)


def test_a_forward_that_fails_half_way_is_forgotten(monkeypatch):
    pair = compiled_pair("deepseek_v32")
    ids, cache = prompt(2, 40), PagedCache(pair.config, 2, 64)
    check = Op.check_all

    def failing(op, *args):
        if op.name == "mla_prefill":
            raise torch.OutOfMemoryError("no scratch")
        check(op, *args)

    with torch.no_grad():
        pair.ours(ids[:, :20], past_key_values=cache)
        monkeypatch.setattr(Op, "check_all", failing)
        with pytest.raises(torch.OutOfMemoryError):
            pair.ours(ids[:, 20:], past_key_values=cache)
        monkeypatch.undo()
        assert cache.get_seq_length() == 20
        got = pair.ours(ids[:, 20:], past_key_values=cache).logits
        torch.testing.assert_close(got, pair.stock(ids).logits[:, 20:], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == int(cache.columns_on_device()) == 40

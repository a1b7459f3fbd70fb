"""Selections handed out of forwards and taken in by others."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import compiled_dsa
from compiled_dsa.huggingface import PagedCache, capture_indices, inject_indices
from compiled_dsa.huggingface.attention import DSAAttentionMixin
from tests.huggingface.tiny_models import CACHES, INDEX_TOPK, left_padding, needs, prompt, small_pair, tiny_model


def scrambled(model):
    """A copy whose indexers select otherwise."""
    other = copy.deepcopy(model)
    torch.manual_seed(9)
    for layer in other.modules():
        if isinstance(layer, DSAAttentionMixin) and layer.indexer is not None:
            for parameter in layer.indexer.parameters():
                torch.nn.init.normal_(parameter)
    return other


def forwards(pair, model, kind: str, steps=(40, 1, 3), mask=None) -> list[torch.Tensor]:
    """Logits of a conversation over a fresh cache; without a cache, of the first step alone."""
    ids, held, out = prompt(2, sum(steps)), 0, []
    cache = {}
    if kind != "none":
        cache["past_key_values"] = {
            "paged": lambda: PagedCache(pair.config, 2, sum(steps)),
            "dynamic": lambda: DynamicCache(config=pair.config),
            "static": lambda: StaticCache(config=pair.config, max_cache_len=sum(steps)),
        }[kind]()
    with torch.no_grad():
        for n in steps[:1] if kind == "none" else steps:
            more = {} if mask is None else {"attention_mask": mask[:, : held + n]}
            out.append(model(ids[:, held : held + n], **more, **cache).logits)
            held += n
    return out


def check(captured, layers, steps=(40, 1, 3), pads=0):
    for selection, n in zip(captured, steps, strict=True):
        assert selection.keys() == layers
        for positions in selection.values():
            assert positions.shape == (2 * n, INDEX_TOPK) and positions.dtype == torch.int32
    first = next(iter(captured[0].values())).view(2, steps[0], INDEX_TOPK)
    for column in (3, 12, steps[0] - 1):
        for row, padding in ((0, pads), (1, 0)):
            chosen, seen = first[row, column], max(0, column + 1 - padding)
            assert (chosen >= 0).sum() == min(seen, INDEX_TOPK) and chosen.max() < max(seen, 0)
            assert chosen[chosen >= 0].unique().numel() == min(seen, INDEX_TOPK)


@pytest.mark.parametrize("kind", CACHES)
def test_round_trip(pair, kind):
    """A model whose indexers are noise attends what the first one attended: the same logits, bit for bit."""
    steps = (40,) if kind == "none" else (40, 1, 3)
    with capture_indices(pair.ours) as captured:
        want = forwards(pair, pair.ours, kind)
    layers = {m.layer_idx for m in pair.ours.modules() if isinstance(m, DSAAttentionMixin) and m.indexer is not None}
    check(captured, layers, steps)
    other = scrambled(pair.ours)
    assert not torch.equal(forwards(pair, other, kind)[0], want[0])
    with inject_indices(other, captured):
        again = forwards(pair, other, kind)
    assert all(map(torch.equal, again, want))
    assert all(map(torch.equal, forwards(pair, pair.ours, kind), want))  # neither leaves anything behind


def test_positions_do_not_count_padding(pair):
    """One selection serves caches of all kinds."""
    mask = left_padding(2, 44)
    pads = int((mask[0, :40] == 0).sum())
    captured = {}
    for kind in ("paged", "dynamic"):
        with capture_indices(pair.ours) as captured[kind]:
            forwards(pair, pair.ours, kind, mask=mask)
    assert pads > 0
    check(captured["dynamic"], captured["dynamic"][0].keys(), pads=pads)
    for one, other in zip(captured["paged"], captured["dynamic"], strict=True):
        for layer in one:
            assert torch.equal(one[layer].sort().values, other[layer].sort().values)
    want = forwards(pair, pair.ours, "paged", mask=mask)
    other = scrambled(pair.ours)
    with inject_indices(other, captured["dynamic"]):
        again = forwards(pair, other, "paged", mask=mask)
    real = mask[:, :40].bool()
    torch.testing.assert_close(again[0][real], want[0][real], rtol=1e-4, atol=1e-5)


def test_steps_without_scores(pair):
    """Where all is selected, positions are handed out all the same; taken in, they give the same up to rounding."""
    with capture_indices(pair.ours) as captured:
        want = forwards(pair, pair.ours, "paged", (9, 1))
    for positions in captured[1].values():
        assert torch.equal(positions, torch.tensor([*range(10)] + [-1] * 6).int().expand(2, -1))
    with inject_indices(pair.ours, captured):
        again = forwards(pair, pair.ours, "paged", (9, 1))
    for ours, wanted in zip(again, want):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_capture_of_a_compiled_model(fresh_dynamo):
    """The same selections as eager; each variant of the code is compiled once more, and once only."""
    pair, steps = small_pair("glm_moe_dsa"), (40, 1)
    with capture_indices(pair.ours) as want:
        forwards(pair, pair.ours, "paged", steps)
    compiled = compiled_dsa.compile_model(copy.deepcopy(pair.ours), graphs="off", backend="aot_eager")
    forwards(pair, compiled, "paged", steps)
    before = compiled.graph_stats()["compiles"]
    for _ in range(2):
        with capture_indices(compiled) as captured:
            forwards(pair, compiled, "paged", steps)
        for one, other in zip(captured, want, strict=True):
            assert one.keys() == other.keys()
            for layer in one:
                assert torch.equal(one[layer].sort().values, other[layer].sort().values)
        forwards(pair, compiled, "paged", steps)
    assert compiled.graph_stats()["compiles"] == 2 * before


def test_generate(pair):
    with capture_indices(pair.ours) as captured:
        pair.ours.generate(
            prompt(2, 24), past_key_values=PagedCache(pair.config, 2, 32), max_new_tokens=4, do_sample=False
        )
    check(captured, captured[0].keys(), (24, 1, 1, 1))


@needs("dots3_note_text")
def test_layers_with_a_window_take_no_part(all_pairs):
    pair = all_pairs["dots3_note_text"]
    for kind in ("paged", "dynamic"):
        with capture_indices(pair.ours) as captured:
            want = forwards(pair, pair.ours, kind)
        other = scrambled(pair.ours)
        with inject_indices(other, captured):
            assert all(map(torch.equal, forwards(pair, other, kind), want))


def test_wrong_calls(pairs):
    model, ids = pairs["glm_moe_dsa"].ours, prompt(2, 20)
    with (
        pytest.raises(ValueError, match="without our attention; call replace_attention first"),
        capture_indices(tiny_model("glm_moe_dsa")),
    ):
        pass
    with capture_indices(model) as captured:
        with pytest.raises(ValueError, match="gradients: .* neither hands out nor takes in what is selected; call the"):
            model(ids)
        with pytest.raises(ValueError, match="is active on this model already"), inject_indices(model, captured):
            pass
        with torch.no_grad():
            model(ids)
    assert len(captured) == 1
    wrong = r"selections\[0\] has layers \[0\]; those with an indexer are \[0, 2\]"
    with pytest.raises(ValueError, match=wrong), inject_indices(model, [{0: captured[0][0]}]):
        pass
    with torch.no_grad(), inject_indices(model, captured):
        with pytest.raises(ValueError, match=r"selected has shape \(40, 16\); it must be \[38, n\]"):
            model(ids[:, 1:])
        with pytest.raises(ValueError, match="selections has 1 entries; this is one forward more"):
            model(ids)


def test_models_in_graphs_are_refused(pairs, monkeypatch):
    model = compiled_dsa.compile_model(copy.deepcopy(pairs["axk2"].ours), graphs="off", backend="eager")
    with pytest.raises(ValueError, match="inject_indices takes models that are not"), inject_indices(model, []):
        pass
    monkeypatch.setattr(model, "graph_stats", lambda: {"graphs": "breakable"})
    with pytest.raises(ValueError, match="graphs='breakable'; capture_indices needs"), capture_indices(model):
        pass

"""Calls that the ops cannot serve run transformers' own forward, with its results, and are counted by reason."""

import copy
from collections import Counter

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from compiled_dsa.huggingface import PagedCache
from tests.huggingface.tiny_models import left_padding, make_pair, prompt, small_pair

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
holds_latents = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="the stock forward caches expanded keys before 5.23"
)


def layers_of(pair) -> nn.ModuleList:
    return pair.ours.get_decoder().layers


def loss_of(model, ids, **kwargs) -> torch.Tensor:
    return model(ids, labels=ids, **kwargs).loss


def assert_same_gradients(stock: nn.Module, ours: nn.Module) -> None:
    gradients = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        want = gradients[name].grad
        assert (parameter.grad is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(parameter.grad, want, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_training_step(any_fresh_pair, masked):
    ids = prompt(2, 24)
    mask = left_padding(2, 24) if masked else None
    losses = []
    for model in (any_fresh_pair.stock, any_fresh_pair.ours):
        model.train()
        loss = loss_of(model, ids, attention_mask=mask)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, **CLOSE)
    assert_same_gradients(any_fresh_pair.stock, any_fresh_pair.ours)
    assert any_fresh_pair.ours.dsa_stats.stock_calls == {"gradients": len(layers_of(any_fresh_pair))}
    assert any_fresh_pair.ours.dsa_stats.calls == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(fresh_pair, use_reentrant):
    for model in (fresh_pair.stock, fresh_pair.ours):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        loss_of(model, prompt(2, 24), use_cache=False).backward()
    assert_same_gradients(fresh_pair.stock, fresh_pair.ours)
    assert fresh_pair.ours.dsa_stats.stock_calls["gradients"] >= 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_of_a_frozen_input(fresh_pair, use_reentrant):
    """Without ``enable_input_require_grads`` the reentrant kind gives no gradients: as stock, not an error of ours."""
    for model in (fresh_pair.stock, fresh_pair.ours):
        model.train().requires_grad_(False)
        model.model.layers[2].self_attn.o_proj.weight.requires_grad_(True)
        model.lm_head.weight.requires_grad_(True)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss_of(model, prompt(2, 24), use_cache=False).backward()
    assert_same_gradients(fresh_pair.stock, fresh_pair.ours)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointed", "checkpointed-reentrant"])
@pytest.mark.parametrize("trained", ["layers.1.self_attn.q_a_proj", "layers.2.self_attn.q_a_proj", "layers.0.mlp"])
def test_partial_training(fresh_pair, trained, checkpointing):
    """Only some parameters are trained, as with LoRA; layers below them run on the ops.

    GLM's layer 1 takes the selection of layer 0, which may have run on the ops while layer 1 runs the stock forward.
    """
    for model in (fresh_pair.stock, fresh_pair.ours):
        model.train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        loss_of(model, prompt(2, 24), attention_mask=left_padding(2, 24)).backward()
    assert_same_gradients(fresh_pair.stock, fresh_pair.ours)
    if checkpointing is None:
        stats, below = fresh_pair.ours.dsa_stats, {"1": 1, "2": 2, "0": 1}[trained.split(".")[1]]
        assert stats.calls == below and stats.stock_calls == {"gradients": 3 - below}


def test_shared_layer_after_a_trained_one():
    """The trained layer's stock forward chooses, the shared layer after it runs the stock forward too."""
    pair = make_pair("glm_moe_dsa", num_hidden_layers=4, indexer_types=["full", "full", "shared", "shared"])
    for model in (pair.stock, pair.ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1.self_attn.q_a_proj" in name)
        loss_of(model, prompt(2, 24)).backward()
    assert_same_gradients(pair.stock, pair.ours)
    assert pair.ours.dsa_stats.calls == 1 and pair.ours.dsa_stats.stock_calls == {"gradients": 3}


def test_generating_between_training_steps(fresh_pair):
    """A model in training mode, without dropout, generates on the ops under no_grad."""
    model = fresh_pair.ours.train()
    options = {"do_sample": False, "max_new_tokens": 4}
    cache = PagedCache(model.config, 2, 32)
    got = model.generate(prompt(2, 24), past_key_values=cache, **options)
    assert torch.equal(got, fresh_pair.stock.generate(prompt(2, 24), **options))
    assert model.dsa_stats.calls == 12 and not model.dsa_stats.stock_calls


def causal(B: int, S: int) -> torch.Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S)


def window_mask(B: int, S: int) -> torch.Tensor:
    """A mask that no column mask can say: each query sees the 20 latest keys."""
    return causal(B, S) & torch.ones(S, S, dtype=torch.bool).triu(-19)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("use_cache", [False, True], ids=["no-cache", "dynamic"])
def test_four_dimensional_masks(fresh_pair, form, use_cache):
    mask = window_mask(2, 30)
    if form == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want, got = (
            m(prompt(2, 30), attention_mask=mask, use_cache=use_cache).logits
            for m in (fresh_pair.stock, fresh_pair.ours)
        )
        plain = fresh_pair.ours(prompt(2, 30)).logits
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got - plain).abs().max() > 1e-2
    assert fresh_pair.ours.dsa_stats.stock_calls == {"mask": 3}


def packed_positions() -> torch.Tensor:
    return torch.cat([torch.arange(22), torch.arange(18)]).unsqueeze(0)


def test_packed_sequences(fresh_pair):
    ids = prompt(1, 40)
    with torch.no_grad():
        got = fresh_pair.ours(ids, position_ids=packed_positions(), use_cache=False).logits
        want = fresh_pair.stock(ids, position_ids=packed_positions(), use_cache=False).logits
        apart = torch.cat([fresh_pair.stock(part, use_cache=False).logits for part in (ids[:, :22], ids[:, 22:])], 1)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(got, apart, rtol=1e-3, atol=1e-4)
    assert fresh_pair.ours.dsa_stats.stock_calls == {"mask": 3}


@pytest.mark.usefixtures("fresh_dynamo")
def test_packed_sequences_compiled():
    """Compiled, transformers cannot look at the values of position_ids: every call without cache is taken as packed."""
    pair = small_pair("glm_moe_dsa")
    compiled = torch.compile(pair.ours.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        got = compiled(prompt(1, 40), position_ids=packed_positions(), use_cache=False).logits
        want = pair.stock(prompt(1, 40), position_ids=packed_positions(), use_cache=False).logits
    torch.testing.assert_close(got, want, **CLOSE)
    assert set(pair.ours.dsa_stats.traced_stock) == {"mask"} and pair.ours.dsa_stats.traced == 0


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_attention_weights(any_fresh_pair, masked):
    """Weights are those of the stock eager implementation, the only one of transformers that has any."""
    mask = left_padding(2, 24) if masked else None
    stock = copy.deepcopy(any_fresh_pair.stock)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        want = stock(prompt(2, 24), attention_mask=mask, output_attentions=True)
        got = any_fresh_pair.ours(prompt(2, 24), attention_mask=mask, output_attentions=True)
    assert len(got.attentions) == len(layers_of(any_fresh_pair))
    real = torch.ones(2, 24, dtype=torch.bool) if mask is None else mask.bool()
    for ours, theirs in zip(got.attentions, want.attentions):
        rows = real[:, None, :].expand(
            -1, ours.shape[1], -1
        )  # padding queries see nothing, and give what a softmax makes of that
        torch.testing.assert_close(ours[rows], theirs[rows], **CLOSE)
    torch.testing.assert_close(got.logits[real], want.logits[real], **CLOSE)
    assert any_fresh_pair.ours.dsa_stats.stock_calls == {"attentions": len(layers_of(any_fresh_pair))}


def test_attention_dropout(pairs):
    for model_type in pairs:
        pair = make_pair(model_type, attention_dropout=0.5)
        with torch.no_grad():
            outputs = []
            for model in (pair.stock, pair.ours):
                model.train()
                torch.manual_seed(11)
                outputs.append(model(prompt(2, 24)).logits)
            torch.testing.assert_close(*outputs, **CLOSE)
            assert pair.ours.dsa_stats.stock_calls == {"dropout": 3}
            torch.testing.assert_close(pair.ours.eval()(prompt(2, 24)).logits, pair.stock.eval()(prompt(2, 24)).logits)
        assert pair.ours.dsa_stats.calls == 3


@pytest.mark.parametrize("use_cache", [False, True], ids=["no-cache", "dynamic"])
def test_autocast(fresh_pair, use_cache):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = (m(prompt(2, 24), use_cache=use_cache).logits for m in (fresh_pair.stock, fresh_pair.ours))
        with pytest.raises(ValueError, match="autocast: .* convert the model instead"):
            fresh_pair.ours(prompt(2, 24), past_key_values=PagedCache(fresh_pair.config, 2, 32))
    assert torch.equal(got, want)
    assert fresh_pair.ours.dsa_stats.stock_calls == {"autocast": 3}


@holds_latents
def test_ops_and_stock_forward_share_a_stock_cache(any_fresh_pair):
    """Steps that ran on the ops and steps that ran the stock forward read each other's keys: same content and order."""
    ids = prompt(2, 36)
    with torch.no_grad():
        want = any_fresh_pair.stock(ids, use_cache=False).logits
        cache, got = None, []
        for first, last, weights in ((0, 20, False), (20, 26, True), (26, 27, False), (27, 30, True), (30, 36, False)):
            out = any_fresh_pair.ours(ids[:, first:last], past_key_values=cache, output_attentions=weights)
            cache, _ = out.past_key_values, got.append(out.logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
    stats = any_fresh_pair.ours.dsa_stats
    layers = layers_of(any_fresh_pair)
    windows = sum(layer.self_attn.dsa_config.window is not None for layer in layers)
    assert stats.calls == 3 * (len(layers) - windows)
    assert stats.stock_calls == Counter(attentions=2 * len(layers), window=3 * windows)


@holds_latents
def test_a_stock_cache_holds_what_the_stock_model_puts_there(any_fresh_pair):
    ids, mask = prompt(2, 24), left_padding(2, 24)
    with torch.no_grad():
        ours, stock = (m(ids, attention_mask=mask).past_key_values for m in (any_fresh_pair.ours, any_fresh_pair.stock))
    real = mask.bool()
    for a, b in zip(ours.layers, stock.layers):
        if not hasattr(b, "indexer_keys"):  # a window, filled by transformers' own forward, or no cache of its own
            continue
        assert (a.keys is None) == (b.keys is None) and (a.indexer_keys is None) == (b.indexer_keys is None)
        for mine, theirs in ((a.keys, b.keys), (a.values, b.values)):
            if theirs is not None:
                torch.testing.assert_close(mine[:, 0][real], theirs[:, 0][real], **CLOSE)
        if b.indexer_keys is not None:
            torch.testing.assert_close(a.indexer_keys[real], b.indexer_keys[real], **CLOSE)


def late_window_mask(held: int) -> torch.Tensor:
    return window_mask(2, held + 24)[:, :, held:]


REFUSED = {
    "gradients": (lambda held: {}, "call the model under torch.no_grad"),
    "dropout": (lambda held: {}, "call model.eval"),
    "mask": (lambda held: {"attention_mask": late_window_mask(held)}, "pass a 2D attention_mask"),
    "float mask": (lambda held: {"attention_mask": late_window_mask(held).float()}, "pass a 2D attention_mask"),
    "attentions": (lambda held: {"output_attentions": True}, "do not ask for output_attentions"),
    "packed": (lambda held: {"position_ids": torch.arange(24).remainder(12).expand(2, -1)}, "without a cache"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("held", [0, 20], ids=["empty", "held"])
def test_paged_cache_refuses_before_anything_is_written(fresh_pair, reason, held):
    arguments, message = REFUSED[reason]
    model, cache = fresh_pair.ours, PagedCache(fresh_pair.config, 2, 64, device="cpu", dtype=torch.float32)
    first, ids = prompt(2, 20)[:, :held], prompt(2, 24, seed=2)
    with torch.no_grad():
        if held:
            model(first, past_key_values=cache)
    pools = [t.clone() for layer in cache.pool.layers for t in layer.tensors()]
    if reason == "dropout":
        model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    stats = copy.deepcopy(model.dsa_stats)
    with torch.set_grad_enabled(reason == "gradients"), pytest.raises(ValueError, match=message):
        model(ids, past_key_values=cache, **arguments(held))
    model.eval()
    assert cache.get_seq_length() == held and model.dsa_stats == stats
    assert all(map(torch.equal, pools, (t for layer in cache.pool.layers for t in layer.tensors())))
    with torch.no_grad():
        got = model(ids, past_key_values=cache).logits
        want = fresh_pair.stock(torch.cat([first, ids], 1), use_cache=False).logits[:, held:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [0, 2])
def test_paged_cache_refuses_gradients_of_any_layer(fresh_pair, layer):
    """Before the layers below the trained one have written."""
    cache = PagedCache(fresh_pair.config, 2, 64, device="cpu", dtype=torch.float32)
    for name, parameter in fresh_pair.ours.named_parameters():
        parameter.requires_grad_(f"layers.{layer}.self_attn.q_a_proj" in name)
    with pytest.raises(ValueError, match="gradients: .* torch.no_grad"):
        fresh_pair.ours(prompt(2, 24), past_key_values=cache)
    assert cache.get_seq_length() == 0 and not cache.pool.layers[0].latents.any()
    with torch.no_grad():
        got = fresh_pair.ours(prompt(2, 24), past_key_values=cache).logits
    torch.testing.assert_close(got, fresh_pair.stock(prompt(2, 24)).logits, rtol=1e-4, atol=1e-4)

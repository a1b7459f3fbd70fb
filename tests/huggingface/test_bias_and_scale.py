"""Biases of projections and the scale that yarn puts on logits, against the stock model."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from compiled_dsa.huggingface import replace_attention
from tests.huggingface.tiny_models import MODEL_TYPES, YARN, Pair, prompt, tiny_model


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_bias_and_yarn(model_type, cache):
    stock = tiny_model(model_type, attention_bias=True, rope_parameters=YARN)
    biases = [p for name, p in stock.named_parameters() if "self_attn" in name and name.endswith("proj.bias")]
    biases += [p for name, p in stock.named_parameters() if name.endswith("kv_a_proj_with_mqa.bias")]
    assert len(biases) == 3 * stock.config.num_hidden_layers
    for bias in biases:
        nn.init.normal_(bias, std=0.5)
    pair = Pair(stock, replace_attention(copy.deepcopy(stock)))
    plain = replace_attention(copy.deepcopy(stock))
    for layer in plain.dsa_layers:  # without the square of mscale
        assert layer.dsa_config.scale > 1.8 * layer.qk_head_dim**-0.5
        layer.dsa_config = dataclasses.replace(layer.dsa_config, scale=layer.qk_head_dim**-0.5)
    with torch.no_grad():
        want = stock(prompt(2, 100)).logits
        arguments = {"paged": pair.cache("paged", 2, 128), "dynamic": {}}[cache]
        torch.testing.assert_close(pair.ours(prompt(2, 100), **arguments).logits, want, rtol=1e-4, atol=1e-4)
        assert (plain(prompt(2, 100)).logits - want).abs().max() > 1e-2
    assert pair.ours.dsa_stats.calls and not pair.ours.dsa_stats.stock_calls

"""Activations given as (fp8, scales), and dequantised weights."""

import pytest
import torch

from compiled_dsa.batch import DECODE
from compiled_dsa.weights import FP8, dequantize_rows, dequantize_weight
from tests.modules.layers import Serving, our_layer, stock_layer


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [T, hidden] and a scale for every 128 values, the last of them fewer."""
    parts = x.float().split(128, 1)
    scales = torch.stack([part.abs().amax(1) / 448 for part in parts], 1)
    return torch.cat([part / s[:, None] for part, s in zip(parts, scales.unbind(1))], 1).to(FP8), scales


@pytest.mark.parametrize("hidden", [64, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs_of_activations(hidden, dtype):
    layer = our_layer(stock_layer("deepseek_v32", dtype, hidden_size=hidden))
    torch.manual_seed(0)
    values, scales = quantized(torch.randn(40, hidden))
    rows = dequantize_rows((values, scales), dtype)
    assert rows.dtype == dtype
    servings = [Serving.of([layer], [rows]) for _ in range(2)]
    for new, kind in ((30, None), (10, DECODE)):
        outputs = []
        for pair, serving in zip((True, False), servings):
            first = serving.held[0]
            x, cos, sin, batch = serving.inputs([new], **({} if kind is None else {"kind": kind}))
            if pair:
                x = (values[first : first + new], scales[first : first + new])
            with torch.no_grad():
                outputs.append(layer(x, cos, sin, batch, serving.pool.layers[0])[0])
        assert torch.equal(*outputs) and not outputs[0].isnan().any()


def test_keys_of_a_pair_of_activations():
    layer = our_layer(stock_layer("deepseek_v32", torch.float32))
    torch.manual_seed(0)
    pair = quantized(torch.randn(40, 64))
    servings = [Serving.of([layer], [dequantize_rows(pair, torch.float32)], poison=False) for _ in range(2)]
    for hidden_states, serving in zip((None, pair), servings):
        x, cos, sin, batch = serving.inputs([40])
        with torch.no_grad():
            layer.store_keys(x if hidden_states is None else hidden_states, cos, sin, batch, serving.pool.layers[0])
    for stored, of_pair in zip(*(serving.pool.layers[0].tensors() for serving in servings)):
        assert torch.equal(stored, of_pair) and stored.any()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((torch.zeros(3, 256), torch.ones(3, 2)), r"x\[0\] is torch.float32"),
        ((torch.zeros(3, 2, 128).to(FP8), torch.ones(3, 2)), r"x\[0\] .* of 3 dims"),
        ((torch.zeros(3, 256).to(FP8), torch.ones(3, 3)), r"x\[1\] has shape \(3, 3\); .* must be \(3, 2\)"),
        ((torch.zeros(3, 256).to(FP8),), "x has 1 tensors"),
    ],
)
def test_other_pairs_are_refused(pair, message):
    with pytest.raises(ValueError, match=message):
        dequantize_rows(pair, torch.float32)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu], ids=str)
def test_dequantized_weights(scale_dtype):
    torch.manual_seed(0)
    weight, scale = torch.randn(50, 300).to(FP8), torch.tensor([[0.5, 2.0, 4.0]]).to(scale_dtype)
    want = weight.float().clone()
    want[:, :128] *= 0.5
    want[:, 128:256] *= 2
    want[:, 256:] *= 4
    assert torch.equal(dequantize_weight(weight, scale, None, torch.float32), want)
    assert torch.equal(dequantize_weight(weight, torch.tensor(3.0), None, torch.float32), weight.float() * 3)
    with pytest.raises(ValueError, match=r"weight_scale_inv has shape \(1, 3\); weights \(50, 300\) in blocks of"):
        dequantize_weight(weight, scale, (32, 128), torch.float32)

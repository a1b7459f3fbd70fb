"""The two ops between a layer's GEMMs: the same results as its plain torch, used where the layer is of their kind."""

import copy
import dataclasses

import pytest
import torch

from compiled_dsa import SparseAttention, pack_projections, prologue
from compiled_dsa.batch import DECODE
from compiled_dsa.custom_ops.layout import FP8
from tests.huggingface.tiny_models import ALL_MODEL_TYPES, INDEX_TOPK
from tests.modules.layers import Serving, angles, our_layer, stock_layer, tiny_dsa_config

KNOWN = ("deepseek_v32", "glm_moe_dsa")


@pytest.fixture
def calls(monkeypatch):
    """Whether scores were wanted, of every call of the ops."""
    seen = []
    ops = prologue.store_and_encode

    def spy(*args, scores):
        seen.append(scores)
        return ops(*args, scores=scores)

    monkeypatch.setattr(prologue, "store_and_encode", spy)
    return seen


def make_layer(model_type: str, dtype=torch.float32, **sizes) -> SparseAttention:
    return our_layer(stock_layer(model_type, dtype, **sizes)).requires_grad_(False)


def serve(layer, latent_dtype=None, index_dtype=FP8, dtype=torch.float32):
    """Outputs and pools of a prefill without scores, one with them and padding, and a decode step."""
    x = torch.randn(40, layer.o_proj.weight.shape[0], generator=torch.Generator().manual_seed(3)).to(dtype)
    serving = Serving.of([layer], [x], latent_dtype, index_dtype)
    outputs = serving.step([INDEX_TOPK - 2], skip_scores=True)
    outputs += serving.step([20], padding=3) + serving.step([1], kind=DECODE)
    return outputs, [t.view(torch.uint8) for t in serving.pool.layers[0].tensors()]


@pytest.mark.parametrize("model_type", KNOWN)
@pytest.mark.parametrize("latent_dtype", [None, FP8])
@pytest.mark.parametrize("packed", [False, True])
def test_same_bits_as_plain_torch(model_type, latent_dtype, packed, calls, monkeypatch):
    layer = make_layer(model_type)
    if packed:
        pack_projections(layer)
    outputs, pools = serve(layer, latent_dtype)
    assert calls == [False, True, True]
    monkeypatch.setattr(prologue, "fuses", lambda *args: False)
    plain_outputs, plain_pools = serve(layer, latent_dtype)
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(pools, plain_pools, strict=True))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(outputs, plain_outputs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_plain_torch(dtype, calls, monkeypatch):
    """Ropes are rounded once instead of three times."""
    layer = make_layer("deepseek_v32", dtype)
    outputs, _ = serve(layer, FP8, dtype=dtype)
    assert len(calls) == 3
    monkeypatch.setattr(prologue, "fuses", lambda *args: False)
    for got, want in zip(outputs, serve(layer, FP8, dtype=dtype)[0], strict=True):
        real = got.isfinite().all(-1)
        assert (got[real] - want[real]).float().norm() < 0.05 * want[real].float().norm()


@pytest.mark.parametrize("model_type", [m for m in ALL_MODEL_TYPES if m not in KNOWN])
def test_other_kinds_of_layers_stay_plain_torch(model_type, calls):
    serve(make_layer(model_type))
    assert not calls


@pytest.mark.parametrize("index_dtype", [None, torch.float32])
def test_only_fp8_index_keys(index_dtype, calls):
    serve(make_layer("deepseek_v32"), index_dtype=index_dtype)
    assert not calls


@pytest.mark.parametrize("name", ["q_a_layernorm", "kv_a_layernorm"])
def test_hooks_on_norms_are_called(name, calls):
    layer = make_layer("deepseek_v32")
    seen = []
    layer.get_submodule(name).register_forward_hook(lambda *args: seen.append(name))
    serve(layer)
    assert len(seen) == 3 and not calls


def test_angles_that_a_layer_without_rope_ignores(calls):
    config = dataclasses.replace(tiny_dsa_config(), qk_rope_head_dim=0)
    layer = SparseAttention(config).requires_grad_(False)
    outputs = []
    for R in (0, 16):
        serving = Serving.of([layer], [torch.ones(20, config.hidden_size).cumsum(0) / 20], None, FP8)
        x, _, _, batch = serving.inputs([20])
        with torch.no_grad():
            outputs.append(layer(x, *angles(batch.positions, R, x.dtype), batch, serving.pool.layers[0])[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    assert len(calls) == 1


def test_output_weights_that_are_elsewhere_until_the_call(calls):
    """As accelerate offloads them: a parameter on meta, a wrapped forward. The selection hints at it and still runs."""
    layer = make_layer("deepseek_v32")
    want, _ = serve(layer)
    weight = layer.o_proj.weight
    layer.o_proj.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
    layer.o_proj.forward = lambda x: torch.nn.functional.linear(x, weight)
    got, _ = serve(layer)
    assert len(calls) == 6
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(got, want, strict=True))


def test_angles_that_lie_apart(calls):
    """One of every two columns: no kernel reads them so."""
    layer = make_layer("deepseek_v32")
    outputs = []
    for apart in (False, True):
        serving = Serving.of([layer], [torch.ones(20, 64).cumsum(0) / 20], None, FP8)
        x, cos, sin, batch = serving.inputs([20])
        if apart:
            cos = cos.repeat_interleave(2, 1)[:, ::2]
        with torch.no_grad():
            outputs.append(layer(x, cos, sin, batch, serving.pool.layers[0])[0])
    assert torch.equal(*outputs) and len(calls) == 1


def test_norms_of_another_kind_are_called(calls):
    class Doubled(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.norm = norm.weight, norm

        def forward(self, x):
            return 2 * self.norm(x)

    layer = make_layer("deepseek_v32")
    plain, _ = serve(layer)
    changed = copy.deepcopy(layer)
    changed.q_a_layernorm = Doubled(changed.q_a_layernorm)
    other, _ = serve(changed)
    assert len(calls) == 3
    assert not torch.equal(plain[0], other[0])

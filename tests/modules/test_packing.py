"""Packed projections of a layer: the same parameters and products from fewer GEMMs, and never from stale weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from compiled_dsa import SparseAttention, pack_projections, unpack_projections
from compiled_dsa.batch import DECODE
from compiled_dsa.custom_ops.layout import FP8
from tests.huggingface.tiny_models import ALL_MODEL_TYPES, INDEX_TOPK
from tests.modules.layers import Serving, our_layer, stock_layer

HIDDEN = ["q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj"]
QUERIES = ["q_b_proj", "wq_b"]
# of the first layer of each model: what its two GEMMs make
PACKED = {
    "deepseek_v32": {"hidden": HIDDEN, "q_lora": QUERIES},
    "glm_moe_dsa": {"hidden": HIDDEN, "q_lora": QUERIES},
    "axk2": {"hidden": HIDDEN},  # q_gate_proj reads more than q_lora
    "hy_v4": {"hidden": ["q_a_proj", "gate_proj", *HIDDEN[1:]], "q_lora": QUERIES},
    "dots3_note_text": {"hidden": ["q_a_proj", "g_proj", *HIDDEN[1:]], "q_lora": QUERIES},
    "mistral_large4_text": {"hidden": ["q_proj", *HIDDEN[1:]]},
}


def make_layer(model_type: str = "deepseek_v32", dtype=torch.float64, **sizes) -> SparseAttention:
    return our_layer(stock_layer(model_type, dtype, **sizes)).requires_grad_(False)


def packed(layer: SparseAttention) -> dict[str, list[str]]:
    return {group: list(pack.weights) for group, pack in (layer.packs or {}).items()}


def outputs(layer: SparseAttention, **options) -> list[torch.Tensor]:
    """A prefill without scores, one with them, and a decode step."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, layer.o_proj.weight.shape[0], generator=generator, dtype=torch.float64)
    serving = Serving.of([layer], [x.to(layer._dtype())], **options)
    first = serving.step([INDEX_TOPK - 2], skip_scores=True)
    return first + serving.step([20], padding=3) + serving.step([1], kind=DECODE)


def assert_close(got, want, tolerance: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.nan_to_num().abs().max().item(), equal_nan=True)


def assert_follows(layer: SparseAttention) -> None:
    """The layer computes with what its parameters hold now."""
    fresh = SparseAttention(layer.dsa_config, dtype=layer._dtype())
    fresh.load_state_dict(layer.state_dict())
    assert_close(outputs(layer), outputs(fresh), 1e-12 if layer._dtype() == torch.float64 else 1e-5)


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_outputs_and_state_dict(model_type):
    layer = make_layer(model_type)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    parameters, want = dict(layer.named_parameters()), outputs(layer)
    assert pack_projections(layer) is layer
    assert packed(layer) == PACKED[model_type]
    assert_close(outputs(layer), want)
    assert list(layer.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in layer.named_parameters())
    other = make_layer(model_type)
    other.load_state_dict(layer.state_dict(), strict=True)
    layer.load_state_dict(before, strict=True)
    assert_close(outputs(other), want)
    assert_close(outputs(layer), want)


def storages(layer: SparseAttention) -> list[int]:
    return [p.untyped_storage().data_ptr() for p in layer.parameters()]


def test_memory_and_unpacking():
    layer = pack_projections(make_layer())
    want, sizes = outputs(layer), {p.untyped_storage().nbytes() for p in layer.parameters()}
    assert len(set(storages(layer))) == len(storages(layer)) - len(HIDDEN) - len(QUERIES) + 2
    hidden = [layer.q_a_proj, layer.kv_a_proj_with_mqa, layer.indexer.wk, layer.indexer.weights_proj]
    assert sum(linear.weight.nbytes for linear in hidden) in sizes
    assert unpack_projections(layer) is layer and layer.packs is None and not list(layer.buffers())
    assert len(set(storages(layer))) == len(storages(layer))
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in layer.parameters())
    assert_close(outputs(layer), want)
    assert packed(pack_projections(pack_projections(layer))) == PACKED["deepseek_v32"]


def test_weights_written_in_place():
    layer = pack_projections(make_layer())
    before = outputs(layer)
    for linear in (layer.q_b_proj, layer.kv_a_proj_with_mqa, layer.indexer.weights_proj):
        linear.weight.mul_(-1.5)
    assert_follows(layer)
    assert not torch.equal(outputs(layer)[1], before[1])
    layer.load_state_dict(make_layer().state_dict())
    assert_close(outputs(layer), before)


def _deepcopied(layer):
    return copy.deepcopy(layer)


def _pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [_deepcopied, _pickled, _saved])
def test_copies_are_packed_by_themselves(copied):
    layer = pack_projections(make_layer())
    other, want = copied(layer), outputs(layer)
    assert packed(other) == packed(layer) and not set(storages(other)) & set(storages(layer))
    assert other.packed_hidden.data_ptr() == other.q_a_proj.weight.data_ptr()
    other.q_a_proj.weight.mul_(2)
    other.indexer.wq_b.weight.neg_()
    assert_follows(other)
    assert_close(outputs(layer), want, 0)


def test_moved_and_cast():
    layer = pack_projections(make_layer())
    buffer = layer.packed_hidden
    assert layer.to("cpu", torch.float64).packed_hidden is buffer
    layer.float()
    assert packed(layer) == PACKED["deepseek_v32"] and layer.packed_hidden.dtype == torch.float32
    assert layer.packed_hidden.data_ptr() == layer.q_a_proj.weight.data_ptr()
    layer.indexer.wk.weight.mul_(3)
    assert_follows(layer)
    state = layer.state_dict()
    layer.to("meta")
    assert layer.packs is None and not list(layer.buffers())
    layer.to_empty(device="cpu").load_state_dict(state)
    assert packed(pack_projections(layer)) == PACKED["deepseek_v32"]
    assert_follows(layer)


def test_one_part_moved_alone():
    layer = pack_projections(make_layer())
    layer.indexer.to(torch.float32).to(torch.float64)  # wk and weights_proj leave the buffer, and come back
    layer.indexer.wk.weight.mul_(2)
    assert_follows(layer)
    assert layer.indexer.wk.weight.untyped_storage().data_ptr() == layer.packed_hidden.data_ptr()


def test_weights_assigned():
    layer = pack_projections(make_layer())
    address = layer.packed_hidden.data_ptr()
    layer.q_a_proj.weight.data = torch.randn_like(layer.q_a_proj.weight)
    assert_follows(layer)
    assert layer.packed_hidden.data_ptr() == address == layer.q_a_proj.weight.data_ptr()  # graphs read it there
    layer.indexer.wk.weight = nn.Parameter(torch.randn_like(layer.indexer.wk.weight), requires_grad=False)
    assert_follows(layer)
    layer.load_state_dict({n: t * 2 for n, t in make_layer().state_dict().items()}, assign=True)
    assert_follows(layer)
    layer.kv_a_proj_with_mqa = copy.deepcopy(layer.kv_a_proj_with_mqa)
    layer.kv_a_proj_with_mqa.weight.neg_()
    assert_follows(layer)
    assert packed(pack_projections(layer)) == PACKED["deepseek_v32"]
    layer.q_a_proj.weight.neg_()
    assert_follows(layer)


def test_functional_call():
    """Parameters given for one call are used, and leave the layer's own as they are."""
    layer = pack_projections(make_layer())
    want = outputs(layer)
    replaced = make_layer()
    replaced.q_a_proj.weight.neg_()
    serving, theirs = (
        Serving.of([made], [torch.ones(20, 64, dtype=torch.float64).cumsum(0) / 20]) for made in (layer, replaced)
    )
    x, cos, sin, batch = serving.inputs([20])
    arguments = (x, cos, sin, batch, serving.pool.layers[0])
    got, _ = torch.func.functional_call(layer, dict(replaced.named_parameters()), arguments)
    assert_close([got], theirs.step([20]))
    assert_close(outputs(layer), want, 0)


@pytest.mark.parametrize("name", ["indexer.wk", "o_proj"])
def test_hooks_are_called(name):
    layer = pack_projections(make_layer())
    linear, seen = layer.get_submodule(name), []
    handle = linear.register_forward_hook(lambda module, args, output: seen.append(output) or output * 2)
    changed = outputs(layer)
    assert len(seen) == 3
    handle.remove()
    linear.weight.mul_(2)
    assert_close(outputs(layer), changed)
    assert len(seen) == 3


def test_hooks_of_all_modules_are_called():
    layer = pack_projections(make_layer())
    want, seen = outputs(layer), set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.add(module) or None)
    try:
        assert_close(outputs(layer), want)
    finally:
        handle.remove()
    assert {layer.o_proj, layer.q_a_proj, layer.q_b_proj, layer.indexer.wq_b} <= seen


@pytest.mark.parametrize("name", ["indexer.wk", "o_proj"])
def test_wrapped_forwards_are_called(name):
    """As accelerate wraps them, of an instance."""
    layer = pack_projections(make_layer())
    linear = layer.get_submodule(name)
    forward = linear.forward
    linear.forward = lambda x: forward(x) * 2
    changed = outputs(layer)
    del linear.forward
    linear.weight.mul_(2)
    assert_close(outputs(layer), changed)


def test_gradients():
    """The loss reaches every parameter, as it does without packing."""
    layer = pack_projections(make_layer().requires_grad_())
    x, cos, sin, _ = Serving.of([layer], [torch.randn(5, 64, dtype=torch.float64)]).inputs([5])
    layer.project(x, cos, sin).q_nope.sum().backward()
    assert layer.q_b_proj.weight.grad is not None and layer.q_a_proj.weight.grad is not None
    with torch.no_grad():
        layer.q_a_proj.weight -= layer.q_a_proj.weight.grad
    layer.requires_grad_(False)
    assert_follows(layer)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_biases(attention_bias):
    layer = make_layer(attention_bias=attention_bias)
    for name, parameter in layer.named_parameters():
        if name.endswith("proj.bias") or name.endswith("mqa.bias"):
            nn.init.normal_(parameter)
    want = outputs(layer)
    pack_projections(layer)
    assert ("packed_hidden_bias" in layer._buffers) == attention_bias
    assert_close(outputs(layer), want)
    if attention_bias:
        layer.kv_a_proj_with_mqa.bias.mul_(2)
        assert_follows(layer)
        layer.float()
        layer.q_a_proj.bias.mul_(2)
        assert_follows(layer)
        unpack_projections(layer)
        assert "packed_hidden_bias" not in layer._buffers


def test_biases_that_come_and_go():
    layer = pack_projections(make_layer())
    for bias in (nn.Parameter(torch.randn(48, dtype=torch.float64), requires_grad=False), None):
        layer.q_a_proj.bias = bias
        want = outputs(unpack_projections(copy.deepcopy(layer)))
        assert_close(outputs(layer), want)
        assert packed(pack_projections(layer)) == PACKED["deepseek_v32"]
        assert_close(outputs(layer), want)
        assert ("packed_hidden_bias" in layer._buffers) == (bias is not None)


def test_other_dtypes_stay_outside():
    layer = make_layer(dtype=torch.float32)
    layer.indexer.weights_proj.double()
    want = outputs(layer)
    assert packed(pack_projections(layer)) == {"hidden": HIDDEN[:-1], "q_lora": QUERIES}
    assert_close(outputs(layer), want, 1e-5)


def test_shared_weights_stay_outside():
    layers = nn.ModuleList([make_layer(), make_layer()])
    layers[1].q_a_proj.weight = layers[0].q_a_proj.weight  # one parameter
    layers[1].indexer.wk.weight.data = layers[0].indexer.wk.weight.data  # one memory
    layers[1].indexer.wq_b = layers[0].indexer.wq_b  # one module
    pack_projections(layers)
    rest = {"hidden": ["kv_a_proj_with_mqa", "weights_proj"]}
    assert packed(layers[0]) == packed(layers[1]) == rest
    for parameter in (layers[0].q_a_proj.weight, layers[0].indexer.wk.weight, layers[0].indexer.wq_b.weight):
        parameter.neg_()
    assert_follows(layers[0])
    assert_follows(layers[1])


def test_views_of_one_weight_stay_outside():
    """Also those that start within another's rows, as of a fused projection that is a module of its own."""
    layer = make_layer()
    layer.fused = nn.Linear(64, 40 + 32, bias=False, dtype=torch.float64).requires_grad_(False)
    layer.kv_a_proj_with_mqa.weight.data, layer.indexer.wk.weight.data = layer.fused.weight.data.split([40, 32])
    pack_projections(layer)
    assert packed(layer) == {"hidden": ["q_a_proj", "weights_proj"], "q_lora": QUERIES}
    layer.fused.weight.neg_()
    assert torch.equal(torch.cat([layer.kv_a_proj_with_mqa.weight, layer.indexer.wk.weight]), layer.fused.weight)


def test_unpacking_parameters_that_view_the_buffer():
    """Parameters that were made of the layer's own state dict since it was packed."""
    layer = pack_projections(make_layer())
    want = outputs(layer)
    layer.load_state_dict(layer.state_dict(), assign=True)
    unpack_projections(layer)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in layer.parameters())
    assert_close(outputs(layer), want)


def test_keys_only():
    layer = make_layer()
    want, got = (Serving.of([layer], [torch.randn(30, 64, dtype=torch.float64)], poison=False) for _ in range(2))
    got.x = want.x
    for serving, change in ((want, unpack_projections), (got, pack_projections)):
        change(layer)
        x, cos, sin, batch = serving.inputs([30])
        layer.store_keys(x, cos, sin, batch, serving.pool.layers[0])
    for a, b in zip(got.pool.layers[0].tensors(), want.pool.layers[0].tensors()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_index_weights_of_an_fp8_cache_are_not_rounded():
    """bf16 rounding of a weight is up to 2^-9 of it, that of an fp32 sum of 64 terms near 2^-22."""
    layer = make_layer(dtype=torch.bfloat16)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    exact = x.double() @ layer.indexer.weights_proj.weight.double().T
    pack_projections(layer)
    for fp8, low, high in ((True, 0.0, 2.0**-18), (False, 2.0**-12, 2.0**-8)):
        made = layer.products("hidden", x, HIDDEN, fp32=fp8)
        error = (made["weights_proj"].double() - exact).abs().max() / exact.abs().max()
        assert low <= error <= high
        assert made["wk"].dtype == made["q_a_proj"].dtype == torch.bfloat16
    assert_close(outputs(layer, index_dtype=FP8), outputs(unpack_projections(layer), index_dtype=FP8), 0.05)


def test_models_without_layers_are_refused():
    for change in (pack_projections, unpack_projections):
        with pytest.raises(ValueError, match="model is a Linear without SparseAttention; call replace_attention"):
            change(nn.Linear(2, 2))

"""SparseAttention against transformers' attention modules, over every kind of batch."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_dsa import Batch, DSAConfig, SparseAttention
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.cache import LayerPools
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.graphs.compile_stats import CompileStats, counting_backend
from compiled_dsa.graphs.torch_compat import compile_whole
from tests.huggingface.tiny_models import ALL_MODEL_TYPES, INDEX_TOPK, RELATIVES, needs
from tests.modules.layers import Serving, our_layer, stock_layer, stock_outputs, tiny_dsa_config

LENGTHS = (150, 70, 33)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # outputs of about unit size, sums of up to 150 products


def requests(dtype, lengths=LENGTHS, hidden: int = 64, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(n, hidden, dtype=dtype) for n in lengths]


def steps_of_all_kinds() -> list[tuple[list[int], dict]]:
    """(new tokens of each of 3 requests, options of the batch): prefill, chunked, decode, verify, mixed, idle."""
    return [
        ([40, 9, 33], {}),
        ([1, 1, 0], {"kind": DECODE}),
        ([60, 0, 0], {}),
        ([3, 3, 0], {"kind": DECODE}),
        ([0, 0, 0], {}),
        ([1, 30, 0], {}),
        ([0, 0, 0], {"kind": DECODE}),
        ([45, 1, 0], {"kind": PREFILL}),
        ([0, 26, 0], {"kind": DECODE}),  # the kind says which ops run, not what is right
    ]


LAYERS = [(model_type, 0) for model_type in ALL_MODEL_TYPES]
LAYERS += [(name, 1) for name in ("dots3_note_text", "mistral_large4_text") if name in RELATIVES]  # a window; no rope


@pytest.mark.parametrize(("model_type", "layer"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_every_kind_of_step(model_type, layer, dtype, padding):
    stock = stock_layer(model_type, dtype, layer)
    serving = Serving.of([our_layer(stock)], requests(dtype))
    want = [stock_outputs(stock, x)[0] for x in serving.x]
    for new, options in steps_of_all_kinds():
        out = serving.step(new, padding, **options)[0]
        assert out.shape == (sum(new) + padding, 64)
        got = out[: sum(new)]
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(got, serving.latest(want, new), rtol=bound, atol=bound)
    assert serving.held == list(LENGTHS)


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_load_strictly_both_ways(model_type, bias):
    stock = stock_layer(model_type, torch.float32, attention_bias=bias)
    ours = our_layer(stock)  # strict
    stock.load_state_dict(ours.state_dict(), strict=True)
    assert {"indexer.k_norm.weight", "indexer.k_norm.bias"} <= ours.state_dict().keys()
    assert "indexer.weights_proj.bias" not in ours.state_dict()
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}


@pytest.mark.parametrize("heads", [(1, 8), (8, 16), (16, 32), (64, 64), (128, 16)], ids=str)
def test_numbers_of_heads(heads):
    H, HI = heads
    stock = stock_layer("deepseek_v32", torch.float64, num_attention_heads=H, num_key_value_heads=H, index_n_heads=HI)
    serving = Serving.of([our_layer(stock)], requests(torch.float64, (40, 20)))
    want = [stock_outputs(stock, x)[0] for x in serving.x]
    for new, kind in (([20, 19], PREFILL), ([1, 1], DECODE), ([19, 0], PREFILL)):
        torch.testing.assert_close(serving.step(new, kind=kind)[0], serving.latest(want, new), rtol=1e-10, atol=1e-10)


def test_layers_that_share_a_selection():
    """[full, shared, shared, full, shared]: each shared layer takes this step's choice of the last full one."""
    types = ["full", "shared", "shared", "full", "shared"]
    sizes = {"num_hidden_layers": 5, "indexer_types": types}
    stock = [stock_layer("glm_moe_dsa", torch.float64, i, **sizes) for i in range(5)]
    for i, module in enumerate(stock):  # weights of its own for each layer
        for p in module.parameters():
            p.data *= 1 + 0.1 * i
    serving = Serving.of([our_layer(module) for module in stock], requests(torch.float64))
    want = [[] for _ in stock]
    for x in serving.x:
        topk = None
        for layer, module in enumerate(stock):
            out, topk = stock_outputs(module, x, topk)
            want[layer].append(out)
    for new, options in steps_of_all_kinds():
        for layer, out in enumerate(serving.step(new, **options)):
            wanted = serving.latest(want[layer], new)
            torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, i=layer: f"layer {i}: {m}")


def test_a_shared_layer_reads_what_it_is_given():
    """A selection full of a sentinel that is no slot: nothing is attended."""
    full, shared = (stock_layer("glm_moe_dsa", torch.float64, layer) for layer in (0, 1))
    serving = Serving.of([our_layer(full), our_layer(shared)], requests(torch.float64, (40,)))
    x, cos, sin, batch = serving.inputs([40])
    with torch.no_grad():
        _, topk = serving.layers[0](x, cos, sin, batch, serving.pool.layers[0])
        assert topk.shape == (40, INDEX_TOPK) and topk.dtype == torch.int32
        sentinel = torch.full_like(topk, 2**31 - 1)
        for selection, nothing in ((topk, False), (sentinel, True)):
            out, passed_on = serving.layers[1](x, cos, sin, batch, serving.pool.layers[1], selection)
            assert passed_on is selection
            assert bool((out == 0).all()) == nothing


def test_a_shared_layer_without_a_selection_is_refused():
    layer = our_layer(stock_layer("glm_moe_dsa", torch.float64, 1))
    serving = Serving.of([layer], requests(torch.float64, (40,)))
    with pytest.raises(ValueError, match="prev_topk=None; a layer without an indexer needs the selection"):
        serving.step([40])


class OpsCalled(TorchDispatchMode):
    """Names of our ops that ran, and whether the attention got a selection."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.selected: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "compiled_dsa":
            name = func._schema.name.split("::")[1]
            self.names.append(name)
            if "mla" in name:
                self.selected.append(args[3] is not None)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("new", [[16], [15], [7, 16], [10]], ids=str)
@pytest.mark.parametrize("kind", [DECODE, PREFILL])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_skipping_scores_changes_nothing(new, kind, model_type):
    """One fact of the batch tells the indexer to choose nothing and the attention to take everything."""
    stock = [stock_layer(model_type, torch.float64, layer) for layer in (0, 1)]
    outputs = []
    for skip in (False, True):
        serving = Serving.of([our_layer(module) for module in stock], requests(torch.float64, new))
        with OpsCalled() as ops:
            outputs.append(serving.step(new, kind=kind, skip_scores=skip))
        assert ("index_topk" in " ".join(ops.names)) == (not skip)
        assert ops.selected == [not skip] * 2
        assert ops.names.count("store_index_keys") == sum(layer.indexer is not None for layer in serving.layers)
    for ours, skipped in zip(*outputs):
        torch.testing.assert_close(ours, skipped, rtol=1e-12, atol=1e-12)


def test_keys_stored_while_scores_were_skipped_are_found_later():
    stock = stock_layer("deepseek_v32", torch.float64)
    serving = Serving.of([our_layer(stock)], requests(torch.float64, (60,)))
    want = [stock_outputs(stock, x)[0] for x in serving.x]
    for new, skip in ((10, True), (6, True), (1, False), (43, False)):
        out = serving.step([new], skip_scores=skip)[0]
        torch.testing.assert_close(out, serving.latest(want, [new]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [(15,), (16,), (17,), (100, 17), (10, 50), (16, 16)], ids=str)
def test_rows_on_both_sides_of_topk(lengths):
    """Prefills that end just below, at and just above index_topk = 16, alone and mixed."""
    stock = stock_layer("deepseek_v32", torch.float64)
    serving = Serving.of([our_layer(stock)], requests(torch.float64, lengths))
    want = [stock_outputs(stock, x)[0] for x in serving.x]
    out = serving.step(list(lengths))[0]
    torch.testing.assert_close(out, serving.latest(want, list(lengths)), rtol=1e-10, atol=1e-10)


def test_no_rows_and_no_requests():
    serving = Serving.of([our_layer(stock_layer("glm_moe_dsa", torch.float64))], requests(torch.float64, (20,)))
    before = [t.clone() for t in serving.pool.layers[0].tensors()]
    for T in (0, 4):
        x = torch.randn(T, 64, dtype=torch.float64)
        cos = torch.ones(T, 4, dtype=torch.float64)
        for kind in (DECODE, PREFILL):
            none = torch.zeros(0, dtype=torch.int64)
            batch = Batch.from_lengths(none, none, serving.pool.page_table[:0], T, kind=kind)
            with torch.no_grad():
                out, topk = serving.layers[0](x, cos, cos, batch, serving.pool.layers[0])
            assert out.shape == (T, 64) and not out.any()
            assert topk.shape == (T, INDEX_TOPK) and (topk == -1).all()
    assert all(map(torch.equal, map(_bytes, before), map(_bytes, serving.pool.layers[0].tensors())))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def test_eight_rows_for_five_requests():
    serving = Serving.of([our_layer(stock_layer("deepseek_v32", torch.float64))], requests(torch.float64, [30] * 5))
    serving.step([29] * 5)
    free = [page for page in range(serving.pool.layers[0].latents.shape[0])
            if page not in serving.pool.page_table.flatten().tolist()]  # fmt: skip
    x, cos, sin, batch = serving.inputs([1] * 5, padding=3, kind=DECODE)
    with torch.no_grad():
        out, topk = serving.layers[0](x, cos, sin, batch, serving.pool.layers[0])
    assert (topk[:5] >= 0).all() and (topk[5:] == -1).all()
    assert not out.isnan().any() and not out[5:].any() and out[:5].any(-1).all()
    for tensor in serving.pool.layers[0].tensors():
        assert tensor[free].isnan().all()  # nothing was written outside the requests' pages


# ---- compiled --------------------------------------------------------------------------------------------------------


def compiled_step(layer, stats: CompileStats, backend="eager"):
    def step(x, cos, sin, q_len, kv_len, page_table, pools, kind, skip_scores):
        batch = Batch.from_lengths(q_len, kv_len, page_table, x.shape[0], kind=kind, skip_scores=skip_scores)
        return layer(x, cos, sin, batch, pools)

    return compile_whole(step, counting_backend(stats, backend))


def run_compiled(step, serving: Serving, new: int, kind: str, skip_scores: bool):
    x, cos, sin, _ = serving.inputs([new])
    for tensor in (x, cos, sin):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    lengths = torch.tensor([new]), torch.tensor(serving.held)
    with torch.no_grad():
        return step(x, cos, sin, *lengths, serving.pool.page_table, serving.pool.layers[0], kind, skip_scores)[0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_compile_for_each_kind_and_predicate():
    """T = 2, 1, 0, 17, 16, 15, then kv lengths of 100 to 110: whatever the number of rows, four variants compile once
    each, and a second round compiles nothing."""
    stock = stock_layer("axk2", torch.float32)
    layer, stats = our_layer(stock), CompileStats()
    step = compiled_step(layer, stats)
    x = requests(torch.float32, (110,))
    want = stock_outputs(stock, x[0])[0]
    compiles = []
    for _ in range(2):
        for kind in (DECODE, PREFILL):
            for skip in (False, True):
                serving = Serving.of([layer], x)
                for new in (2, 1, 0, 13) if skip else (2, 1, 0, 17, 16, 15, 49, *[1] * 10):
                    out = run_compiled(step, serving, new, kind, skip)
                    torch.testing.assert_close(out, serving.latest([want], [new]), rtol=2e-5, atol=2e-5)
                compiles.append(stats.compiles)
    assert compiles == [1, 2, 3, 4, 4, 4, 4, 4]


@pytest.mark.usefixtures("fresh_dynamo")
def test_no_requests_and_padding_compiled():
    layer = our_layer(stock_layer("deepseek_v32", torch.float64))
    step = compiled_step(layer, CompileStats())
    serving = Serving.of([layer], requests(torch.float64, [30] * 5))
    none = torch.zeros(0, dtype=torch.int64)
    with torch.no_grad():
        for T in (0, 4):
            x, cos = torch.ones(T, 64, dtype=torch.float64), torch.ones(T, 4, dtype=torch.float64)
            out, topk = step(
                x, cos, cos, none, none, serving.pool.page_table[:0], serving.pool.layers[0], DECODE, False
            )
            assert out.shape == (T, 64) and not out.any() and (topk == -1).all()
        serving.step([29] * 5)
        x, cos, sin, batch = serving.inputs([1] * 5, padding=3, kind=DECODE)
        lengths = torch.ones(5, dtype=torch.int64), torch.tensor(serving.held)
        out, topk = step(x, cos, sin, *lengths, serving.pool.page_table, serving.pool.layers[0], DECODE, False)
        want, chosen = layer(x, cos, sin, batch, serving.pool.layers[0])
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(topk.sort(-1).values, chosen.sort(-1).values) and (topk[5:] == -1).all()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_by_inductor():
    """One graph for any number of rows, zero included, and pools written in place."""
    stock = stock_layer("glm_moe_dsa", torch.float32)
    layer, stats = our_layer(stock), CompileStats()
    step = compiled_step(layer, stats, "inductor")
    serving = Serving.of([layer], requests(torch.float32, (60,)))
    want = stock_outputs(stock, serving.x[0])[0]
    for new in (24, 1, 0, 2, 33):
        out = run_compiled(step, serving, new, DECODE, False)
        torch.testing.assert_close(out, serving.latest([want], [new]), rtol=2e-5, atol=2e-5)
    assert stats.compiles == 1


# ---- formats of the caches -------------------------------------------------------------------------------------------


def outputs_over(layer, x, **dtypes) -> torch.Tensor:
    serving = Serving.of([layer], [x], **dtypes)
    parts = [(len(x) - 10, PREFILL), (1, DECODE), (2, DECODE), (7, DECODE)]
    return torch.cat([serving.step([new], kind=kind)[0] for new, kind in parts])


@pytest.mark.parametrize(("model_type", "layer"), LAYERS)
def test_fp8_latents(model_type, layer):
    """With everything selected, a latent's relative error is at most 2^-4 (half a unit of 3 mantissa bits), or half of
    e4m3's smallest step of 2^-9 of its group's scale; an output averages such errors."""
    stock = stock_layer(model_type, torch.float64, layer, index_topk=150)
    layer, x = our_layer(stock), requests(torch.float64)[0]
    want = stock_outputs(stock, x)[0]
    error = (outputs_over(layer, x, latent_dtype=FP8) - want).norm(dim=-1) / want.norm(dim=-1)
    assert 1e-3 < error.mean() < 2**-4
    assert error.max() < 2**-3
    torch.testing.assert_close(outputs_over(layer, x), want, rtol=1e-10, atol=1e-10)


def test_fp8_index_keys_with_everything_selected_change_nothing():
    stock = stock_layer("deepseek_v32", torch.float64, index_topk=150)
    layer, x = our_layer(stock), requests(torch.float64)[0]
    torch.testing.assert_close(outputs_over(layer, x, index_dtype=FP8), stock_outputs(stock, x)[0])


def test_axk2_gate_is_applied():
    config = tiny_dsa_config("axk2")
    layer = SparseAttention(config)
    assert not hasattr(layer, "q_b_proj")
    torch.manual_seed(0)
    stock = stock_layer("axk2", torch.float64)
    layer, x = our_layer(stock), requests(torch.float64)[0]
    gate = stock.q_gate_proj.weight.view(4, config.qk_head_dim + config.v_head_dim, -1)[:, config.qk_head_dim :]
    closed = gate.clone()
    gate.data.zero_()
    layer.load_state_dict(stock.state_dict())
    half = outputs_over(layer, x)  # sigmoid(0) = 1/2
    gate.data.copy_(closed)
    layer.load_state_dict(stock.state_dict())
    assert (outputs_over(layer, x) - half).norm() > 0.1 * half.norm()


@needs("hy_v4")
def test_hy_v4_gate_and_sinks_are_applied():
    stock = stock_layer("hy_v4", torch.float64)
    layer, x = our_layer(stock), requests(torch.float64)[0]
    whole = outputs_over(layer, x)
    for name, neutral in (("sinks", -1e4), ("gate_proj.weight", 0.0)):  # no weight taken; sigmoid(0) = 1/2
        other = our_layer(stock)
        other.get_parameter(name).data.fill_(neutral)
        assert (outputs_over(other, x) - whole).norm() > 0.1 * whole.norm()


@needs("dots3_note_text")
def test_a_window_that_starts_later():
    """``window_start`` leaves out more of what the window reaches: as if the keys before it were not there."""
    stock = stock_layer("dots3_note_text", torch.float64, 1)
    layer, (x,) = our_layer(stock), requests(torch.float64, (30,))
    serving = Serving.of([layer], [x])
    rows, cos, sin, batch = serving.inputs([30])
    with torch.no_grad():
        start = torch.full((30,), 25)
        got, passed_on = layer(rows, cos, sin, batch, serving.pool.layers[0], None, start)
        late = Serving.of([layer], [x[25:]])
        _, _, _, alone = late.inputs([5])
        want, _ = layer(rows[25:], cos[25:], sin[25:], alone, late.pool.layers[0])
    assert passed_on is None and not got[:25].any()
    torch.testing.assert_close(got[25:], want, rtol=1e-12, atol=1e-12)


@needs("mistral_large4_text")
def test_latents_of_an_earlier_layer():
    """Layer 2 of this model attends the latents of layer 0 with its selection, layer 3 with one of its own."""
    stock = [stock_layer("mistral_large4_text", torch.float64, i) for i in (0, 2, 3)]
    layers, (x,) = [our_layer(layer) for layer in stock], requests(torch.float64, (90,))
    assert [layer.dsa_config.kv_source for layer in layers] == [None, 0, 0]
    shared, topk, want = {}, None, []
    for layer in stock:
        out, topk = stock_outputs(layer, x, topk, shared)
        want.append(out)
    serving = Serving.of(layers, [x])
    first, *others = serving.pool.layers
    serving.pool.layers = [first, *(LayerPools(first.latents, own.index_keys) for own in others)]
    for new in (50, 1, 39):
        for got, whole in zip(serving.step([new]), want):
            torch.testing.assert_close(got, serving.latest([whole], [new]), rtol=1e-12, atol=1e-12)


def test_layers_are_made_from_any_config():
    config = dataclasses.replace(tiny_dsa_config(), index_k_norm="rms", attention_bias=True)
    layer = SparseAttention(config, dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert "indexer.k_norm.bias" not in layer.state_dict() and "o_proj.bias" in layer.state_dict()
    assert isinstance(config, DSAConfig) and layer.dsa_config is config

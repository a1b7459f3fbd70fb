"""What a layer selects: tokens that are always chosen, positions handed out and taken in, keys stored without more."""

import dataclasses

import pytest
import torch

from compiled_dsa import DSAConfig
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.custom_ops.layout import PAGE
from tests.huggingface.tiny_models import INDEX_TOPK, tiny_config
from tests.modules.layers import Serving, our_layer, stock_layer, stock_outputs

STEPS = [([40, 10], PREFILL), ([9, 30], PREFILL), ([1, 1], DECODE)]  # in all 50 and 41 tokens


def serving_of(*layers, seed: int = 0, dtype=torch.float32) -> Serving:
    torch.manual_seed(seed)
    return Serving.of(layers, [torch.randn(n, 64, dtype=dtype) for n in (50, 41)])


def layers_of(model_type: str = "deepseek_v32", count: int = 1, dtype=torch.float32, **changes) -> list:
    layers = [our_layer(stock_layer(model_type, dtype, layer)) for layer in range(count)]
    for layer in layers:
        layer.dsa_config = dataclasses.replace(layer.dsa_config, **changes)
        if layer.indexer is not None:
            layer.indexer.dsa_config = layer.dsa_config
    return layers


def run(serving: Serving, steps=STEPS, selections=None, skip_scores: bool = False) -> tuple[list, list]:
    """Outputs and selected positions of every step. ``selections``: positions that take the indexer's place."""
    outputs, captured, layer = [], [], serving.layers[0]
    for step, (new, kind) in enumerate(steps):
        x, cos, sin, batch = serving.inputs(new, padding=2, kind=kind, skip_scores=skip_scores)
        where = torch.full((x.shape[0], INDEX_TOPK), 123456789, dtype=torch.int32)
        options = {"positions_out": where} if selections is None else {"selected": selections[step]}
        with torch.no_grad():
            out, topk = layer(x, cos, sin, batch, serving.pool.layers[0], **options)
        if topk is not None and selections is None:
            slots = batch.page_table[batch.req_of_row.long()[:, None], where.clamp(min=0).long() // PAGE] * PAGE
            assert torch.equal(torch.where(where < 0, -1, slots + where % PAGE), topk)
        outputs.append(out)
        captured.append(where)
    return outputs, captured


def test_tokens_of_the_config_are_always_selected():
    hf = tiny_config("deepseek_v32")
    hf.index_init_tokens, hf.index_local_tokens = 2, 3
    config = DSAConfig.from_hf(hf)
    assert (config.index_init_tokens, config.index_local_tokens) == (2, 3)
    (layer,) = layers_of(index_init_tokens=2, index_local_tokens=3)
    serving = serving_of(layer)
    _, captured = run(serving)
    _, without = run(serving_of(*layers_of()))
    visible = torch.cat([torch.arange(40), torch.arange(10)]) + 1
    for row, plain, n in zip(captured[0], without[0], visible.tolist()):
        assert {0, 1, n - 3, n - 2, n - 1} & set(range(n)) <= set(row.tolist())
        assert (row >= 0).sum() == (plain >= 0).sum() == min(n, INDEX_TOPK)
    assert not torch.equal(captured[0], without[0])
    assert (captured[0][-2:] == -1).all()  # padding


@pytest.mark.parametrize(
    ("init", "local", "message"),
    [
        (10, 7, f"init_tokens=10, local_tokens=7; .* {INDEX_TOPK} are selected"),
        (-1, 0, "index_init_tokens=-1; it must be"),
    ],
)
def test_more_tokens_than_are_selected_are_refused(init, local, message):
    hf = tiny_config("deepseek_v32")
    hf.index_init_tokens, hf.index_local_tokens = init, local
    with pytest.raises(ValueError, match=message):
        DSAConfig.from_hf(hf)


def test_positions_taken_in_give_the_same_outputs():
    """Those that one run handed out, in any order among others that no row sees; the indexer's weights are noise."""
    want, captured = run(serving_of(*layers_of()))
    (other,) = layers_of()
    for parameter in other.indexer.parameters():
        torch.nn.init.normal_(parameter)
    again, _ = run(serving_of(other), selections=captured)
    assert all(map(torch.equal, again, want))
    mixed = []
    for positions in captured:
        extra = torch.tensor([-1, 10**6, -5, 2**31 - 1]).int().expand(len(positions), 4)
        positions = torch.cat([extra[:, :2], positions, extra[:, 2:]], dim=1)
        mixed.append(positions[:, torch.randperm(positions.shape[1])].long())
    again, _ = run(serving_of(other), selections=mixed)
    for ours, wanted in zip(again, want):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_future_positions_are_not_attended():
    (layer,) = layers_of(dtype=torch.float64)
    serving = serving_of(layer, dtype=torch.float64)
    x, cos, sin, batch = serving.inputs([40, 0])
    own = torch.arange(40).unsqueeze(1)
    with torch.no_grad():
        pools = serving.pool.layers[0]
        want, topk = layer(x, cos, sin, batch, pools, selected=own)
        got, same = layer(x, cos, sin, batch, pools, selected=torch.cat([own + 1, own + 7, own], 1))
    assert topk.shape == (40, 1) and torch.equal(topk, same[:, :1]) and (same[:, 1:] == -1).all()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_keys_are_stored_while_positions_are_taken_in():
    (layer,) = layers_of()
    ordinary, given = serving_of(layer), serving_of(layer)
    captured = run(ordinary, STEPS[:1])[1]
    run(given, STEPS[:1], [torch.full_like(captured[0], -1)])
    for ours, wanted in zip(given.pool.layers[0].tensors(), ordinary.pool.layers[0].tensors()):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def test_positions_where_no_scores_are_needed():
    steps = [([9, 0], PREFILL), ([1, 6], PREFILL)]
    layers = layers_of()
    outputs, skipped = run(serving_of(*layers), steps, skip_scores=True)
    _, scored = run(serving_of(*layers), steps)
    assert all(map(torch.equal, skipped, scored))
    again, _ = run(serving_of(*layers), steps, selections=skipped, skip_scores=True)
    for ours, wanted in zip(again, outputs):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_layers_that_share_take_positions_too():
    full, shared = layers_of("glm_moe_dsa", 2)
    serving = serving_of(full, shared)
    x, cos, sin, batch = serving.inputs([40, 10])
    pools, where = serving.pool.layers, torch.empty(50, INDEX_TOPK, dtype=torch.int32)
    with torch.no_grad():
        _, topk = full(x, cos, sin, batch, pools[0], positions_out=where)
        want, _ = shared(x, cos, sin, batch, pools[1], topk)
        got, _ = shared(x, cos, sin, batch, pools[1], selected=where)
    assert torch.equal(got, want)


def test_wrong_calls():
    full, shared = layers_of("glm_moe_dsa", 2)
    serving = serving_of(full, shared)
    x, cos, sin, batch = serving.inputs([40, 10])
    where, pools = torch.zeros(50, INDEX_TOPK, dtype=torch.int32), serving.pool.layers
    with torch.no_grad():
        with pytest.raises(ValueError, match="positions_out is given to a layer without an indexer"):
            shared(x, cos, sin, batch, pools[1], where, positions_out=where)
        with pytest.raises(ValueError, match="or along with selected"):
            full(x, cos, sin, batch, pools[0], positions_out=where, selected=where)
        with pytest.raises(ValueError, match=r"selected has shape \(49, 16\); it must be \[50, n\]"):
            full(x, cos, sin, batch, pools[0], selected=where[1:])


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
def test_positions_handed_out_of_compiled_code(kind):
    (layer,) = layers_of()
    results = []
    for forward in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        serving = serving_of(layer)
        serving.step([38, 38])
        x, cos, sin, batch = serving.inputs([2, 2], kind=kind)
        where = torch.zeros(4, INDEX_TOPK, dtype=torch.int32)
        with torch.no_grad():
            out, _ = forward(x, cos, sin, batch, serving.pool.layers[0], positions_out=where)
            results.append((out, where))
    assert torch.equal(results[0][1], results[1][1]) and (results[1][1] >= 0).all()


@pytest.mark.parametrize("model_type", ["deepseek_v32", "axk2"])
def test_a_keys_only_call(model_type):
    """Tokens of which only keys are stored are attended by later ones as if they had run."""
    stock = stock_layer(model_type, torch.float64)
    serving = serving_of(our_layer(stock), dtype=torch.float64)
    want = [stock_outputs(stock, request)[0] for request in serving.x]
    x, cos, sin, batch = serving.inputs([40, 37])
    with torch.no_grad():
        serving.layers[0].store_keys(x, cos, sin, batch, serving.pool.layers[0])
    out = serving.step([10, 4])[0]
    torch.testing.assert_close(out, serving.latest(want, [10, 4]), rtol=1e-10, atol=1e-10)
    shared = our_layer(stock_layer("glm_moe_dsa", torch.float64, 1))  # has latents and no index keys
    other = serving_of(shared, dtype=torch.float64)
    x, cos, sin, batch = other.inputs([16, 0])
    with torch.no_grad():
        shared.store_keys(x, cos, sin, batch, other.pool.layers[0])
    assert not other.pool.layers[0].latents[other.pool.page_table[0, 0], :16].isnan().any()

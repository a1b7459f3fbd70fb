"""examples/peer_composition.py on a CPU: with plain torch in place of the libraries, and with stand-ins for these."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compiled_dsa.benchmark.inputs import Caches, random_layer
from compiled_dsa.benchmark.ours import CompiledLayer
from compiled_dsa.benchmark.reference import Oracle
from compiled_dsa.custom_ops.layout import PAGE
from tests.benchmark.sizes import decode, prefill, small_config, torch_libraries
from tests.ops import fake_libraries

MODELS = ("deepseek_v32", "glm_moe_dsa")
LIBRARY_SIZES = {
    "num_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 128,
}


@pytest.fixture
def composition(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    return importlib.import_module("peer_composition")


@pytest.mark.parametrize("model", MODELS)
def test_in_plain_torch(composition, model):
    """Against fp64, and what our own layer stores, but for ropes that it rounds once instead of three times."""
    config = small_config(model)
    with torch.inference_mode():
        layer = random_layer(config, "cpu")
        caches = Caches(config, 768, "cpu")
        theirs = composition.Composition(config, layer.state_dict(), torch_libraries(composition), compiled=False)
        ours = CompiledLayer(layer, "eager")
        for case in (decode(model, 3, 256), decode(model, 1, 512), prefill(model, 100, 256), prefill(model, 192, 192)):
            inputs = caches.inputs(case)
            found = Oracle(config, layer.state_dict(), inputs).compare(
                *composition.runnable(theirs, inputs, graph=False).result()
            )
            assert found.error < 0.06 and found.overlap > 0.9
            stored = [pool.clone() for pool in caches.pool.layers[0].tensors()]
            caches.restore(inputs.batch.slots)
            ours.runnable("off", inputs).run()
            for kept, pool in zip(stored, caches.pool.layers[0].tensors(), strict=True):
                assert (kept == pool).double().mean() > 0.99
            caches.restore(inputs.batch.slots)


def page_table_transform(scores, table, lengths, k, *, dsa_graph_safe, page_size, out):
    positions = fake_libraries.flashinfer().top_k_ragged_transform(scores, torch.zeros_like(lengths), lengths, k)
    slots = table.gather(1, positions.clamp(min=0).long() // PAGE) * PAGE + positions % PAGE
    assert dsa_graph_safe and page_size == PAGE
    out.copy_(torch.where(positions < 0, -1, slots))


@pytest.mark.parametrize("topk", ["flashinfer", "torch"])
@pytest.mark.parametrize("model", MODELS)
def test_calls_of_the_libraries(composition, monkeypatch, model, topk):
    """As their own checks want them, at the sizes that they take."""
    config = small_config(model, **LIBRARY_SIZES)
    flashinfer = fake_libraries.flashinfer()
    flashinfer.top_k_page_table_transform = page_table_transform
    for name, module in (
        ("deep_gemm", fake_libraries.deep_gemm()),
        ("flash_mla", fake_libraries.flash_mla()),
        ("flashinfer", flashinfer),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    libraries = composition.public_libraries(topk, compiled=False)
    assert libraries.names["topk"] == ("flashinfer" if topk == "flashinfer" else "torch.topk")
    with torch.inference_mode():
        weights = random_layer(config, "cpu").state_dict()
        caches = Caches(config, 768, "cpu")
        theirs = composition.Composition(config, weights, libraries, compiled=False)
        for case in (decode(model, 3, 256), prefill(model, 100, 256)):
            inputs = caches.inputs(case)
            found = Oracle(config, weights, inputs).compare(*composition.runnable(theirs, inputs, graph=False).result())
            assert found.error < 0.06 and found.overlap > 0.9


def test_refusals(composition, monkeypatch):
    with pytest.raises(ValueError, match="topk='best'; it must be one of auto, flashinfer, torch"):
        composition.public_libraries("best")
    inputs = SimpleNamespace(batch=SimpleNamespace(kind="decode", kv_len=torch.ones(128)), pools=None)
    names = SimpleNamespace(names={"attention": "flash_mla"})
    theirs = SimpleNamespace(libraries=names, c=small_config("glm_moe_dsa", num_heads=64))
    with pytest.raises(ValueError, match="faults at 128 rows of 64 heads"):
        composition.runnable(theirs, inputs)


def test_program(composition, monkeypatch, capsys):
    for options, text in (
        (["--only", "nothing"], "--only=nothing is part of no case"),
        (["--only", "model"], "is part of no case of a layer"),
        ([], "torch sees no GPU"),
    ):
        monkeypatch.setattr("sys.argv", ["peer_composition.py", *options])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            composition.main()
        assert text in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["peer_composition.py", "--list"])
    assert composition.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 11 and all(" layer " in line for line in listed)

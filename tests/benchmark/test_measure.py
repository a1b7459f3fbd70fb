"""The benchmark of a layer and of a model, on a CPU with a stand-in for the clock."""

import pytest
import torch

from compiled_dsa.benchmark import measure as measure_module
from compiled_dsa.benchmark import peers
from compiled_dsa.benchmark.cases import MODEL, BenchCase
from compiled_dsa.benchmark.inputs import Caches, random_layer
from compiled_dsa.benchmark.measure import Bench, Clock
from compiled_dsa.benchmark.ours import CompiledLayer
from compiled_dsa.benchmark.peers import NotRun, Peers, load_composition
from compiled_dsa.benchmark.reference import Oracle
from compiled_dsa.huggingface.benchmark import Models, StockLayer
from compiled_dsa.huggingface.small_models import SMALL
from tests.benchmark.sizes import decode, prefill, small_config

MODELS = ("deepseek_v32", "glm_moe_dsa")


def clock() -> Clock:
    """5 us a run, which is run once."""

    def once(result):
        def measured(run):
            run()
            return result

        return measured

    return Clock(once(5.0), once(2.0), once(["gemm", "gemm", "norm"]))


@pytest.mark.parametrize("model", MODELS)
def test_layer_cases(model, monkeypatch):
    cases = [
        decode(model, 3, 256, ("off", "full"), ("composition", "hf_sdpa")),
        decode(model, 1, 512),
        prefill(model, 256, 256, ("off",), ("hf_eager",)),
        prefill(model, 100, 512),
    ]
    monkeypatch.setattr(peers, "load_composition", no_composition)
    bench = Bench(model, cases, device="cpu", clock=clock(), config=small_config(model), backend="eager")
    with torch.inference_mode():
        found = [bench.measure(case) for case in cases]
    first = found[0]
    assert first.modes_us == {"off": 5.0} and first.peers_us == {"hf_sdpa": 5.0}
    assert first.launches == {"off": ["gemm", "gemm", "norm"]} and first.host_us == {}
    assert first.not_run.keys() == {"full", "composition"}
    assert first.not_run["composition"] == "not here" and "Error: " in first.not_run["full"]
    assert found[2].peers_us == {"hf_eager": 5.0} and found[3].modes_us == {"off": 5.0}
    for measured in found:
        for accuracy in measured.accuracy.values():  # fp8 caches, weights in bf16
            assert accuracy.error < 0.06 and accuracy.overlap > 0.9
    assert first.accuracy["hf_sdpa"].error < 0.03


def test_times_stay_where_launches_cannot_be_counted():
    def cannot(run):
        raise RuntimeError("torch.profiler saw no work on the device")

    case = decode("deepseek_v32", 1, 128)
    parts = clock()
    bench = Bench(
        "deepseek_v32",
        [case],
        device="cpu",
        clock=Clock(parts.device_us, parts.host_us, cannot),
        config=small_config("deepseek_v32"),
        backend="eager",
    )
    with torch.inference_mode():
        measured = bench.measure(case)
    assert measured.modes_us == {"off": 5.0} and measured.launches == {} and measured.not_run == {}
    assert measured.notes == {"launches_not_counted": "RuntimeError: torch.profiler saw no work on the device"}


def no_composition():
    raise NotRun("not here")


def test_composition_comes_with_a_checkout(tmp_path):
    assert callable(load_composition().public_libraries)
    with pytest.raises(NotRun, match="the composition comes with a checkout"):
        load_composition(tmp_path / "gone.py")


def test_peers_without_their_libraries():
    config = small_config("deepseek_v32")
    made = Peers("deepseek_v32", config, random_layer(config, "cpu").state_dict())
    with pytest.raises(NotRun, match="deep_gemm|flash_mla"):
        made.runnable("composition", None)
    with pytest.raises(ValueError, match="name='vllm'; it must be one of composition, hf_eager"):
        made.runnable("vllm", None)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_oracle_is_what_transformers_computes(model, implementation):
    """In fp32, whose own error is far below that of any cache."""
    config = small_config(model)
    with torch.inference_mode():
        weights = random_layer(config, "cpu", torch.float32).state_dict()
        caches = Caches(config, 768, "cpu", torch.float32)
        stock = StockLayer(model, config, weights, implementation)
        for case in (decode(model, 3, 256), decode(model, 1, 512), prefill(model, 128, 128)):
            inputs = caches.inputs(case)
            accuracy = Oracle(config, weights, inputs).compare(*stock.runnable(inputs).result())
            assert accuracy.error < 1e-5 and accuracy.overlap == 1.0
        with pytest.raises(ValueError, match="it must have no prefix"):
            stock.runnable(caches.inputs(prefill(model, 64, 128)))


def test_caches_are_restored():
    config = small_config("deepseek_v32")
    with torch.inference_mode():
        caches = Caches(config, 512, "cpu")
        pools = caches.pool.layers[0].tensors()
        before = [pool.clone() for pool in pools]
        inputs = caches.inputs(prefill("deepseek_v32", 64, 512))
        CompiledLayer(random_layer(config, "cpu"), "eager").runnable("off", inputs).run()
        assert not any(map(torch.equal, before, pools))
        caches.restore(inputs.batch.slots)
        assert all(map(torch.equal, before, pools))


def test_wrong_arguments():
    config = small_config("deepseek_v32")
    caches = Caches(config, 256, "cpu")
    with pytest.raises(ValueError, match="context=100; it must be a multiple of 64"):
        caches.inputs(decode("deepseek_v32", 1, 100))
    with pytest.raises(ValueError, match="needs 8 pages; the pools have 4"):
        caches.inputs(decode("deepseek_v32", 2, 256))
    inputs = caches.inputs(decode("deepseek_v32", 2, 128))
    with pytest.raises(ValueError, match="mode='auto'; it must be one of off, full, breakable, piecewise"):
        CompiledLayer(random_layer(config, "cpu")).runnable("auto", inputs)
    weights = random_layer(config, "cpu").state_dict()
    with pytest.raises(ValueError, match="row 0 attends slots that it does not see"):
        Oracle(config, weights, inputs).compare(inputs.x, inputs.slots_of(1)[None].expand(2, -1))


@pytest.mark.parametrize("model", MODELS)
def test_model_cases(model, monkeypatch):
    small = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4}
    monkeypatch.setattr(Bench, "_make_models", lambda self: Models(model, 2, "cpu", torch.float32, **small))
    monkeypatch.setattr(measure_module, "MODEL_STEPS", 2)
    case = BenchCase(model, MODEL, "decode", 2, 128, 2, ("off",), ("hf_sdpa",))
    bench = Bench(model, [case], device="cpu", backend="eager")
    with torch.inference_mode():
        measured = bench.measure(case)
    assert measured.not_run == {} and measured.modes_us["off"] > 0 and measured.peers_us["hf_sdpa"] > 0
    assert measured.notes["tokens_per_s"] == pytest.approx(2e6 / measured.modes_us["off"])

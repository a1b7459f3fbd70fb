"""Two ranks, each with its part of the heads, give the tokens of the whole model.

transformers loads the weights by its own plan; the ranks talk through gloo. All cases go through one pair of processes,
whose start takes most of the time.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_dsa import compile_model
from compiled_dsa.huggingface import replace_attention
from tests.huggingface.tiny_models import Pair, prompt, tiny_model

pytest.importorskip("accelerate")  # transformers loads nothing on several devices without
distributed = pytest.importorskip("transformers.distributed")

RANKS = 2
OPTIONS = {"do_sample": False, "max_new_tokens": 4}
# hy_v4's plan wraps the attention module itself, shards a parameter of it (sinks) and gates by head
MODELS = {"deepseek_v32": ("paged", "dynamic", "compiled"), "hy_v4": ("paged", "none", "attentions")}


def small_model(model_type: str):
    return tiny_model(model_type, num_hidden_layers=2, first_k_dense_replace=1)


def run_case(pair: Pair, case: str) -> Tensor:
    if case == "attentions":  # transformers' own forward
        with torch.no_grad():
            return pair.ours(prompt(2, 24), output_attentions=True).logits
    if case == "compiled":
        compile_model(pair.ours, backend="eager")
    cache = "paged" if case == "compiled" else case
    return pair.ours.generate(prompt(2, 24), **OPTIONS, **pair.cache(cache, 2, 32))


def run_rank(rank: int, folder: str, port: int) -> None:
    """In a process of its own: every case on this rank; leaves results and how the layers ran in the folder."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), **address})
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    results = {}
    for model_type, cases in MODELS.items():
        model = AutoModelForCausalLM.from_pretrained(
            Path(folder, model_type), distributed_config=distributed.DistributedConfig(tp_size=RANKS)
        )
        pair = Pair(model, replace_attention(model))
        up = model.model.layers[0].self_attn.kv_b_proj.weight
        assert up.shape[0] == RANKS * up.to_local().shape[0]
        for case in cases:
            results[model_type, case] = run_case(pair, case)
        stats = model.dsa_stats
        results[model_type] = stats.calls, stats.traced, dict(stats.stock_calls), dict(stats.traced_stock)
    torch.save(results, Path(folder, f"rank{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """Of each rank."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    for model_type in MODELS:
        small_model(model_type).save_pretrained(folder / model_type)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # transformers takes GPUs where there are any
        torch.multiprocessing.spawn(run_rank, (str(folder), port), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("model_type", MODELS)
def test_results_are_those_of_the_whole_model(results, model_type):
    model = small_model(model_type)
    with torch.no_grad():
        logits = model(prompt(2, 24)).logits
    tokens = model.generate(prompt(2, 24), **OPTIONS)
    for result in results:
        for case in MODELS[model_type]:
            if case == "attentions":
                torch.testing.assert_close(result[model_type, case], logits, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(result[model_type, case], tokens), case


def test_the_layers_ran_on_the_ops(results):
    layers, steps = 2, OPTIONS["max_new_tokens"]
    for result in results:
        assert result["deepseek_v32"] == (2 * steps * layers, 2 * layers, {}, {})
        assert result["hy_v4"] == (2 * steps * layers, 0, {"attentions": layers}, {})

"""generate() through CUDA graphs gives the tokens of the compiled code that they captured."""

import copy
import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache, replace_attention

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,  # transformers' experts synchronise in fp32
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 32,
    "eos_token_id": None,
    "pad_token_id": 0,
}


TOKEN_SIZES = (16, 48, 96)
LAYERS = SIZES["num_hidden_layers"]


def models(model_type: str, *graphs: str, **options):
    """Compiled models of the same weights, one for each runtime."""
    sharing = {"indexer_types": ["full", "shared", "full"]} if model_type == "glm_moe_dsa" else {}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **sharing)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=0.1)
    options = {"backend": "eager", "token_sizes": TOKEN_SIZES, **options}
    return [compile_model(replace_attention(copy.deepcopy(model)), graphs=runtime, **options) for runtime in graphs]


def tokens(model, prompt, new: int, **kwargs):
    cache = PagedCache(model.config, 8, prompt.shape[1] + new, index_dtype=torch.float32)
    out = model.generate(prompt, max_new_tokens=new, do_sample=False, past_key_values=cache, **kwargs)
    return out[:, prompt.shape[1] :]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_are_those_of_the_compiled_code_and_replays_are_counted(model_type):
    plain, graphed = models(model_type, "off", "auto")
    prompt = torch.randint(1, 128, (2, 20), device="cuda")
    padding = torch.ones_like(prompt)
    padding[0, :7] = 0
    for kwargs in ({}, {"attention_mask": padding}):
        assert torch.equal(tokens(graphed, prompt, 40, **kwargs), tokens(plain, prompt, 40, **kwargs))
    stats = graphed.graph_stats()
    # each run prefills in a bucket of 48 below index_topk, then decodes 39 tokens, first with all keys visible to all
    # rows, later with a selection: three captured forwards a run. Below index_topk the only break is attention.
    assert (stats["graphs"], stats["captured"], stats["replayed"], stats["uncaptured"]) == ("auto", 6, 80, 0)
    assert (stats["breaks"], stats["segments"]) == (2 * LAYERS, 2 * (LAYERS + 1) + 4)
    gc.collect()
    assert graphed.graph_stats()["dropped"] == 6  # with the caches of the two runs
    assert plain.graph_stats()["replayed"] == 0


@pytest.mark.parametrize("graphs", ["full", "breakable", "piecewise"])
def test_every_runtime_gives_the_tokens_of_the_compiled_code(graphs):
    plain, graphed = models("glm_moe_dsa", "off", graphs)
    for batch_size, length in ((1, 40), (2, 40), (1, 13)):
        prompt = torch.randint(1, 128, (batch_size, length), device="cuda")
        assert torch.equal(tokens(graphed, prompt, 6), tokens(plain, prompt, 6))
    stats = graphed.graph_stats()
    assert (stats["graphs"], stats["captured"], stats["replayed"], stats["uncaptured"]) == (graphs, 6, 18, 0)
    # two layers of three select; the shorter prompt needs no scores
    breaks = 0 if graphs == "full" else 2 * (LAYERS + 2) + LAYERS
    assert (stats["breaks"], stats["segments"]) == (breaks, breaks + 6)


def test_prefills_beyond_the_buckets_and_other_caches_run_without_a_graph_and_say_why():
    plain, graphed = models("deepseek_v32", "off", "auto")
    prompt = torch.randint(1, 128, (1, 100), device="cuda")
    assert torch.equal(tokens(graphed, prompt, 5), tokens(plain, prompt, 5))
    with torch.no_grad():
        graphed(prompt)
    assert graphed.graph_stats()["reasons"] == {"more than 96 tokens": 1, "no PagedCache and no Batch": 1}


def test_the_forward_on_the_buffers_of_a_graph_gives_the_same_bits():
    (graphed,) = models("deepseek_v32", "breakable")
    prompt = torch.randint(1, 128, (1, 60), device="cuda")
    logits = []
    for forward in (graphed, graphed.run_padded):
        cache = PagedCache(graphed.config, 1, 128, index_dtype=torch.float32)
        with torch.no_grad():
            logits += [forward(part, past_key_values=cache).logits for part in prompt.split([40, 1, 19], dim=1)]
        assert cache.get_seq_length() == int(cache.columns_on_device()) == 60
    assert all(torch.equal(a, b) for a, b in zip(logits[:3], logits[3:]))


def test_slices_of_a_longer_prompt_replay_one_graph():
    (graphed,) = models("deepseek_v32", "auto")
    ids, cache = torch.randint(1, 128, (2, 60), device="cuda"), PagedCache(graphed.config, 2, 64)
    with torch.no_grad():
        graphed(ids[:, :40], past_key_values=cache)
        for column in range(40, 50):
            graphed(ids[:, column : column + 1], past_key_values=cache)  # strides of the whole prompt
    assert graphed.graph_stats()["captured"] == 2


def test_a_call_that_no_graph_can_hold_runs_without_and_others_go_on():
    (graphed,) = models("deepseek_v32", "auto")
    ids, cache = torch.randint(1, 128, (1, 60), device="cuda"), PagedCache(graphed.config, 1, 64)
    with torch.no_grad():
        graphed(ids[:, :20], past_key_values=cache, unknown={1, 2})
        graphed(ids[:, 20:40], past_key_values=cache)
    stats = graphed.graph_stats()
    assert (stats["graphs"], stats["uncaptured"], stats["replayed"]) == ("auto", 1, 1)
    assert list(stats["reasons"]) == ["an argument is a set; a graph takes tensors, constants and states"]


def test_misses_after_the_warm_up_raise():
    (graphed,) = models("deepseek_v32", "auto", on_miss="raise")
    prompt = torch.randint(1, 128, (1, 100), device="cuda")
    cache = PagedCache(graphed.config, 1, 128, index_dtype=torch.float32)

    def generate(length: int):
        cache.reset()
        graphed.generate(prompt[:, :length], max_new_tokens=3, do_sample=False, past_key_values=cache)

    assert list(graphed.warm_up(generate, TOKEN_SIZES, progress=False)) == [96, 48, 16]
    graphed.end_warm_up()
    for length in (60, 48, 37, 16, 12):
        generate(length)
    stats = graphed.graph_stats()
    assert (stats["recompiles"], stats["uncaptured"]) == (0, 0)
    with pytest.raises(RuntimeError, match="more than 96 tokens"):
        generate(97)
    generate(40)  # and goes on


def test_beams_and_prompt_lookup_replay():
    plain, graphed = models("deepseek_v32", "off", "auto", token_sizes=(96, 3 * 96))  # three beams prefill together
    prompt = torch.randint(1, 128, (1, 40), device="cuda").repeat(1, 2)
    for kwargs in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(tokens(graphed, prompt, 24, **kwargs), tokens(plain, prompt, 24, **kwargs))
    stats = graphed.graph_stats()
    assert stats["replayed"] > 24 and stats["uncaptured"] == 0
    assert stats["captured"] <= 8  # prefill, decode and verifications of 2 to 4 tokens


def test_a_full_cache_raises_before_a_replay():
    (graphed,) = models("deepseek_v32", "full")
    prompt = torch.randint(1, 128, (1, 40), device="cuda")
    cache = PagedCache(graphed.config, 1, 44)
    with torch.no_grad():
        graphed(prompt, past_key_values=cache)
        for _ in range(4):
            graphed(prompt[:, :1], past_key_values=cache)
        before = cache.pool.layers[0].latents.clone()
        with pytest.raises(ValueError, match="max_cache_len"):
            graphed(prompt[:, :1], past_key_values=cache)
    assert torch.equal(before, cache.pool.layers[0].latents)
    assert cache.get_seq_length() == 44

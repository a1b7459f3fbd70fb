"""generate() through full CUDA graphs gives the tokens of the compiled code that they captured."""

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


def models(model_type: str):
    """(compiled without graphs, compiled with full graphs), of the same weights."""
    sharing = {"indexer_types": ["full", "shared", "full"]} if model_type == "glm_moe_dsa" else {}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **sharing)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return [
        compile_model(replace_attention(copy.deepcopy(model)), graphs=graphs, backend="eager")
        for graphs in ("off", "full")
    ]


def tokens(model, prompt, new: int, **kwargs):
    cache = PagedCache(model.config, 8, prompt.shape[1] + new, index_dtype=torch.float32)
    out = model.generate(prompt, max_new_tokens=new, do_sample=False, past_key_values=cache, **kwargs)
    return out[:, prompt.shape[1] :]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_are_those_of_the_compiled_code_and_replays_are_counted(model_type):
    plain, graphed = models(model_type)
    prompt = torch.randint(1, 128, (2, 20), device="cuda")
    padding = torch.ones_like(prompt)
    padding[0, :7] = 0
    for kwargs in ({}, {"attention_mask": padding}):
        assert torch.equal(tokens(graphed, prompt, 40, **kwargs), tokens(plain, prompt, 40, **kwargs))
    stats = graphed.graph_stats()
    # each run decodes 39 tokens, first with all keys visible to all rows, later with a selection: two graphs a run
    assert (stats["graphs"], stats["replayed"], stats["captured"], stats["uncaptured"]) == ("full", 78, 4, 2)
    gc.collect()
    assert graphed.graph_stats()["dropped"] == 4  # with the caches of the two runs
    assert plain.graph_stats()["replayed"] == 0


def test_beams_and_prompt_lookup_replay():
    plain, graphed = models("deepseek_v32")
    prompt = torch.randint(1, 128, (1, 40), device="cuda").repeat(1, 2)
    for kwargs in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(tokens(graphed, prompt, 24, **kwargs), tokens(plain, prompt, 24, **kwargs))
    assert graphed.graph_stats()["replayed"] > 24


def test_a_full_cache_raises_before_a_replay():
    _, graphed = models("deepseek_v32")
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

"""DSAConfig.from_hf reads what transformers' own modules would compute, and refuses the rest with a reason."""

import dataclasses

import pytest
import torch
from transformers import DeepseekV4Config, LlamaConfig, LongcatFlashConfig

from compiled_dsa import DSAConfig, IndexFormat
from tests.huggingface.tiny_models import ALL_MODEL_TYPES, MODEL_TYPES, WINDOW, needs, tiny_config, tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_sizes_come_from_the_config(model_type):
    hf = tiny_config(model_type, kv_lora_rank=36, index_n_heads=17, v_head_dim=20, index_topk=9)
    config = DSAConfig.from_hf(hf, 2)
    for name in (
        "hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "index_n_heads", "index_head_dim", "index_topk", "attention_bias",
    ):  # fmt: skip
        assert getattr(config, name) == getattr(hf, name), name
    assert config.num_heads == hf.num_attention_heads
    assert config.qk_head_dim == 24


@pytest.mark.parametrize(
    ("model_type", "interleaved", "gate"),
    [("deepseek_v32", False, None), ("glm_moe_dsa", True, None), ("axk2", False, "query")],
)
def test_variants_come_from_the_model_type(model_type, interleaved, gate):
    hf = tiny_config(model_type)
    hf.indexer_rope_interleave = not interleaved  # ignored, as by transformers
    config = DSAConfig.from_hf(hf)
    assert config.index_format == IndexFormat(rope_interleaved=interleaved)
    assert config.output_gate == gate
    assert config.latent_norm_eps == config.index_k_norm_eps == 1e-6
    assert config.index_k_norm == "layer"


@needs("hy_v4")
def test_variants_of_hy_v4():
    config = DSAConfig.from_hf(tiny_config("hy_v4"))
    assert config.index_format == IndexFormat(rope_interleaved=False, rope_last=True)
    assert not config.rope_interleaved and config.sinks and config.output_gate == "value"


@needs("dots3_note_text")
def test_variants_of_dots3_note():
    hf = tiny_config("dots3_note_text", num_hidden_layers=2)
    indexed, sliding = (DSAConfig.from_hf(hf, i) for i in range(2))
    assert indexed.index_format == IndexFormat(rope_interleaved=True) and indexed.rope_interleaved
    assert (indexed.window, sliding.window) == (None, WINDOW) and sliding.index_shared and not indexed.index_shared
    assert (indexed.num_heads, sliding.num_heads) == (4, 2) and (indexed.kv_lora_rank, sliding.kv_lora_rank) == (32, 40)
    assert indexed.q_lora_scale == (64 / 48) ** 0.5 and sliding.latent_scale == (64 / 40) ** 0.5
    assert indexed.output_gate == sliding.output_gate == "head" and indexed.k_rope_norm and sliding.k_rope_norm
    assert indexed.latent_norm_eps == hf.rms_norm_eps == 1e-5


@needs("mistral_large4_text")
def test_variants_of_mistral_large4():
    hf = tiny_config("mistral_large4_text")
    rope, plain, reuse, indexed = (DSAConfig.from_hf(hf, i) for i in range(4))
    assert rope.q_lora_rank is None and rope.query_scaling and rope.index_format == IndexFormat(rope_interleaved=True)
    assert (rope.qk_nope_head_dim, rope.qk_rope_head_dim) == (16, 8)
    assert (plain.qk_nope_head_dim, plain.qk_rope_head_dim) == (24, 0) and plain.scale == rope.scale == 24**-0.5
    assert [c.kv_source for c in (rope, plain, reuse, indexed)] == [None, None, 0, 0]
    assert [c.index_shared for c in (rope, plain, reuse, indexed)] == [False, False, True, False]


@needs("mistral_large4_text")
@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([0, 1, 0, 1], r"kv_source_layers\[3\]=1; transformers gives the layer the latents of layer 0, .* with rope"),
        ([0, 0, 0, 0], r"kv_source_layers\[1\]=0; .* latents of no layer, the latest shared ones without rope"),
    ],
)
def test_latents_that_transformers_would_not_read_are_refused(sources, message):
    """It hands them on by kind, with or without rope, and not by the number of the layer."""
    hf = tiny_config("mistral_large4_text", kv_source_layers=sources)
    with pytest.raises(ValueError, match=message):
        [DSAConfig.from_hf(hf, i) for i in range(4)]


@needs("dots3_note_text")
def test_other_kinds_of_layers_are_refused():
    hf = tiny_config("dots3_note_text", use_dsa=False)
    with pytest.raises(ValueError, match=r"layer_types\[0\]='full_attention'; layers have an indexer or a sliding"):
        DSAConfig.from_hf(hf)


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_eps_and_scale_are_those_of_the_stock_module(model_type):
    model = tiny_model(model_type, rms_norm_eps=1e-5, rope_parameters=YARN)
    attention = model.get_decoder().layers[0].self_attn
    config = DSAConfig.from_hf(model.config)
    assert config.scale == attention.scaling
    if config.q_lora_rank is not None:
        assert config.latent_norm_eps == attention.q_a_layernorm.variance_epsilon
    assert config.latent_norm_eps == attention.kv_a_layernorm.variance_epsilon
    assert config.index_k_norm_eps == attention.indexer.k_norm.eps


def test_yarn_scale_of_deepseek_v32():
    hf = tiny_config("deepseek_v32", qk_nope_head_dim=128, qk_rope_head_dim=64, index_head_dim=64, rope_parameters=YARN)
    assert DSAConfig.from_hf(hf).scale == pytest.approx(0.135234, abs=5e-7)


@pytest.mark.parametrize("change", [{"rope_type": "default"}, {"mscale_all_dim": 0.0}, {"factor": 1.0}])
def test_scale_without_mscale(change):
    hf = tiny_config("deepseek_v32")
    hf.rope_parameters = {**YARN, **change}
    assert DSAConfig.from_hf(hf).scale == 24**-0.5


def test_shared_layers():
    types = ["full", "shared", "shared", "full", "shared"]
    hf = tiny_config("glm_moe_dsa", num_hidden_layers=5, indexer_types=types)
    assert [DSAConfig.from_hf(hf, i).index_shared for i in range(5)] == [False, True, True, False, True]


def test_a_first_layer_that_shares_is_refused():
    hf = tiny_config("glm_moe_dsa", indexer_types=["shared", "full", "full"])
    for layer in range(3):
        with pytest.raises(ValueError, match=r"indexer_types\[0\]='shared'; the first layer must be 'full'"):
            DSAConfig.from_hf(hf, layer)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "axk2"])
def test_without_indexer_types_every_layer_has_an_indexer(model_type):
    hf = tiny_config(model_type)
    assert getattr(hf, "indexer_types", None) is None
    assert not any(DSAConfig.from_hf(hf, i).index_shared for i in range(3))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig, "model_type='llama' is not supported: it is not a model with a lightning indexer over MLA"),
        (DeepseekV4Config, "model_type='deepseek_v4' .* it attends compressed key-value entries, not MLA latents"),
        (LongcatFlashConfig, "model_type='longcat_flash' .* it is dense MLA without an indexer"),
        (lambda: object(), "model_type=None is not supported"),
    ],
)
def test_other_models_are_refused_with_the_reason(config, reason):
    with pytest.raises(ValueError, match=reason + ".*; supported are deepseek_v32, glm_moe_dsa, axk2"):
        DSAConfig.from_hf(config())


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_out_of_range(layer):
    with pytest.raises(ValueError, match=f"layer_idx={layer}; the model has layers 0 to 2"):
        DSAConfig.from_hf(tiny_config("axk2"), layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_k_norm": "batch"}, "index_k_norm='batch'; it must be 'layer' or 'rms'"),
        ({"output_gate": "key"}, r"output_gate='key'; it must be one of None, 'query', 'value', 'head'"),
        ({"q_lora_rank": None, "output_gate": "query"}, "q_lora_rank=None; output_gate='query' is projected"),
        ({"window": 8}, "window=8; it must be at least 1, of a layer with index_shared=True"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7; it must be even"),
        ({"index_head_dim": 6}, "index_head_dim=6 is smaller than the rope's 8"),
        ({"index_head_dim": 24, "index_format": IndexFormat(True, hadamard=True)}, "24; .* needs a power of two"),
    ],
)
def test_inconsistent_sizes(change, message):
    config = DSAConfig.from_hf(tiny_config("deepseek_v32"))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_reading_a_config_leaves_it_alone():
    hf = tiny_config("glm_moe_dsa")
    before = hf.to_dict()
    DSAConfig.from_hf(hf)
    assert hf.to_dict() == before and torch.get_default_dtype() == torch.float32


def test_lists_that_the_class_ignores_are_ignored():
    """transformers' deepseek_v32 reads neither list, glm_moe_dsa only which layers share a selection."""
    deepseek, glm = tiny_config("deepseek_v32"), tiny_config("glm_moe_dsa")
    deepseek.indexer_types = ["full", "shared", "full"]
    glm.layer_types = ["indexed_attention", "sliding_attention", "indexed_attention"]
    glm.sliding_window = 5
    assert not DSAConfig.from_hf(deepseek, 1).index_shared
    assert DSAConfig.from_hf(glm, 1).index_shared and DSAConfig.from_hf(glm, 1).window is None


def test_lists_of_another_length_are_refused():
    config = tiny_config("glm_moe_dsa")
    config.indexer_types = ["full"]
    with pytest.raises(ValueError, match="indexer_types has 1 entries; the model has 3 layers"):
        DSAConfig.from_hf(config, 1)

"""Tiny models of every supported type, with weights at which the indexer's choice matters.

16 index heads: with fewer, many index scores are exactly 0 (every head is cut off by the relu), and among such ties
the stock implementations disagree with each other.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from compiled_dsa.huggingface import PagedCache, replace_attention

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa", "axk2")
# These go through fewer tests: what differs from the above, and the main paths. transformers before 5.23 lacks some.
RELATIVES = tuple(name for name in ("hy_v4", "dots3_note_text", "mistral_large4_text") if name in CONFIG_MAPPING)
ALL_MODEL_TYPES = MODEL_TYPES + RELATIVES
INDEX_TOPK = 16
WINDOW = 10
VOCABULARY = 128
CACHES = ("paged", "dynamic", "static", "none")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}


def tiny_config(model_type: str, **changes):
    """Config of a model of 3 layers (the first with a dense MLP); where selections are shared, the second layer takes
    the first's. mistral_large4 has 4: one with rope, one without, and two with the latents of the first."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": INDEX_TOPK,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    layers = changes.get("num_hidden_layers", 3)
    if model_type in ("glm_moe_dsa", "hy_v4"):
        sizes["indexer_types"] = ["shared" if i % 3 == 1 else "full" for i in range(layers)]
    if model_type == "axk2":
        sizes["gated_norm_rank"] = 16
    if model_type == "hy_v4":
        dense = changes.pop("first_k_dense_replace", 1)
        sizes["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(layers)]
        del sizes["first_k_dense_replace"]
    if model_type == "dots3_note_text":  # the layer between two indexed ones has a window, and sizes of its own
        sizes["layer_types"] = ["sliding_attention" if i % 3 == 1 else "indexed_attention" for i in range(layers)]
        sizes |= {
            "sliding_window": WINDOW,
            "n_shared_experts": 1,
            "shared_experts_intermediate_size": 32,
            "head_dim": 24,
        }
        window = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 40, "qk_nope_head_dim": 20}
        sizes |= {f"swa_{name}": size for name, size in window.items()}
        sizes |= {"swa_q_lora_rank": 36, "swa_head_dim": 28, "swa_v_head_dim": 20}
    if model_type == "mistral_large4_text":
        layers = changes.setdefault("num_hidden_layers", 4)
        sizes["num_hidden_layers"], sizes["final_logit_softcapping"] = layers, 30.0
        sizes["indexer_types"] = ["full", "full", "shared", "full"][:layers]
        sizes["no_rope_layers"] = [1, 0, 1, 1][:layers]
        sizes["kv_source_layers"] = [0, 1, 0, 0][:layers]
        del sizes["q_lora_rank"]
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> PreTrainedModel:
    """A stock model for causal language modelling, in eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    if model_type == "mistral_large4_text":  # transformers has no language model of its text part alone
        from transformers import MistralLarge4Config, MistralLarge4ForConditionalGeneration, PixtralVisionConfig

        vision = PixtralVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        )
        config = MistralLarge4Config(text_config=config, vision_config=vision, image_token_index=VOCABULARY - 1)
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        model = MistralLarge4ForConditionalGeneration(config).eval()
    else:
        model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2 if "indexer" in name else 0.08)
        elif name.endswith("sinks"):
            nn.init.normal_(parameter)
        elif "softmax_scaling" in name:
            nn.init.uniform_(parameter, 0.2, 1.0)
    return model.to(dtype)


def needs(model_type: str) -> pytest.MarkDecorator:
    """Mark of a test of a model that this release of transformers may not have."""
    return pytest.mark.skipif(model_type not in CONFIG_MAPPING, reason=f"transformers has no {model_type} yet")


def prompt(batch_size: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids int64 [B, S], none of them the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch_size, length), generator=generator)


def left_padding(batch_size: int, length: int) -> torch.Tensor:
    """Mask int64 [B, S] that leaves out row b's first 5b + 3 columns; the last row has none to leave out."""
    mask = torch.ones(batch_size, length, dtype=torch.int64)
    for b in range(batch_size - 1):
        mask[b, : 5 * b + 3] = 0
    return mask


@dataclass
class Pair:
    """A model as transformers made it, and a copy of it after ``replace_attention``."""

    stock: PreTrainedModel
    ours: PreTrainedModel
    _kept: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def config(self):
        return self.ours.config

    def stock_tokens(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options) -> torch.Tensor:
        """What the stock model generates without sampling, once for all tests that share the pair unchanged."""
        mask = None if attention_mask is None else attention_mask.tolist()
        key = str((ids.tolist(), mask, sorted(options.items())))
        if key not in self._kept:
            self._kept[key] = self.stock.generate(ids, attention_mask=attention_mask, **options)
        return self._kept[key]

    def cache(self, kind: str, batch_size: int, length: int, **options) -> dict[str, Any]:
        """Arguments of ``generate`` for a kind of cache."""
        if kind == "paged":
            return {"past_key_values": PagedCache(self.config, batch_size, length, **options)}
        return {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}[kind]


def make_pair(model_type: str, dtype: torch.dtype = torch.float32, **changes) -> Pair:
    stock = tiny_model(model_type, dtype, **changes)
    return Pair(stock, replace_attention(copy.deepcopy(stock)))


def small_pair(model_type: str) -> Pair:
    """For tests that compile, whose time is that of tracing layers: dense MLPs, and no more layers than it takes to
    share a selection or latents, or to have a window."""
    layers = {"glm_moe_dsa": 2, "dots3_note_text": 2, "mistral_large4_text": 3}.get(model_type, 1)
    return make_pair(model_type, num_hidden_layers=layers, first_k_dense_replace=layers)


def assert_same_tokens(pair: Pair, cache: PagedCache | None = None) -> torch.Tensor:
    """Six greedy tokens of ours and of the stock model after a prompt of two rows; returns them."""
    options = {"do_sample": False, "max_new_tokens": 6}
    cache = PagedCache(pair.config, 2, 32) if cache is None else cache
    cache.reset()
    got = pair.ours.generate(prompt(2, 24), past_key_values=cache, **options)
    assert torch.equal(got, pair.stock.generate(prompt(2, 24), **options))
    return got

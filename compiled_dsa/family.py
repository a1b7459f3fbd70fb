"""The models of the family: what each computes otherwise than DeepSeek-V3.2, as one entry a model.

The entries follow transformers' modeling files (5.23), which hard-code these choices in each model's classes. Sizes are
no part of them: those come from the config (config.py).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSpec:
    """One model_type; the defaults are DeepSeek-V3.2.

    Attributes:
        attention: transformers' attention class.
        passes_selection: its decoder layers hand the selection of one layer on to the next; only then does it read
            ``indexer_types``.
        windows: it reads ``layer_types``, whose layers have an indexer or a sliding window.
        config_eps: which eps of ``DSAConfig`` are the config's ``rms_norm_eps``; the others are 1e-6, whatever the
            config says.
        scaled_latents: normalised latents are multiplied by sqrt(hidden_size / their size).
        rope_interleaved, index_rope_interleaved, index_rope_last, output_gate, sinks, k_rope_norm, query_scaling: as in
            ``DSAConfig`` and ``IndexFormat``.
    """

    attention: str
    passes_selection: bool = False
    windows: bool = False
    rope_interleaved: bool = True
    index_rope_interleaved: bool = False
    index_rope_last: bool = False
    config_eps: tuple[str, ...] = ()
    output_gate: str | None = None
    sinks: bool = False
    k_rope_norm: bool = False
    scaled_latents: bool = False
    query_scaling: bool = False


MODELS = {
    "deepseek_v32": ModelSpec("DeepseekV32Attention"),
    "glm_moe_dsa": ModelSpec("GlmMoeDsaAttention", passes_selection=True, index_rope_interleaved=True),
    "axk2": ModelSpec("AXK2Attention", output_gate="query"),
    "hy_v4": ModelSpec(
        "HYV4Attention",
        passes_selection=True,
        rope_interleaved=False,
        index_rope_last=True,
        config_eps=("index_k_norm_eps",),
        output_gate="value",
        sinks=True,
    ),
    "dots3_note_text": ModelSpec(
        "Dots3NoteTextAttention",
        windows=True,
        index_rope_interleaved=True,
        config_eps=("latent_norm_eps",),
        output_gate="head",
        k_rope_norm=True,
        scaled_latents=True,
    ),
    "mistral_large4_text": ModelSpec(
        "MistralLarge4TextAttention",
        passes_selection=True,
        index_rope_interleaved=True,
        config_eps=("latent_norm_eps",),
        query_scaling=True,
    ),
}

# Relatives whose attention is not this one, and what differs.
_REFUSED = {
    "glm5_next": "it selects pooled blocks of keys, not tokens",
    "qwen4_exp": "it selects mean-pooled blocks of keys for grouped-query attention",
    "deepseek_v4": "it attends compressed key-value entries, not MLA latents",
    "minimax_m3_vl": "it selects blocks of 128 keys for grouped-query attention",
    "longcat_flash": "it is dense MLA without an indexer",
    "step3p5": "it has no indexer",
}


def model_spec(config: Any) -> ModelSpec:
    """The entry of a (text) config of Hugging Face; ValueError with the reason for a model that is not supported."""
    model_type = getattr(config, "model_type", None)
    if model_type in MODELS:
        return MODELS[model_type]
    why = _REFUSED.get(
        str(model_type).removesuffix("_text"), "it is not a model with a lightning indexer over MLA latents"
    )
    raise ValueError(f"model_type={model_type!r} is not supported: {why}; supported are {', '.join(MODELS)}")

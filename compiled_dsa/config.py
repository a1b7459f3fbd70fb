"""What one layer of DeepSeek Sparse Attention computes, read from a Hugging Face config."""

import math
from dataclasses import dataclass, replace
from typing import Any

from compiled_dsa.custom_ops.index_topk import check_forced
from compiled_dsa.family import model_spec

OUTPUT_GATES = (None, "query", "value", "head")
OPTIONS = ("deterministic", "scratch_bytes", "index_init_tokens", "index_local_tokens")  # which no weights depend on


@dataclass(frozen=True)
class IndexFormat:
    """How index keys are made before they are cached. Every writer and reader of a cache takes it from the config.

    Attributes:
        rope_interleaved: rope pairs are (0,1),(2,3).. when True, (0,R/2),(1,R/2+1).. when False.
        rope_last: the rotated dims are the last R of the index head when True, the first R when False.
        hadamard: keys and queries are multiplied by an orthonormal Hadamard matrix, which leaves exact scores alone
            and spreads outliers before quantisation; index_head_dim must then be a power of two.
        scale_ue8m0: fp8 scales are rounded up to powers of two.
    """

    rope_interleaved: bool
    rope_last: bool = False
    hadamard: bool = False
    scale_ue8m0: bool = False


@dataclass(frozen=True)
class DSAConfig:
    """Sizes and variants of one DSA layer. Names follow the Hugging Face configs.

    Attributes:
        q_lora_rank: None: queries [T, H, N+R] are projected from the hidden states (``q_proj``), index queries from a
            LayerNorm of them (``q_input_norm``, eps 1e-6).
        qk_rope_head_dim: 0: no rope, in the indexer neither.
        scale: multiplies q.k, yarn's mscale^2 included.
        rope_interleaved: layout of the rope of queries and latents; pairs as in ``IndexFormat``.
        index_shared: the layer has no indexer and takes the selection of the last layer that has one.
        window: the layer has no indexer and attends the latest ``window`` tokens, its own among them; None: no window.
        output_gate: what the sigmoid that multiplies the attention's output [T, H, V] is taken of. "query": a [T, H, V]
            that ``q_gate_proj`` makes beside the queries (axk2); "value": ``gate_proj(x)`` [T, H, V] (hy_v4);
            "head": ``g_proj(x)`` [T, H] (dots3_note); None: no gate.
        sinks: each head has one more logit ``sinks`` [H] in its softmax, which takes weight and gives no value.
        q_lora_scale, latent_scale: multiply q_lora [T, q_lora_rank], for the indexer too, and the latents [T, L] after
            their norms, before they are cached.
        query_scaling: queries [T, H, N+R] after the rope, and index queries [T, HI, D] before it, are multiplied by
            scale * ln(position + 1) + bias, with learned ``softmax_scaling.scale`` and ``.bias``, [H] and [HI].
        kv_source: the layer has no latents of its own and attends those of this earlier layer; None: its own.
        k_rope_norm: the keys' rope part [T, R] goes through an RMS norm of its own before the rope.
        latent_norm_eps: eps of these norms.
        index_init_tokens, index_local_tokens: the first and the last so many of the tokens that a row sees are always
            selected, whatever their scores; the indexer fills the rest of index_topk. transformers' own forward, which
            some calls need, knows no such tokens.
        index_k_norm: "layer" (LayerNorm with weight and bias) or "rms".
        deterministic: top-k prefers the lowest position among equal scores, selects in the order of positions and
            replays bitwise; and a row's attention, given its queries, keys and selection, has the same bits whatever
            other rows the batch has. The ops of both alone promise that: GEMMs around them (projections, in a decode
            also absorption and un-absorption) round with the number of rows. What it costs: README, "Numbers".
        scratch_bytes: bound on the temporary memory of each prefill op.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_format: IndexFormat
    scale: float
    rope_interleaved: bool = True
    index_shared: bool = False
    window: int | None = None
    output_gate: str | None = None
    sinks: bool = False
    q_lora_scale: float = 1.0
    latent_scale: float = 1.0
    k_rope_norm: bool = False
    query_scaling: bool = False
    kv_source: int | None = None
    attention_bias: bool = False
    latent_norm_eps: float = 1e-6
    index_init_tokens: int = 0
    index_local_tokens: int = 0
    index_k_norm: str = "layer"
    index_k_norm_eps: float = 1e-6
    deterministic: bool = False
    scratch_bytes: int = 512 << 20

    def __post_init__(self):
        if self.index_k_norm not in ("layer", "rms"):
            raise ValueError(f"index_k_norm={self.index_k_norm!r}; it must be 'layer' or 'rms'")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic={self.deterministic!r}; it must be True or False")
        for name, least in (("scratch_bytes", 1), ("index_init_tokens", 0), ("index_local_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}; it must be an integer of at least {least}")
        check_forced(self.index_init_tokens, self.index_local_tokens, self.index_topk)
        if self.output_gate not in OUTPUT_GATES:
            raise ValueError(
                f"output_gate={self.output_gate!r}; it must be one of {', '.join(map(repr, OUTPUT_GATES))}"
            )
        if self.q_lora_rank is None and self.output_gate == "query":
            raise ValueError("q_lora_rank=None; output_gate='query' is projected from q_lora")
        if self.window is not None and (self.window < 1 or not self.index_shared):
            raise ValueError(f"window={self.window}; it must be at least 1, of a layer with index_shared=True")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim}; it must be even")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(f"index_head_dim={self.index_head_dim} is smaller than the rope's {self.qk_rope_head_dim}")
        D = self.index_head_dim
        if self.index_format.hadamard and D & (D - 1):
            raise ValueError(f"index_head_dim={D}; a Hadamard transform needs a power of two")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def index_scale(self) -> float:
        """What multiplies the weights of index heads beside the scales of their queries."""
        return self.index_n_heads**-0.5 * self.index_head_dim**-0.5

    def with_options(self, **options: Any) -> "DSAConfig":
        """A copy with other values of fields in ``OPTIONS``, those that a checkpoint leaves open.

        Raises:
            ValueError: another field, or a value that is not allowed.
        """
        for name, value in options.items():
            if name not in OPTIONS:
                raise ValueError(f"{name}={value!r} is no option; there are {', '.join(OPTIONS)}")
        return replace(self, **options)

    @classmethod
    def from_hf(cls, config: Any, layer_idx: int = 0) -> "DSAConfig":
        """Reads layer ``layer_idx`` of a Hugging Face config, a composite one's text part; family.py lists the models.

        What is no size comes from ``model_type``: Hugging Face hard-codes it per class and ignores, for example, an
        ``indexer_rope_interleave`` in the config, and so does this.

        Raises:
            ValueError: an unsupported model_type, a layer index out of range, a first layer without an indexer, a layer
                of another kind, latents of a layer that transformers would not read, or more tokens that are always
                selected than index_topk.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        spec = model_spec(config)
        if not 0 <= layer_idx < config.num_hidden_layers:
            raise ValueError(f"layer_idx={layer_idx}; the model has layers 0 to {config.num_hidden_layers - 1}")
        if getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[layer_idx]
        window = _window(config, layer_idx) if spec.windows else None
        q_lora_rank = getattr(config, "q_lora_rank", None)
        rope = _has_rope(config, layer_idx)
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim + (0 if rope else config.qk_rope_head_dim),
            qk_rope_head_dim=config.qk_rope_head_dim if rope else 0,
            v_head_dim=config.v_head_dim,
            index_n_heads=config.index_n_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            index_init_tokens=getattr(config, "index_init_tokens", None) or 0,
            index_local_tokens=getattr(config, "index_local_tokens", None) or 0,
            index_format=IndexFormat(spec.index_rope_interleaved, rope_last=spec.index_rope_last),
            scale=softmax_scale(config),
            rope_interleaved=spec.rope_interleaved,
            index_shared=window is not None or (spec.passes_selection and _is_shared(config, layer_idx)),
            window=window,
            output_gate=spec.output_gate,
            sinks=spec.sinks,
            k_rope_norm=spec.k_rope_norm,
            query_scaling=spec.query_scaling,
            kv_source=_kv_source(config, layer_idx),
            attention_bias=config.attention_bias,
            index_k_norm=getattr(config, "index_k_norm_type", None) or "layer",
            q_lora_scale=(config.hidden_size / q_lora_rank) ** 0.5 if spec.scaled_latents else 1.0,
            latent_scale=(config.hidden_size / config.kv_lora_rank) ** 0.5 if spec.scaled_latents else 1.0,
            **dict.fromkeys(spec.config_eps, config.rms_norm_eps),
        )


def softmax_scale(config: Any) -> float:
    """(N+R)^-1/2, for ropes with ``mscale_all_dim`` times mscale^2, mscale = 0.1*mscale_all_dim*ln(factor) + 1."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim") and rope["factor"] > 1:
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2
    return scale


def _of_layer(config: Any, name: str, layer_idx: int) -> Any:
    """The entry of a layer in one of the config's lists.

    Raises:
        ValueError: the list is not as long as the model has layers.
    """
    entries = getattr(config, name)
    if len(entries) != config.num_hidden_layers:
        raise ValueError(f"{name} has {len(entries)} entries; the model has {config.num_hidden_layers} layers")
    return entries[layer_idx]


def _window(config: Any, layer_idx: int) -> int | None:
    kind = _of_layer(config, "layer_types", layer_idx)
    if kind not in ("indexed_attention", "sliding_attention"):
        raise ValueError(f"layer_types[{layer_idx}]={kind!r}; layers have an indexer or a sliding window")
    return config.sliding_window if kind == "sliding_attention" else None


def _has_rope(config: Any, layer_idx: int) -> bool:
    layers = getattr(config, "no_rope_layers", None)  # transformers' name; its entries say which layers do have rope
    return layers is None or bool(layers[layer_idx])


def _kv_source(config: Any, layer_idx: int) -> int | None:
    sources = getattr(config, "kv_source_layers", None)
    if sources is None or sources[layer_idx] == layer_idx:
        return None
    # transformers passes on the latest shared latents of layers with rope, and the latest of those without
    rope = _has_rope(config, layer_idx)
    handed = [i for i in range(layer_idx) if i in sources[i + 1 :] and _has_rope(config, i) == rope]
    if handed[-1:] != [sources[layer_idx]]:
        raise ValueError(
            f"kv_source_layers[{layer_idx}]={sources[layer_idx]}; transformers gives the layer the latents of "
            f"{f'layer {handed[-1]}' if handed else 'no layer'}, the latest shared ones "
            f"{'with' if rope else 'without'} rope"
        )
    return sources[layer_idx]


def _is_shared(config: Any, layer_idx: int) -> bool:
    types = getattr(config, "indexer_types", None)  # absent: every layer has its own indexer
    if types is None:
        return False
    if types[0] == "shared":
        raise ValueError("indexer_types[0]='shared'; the first layer must be 'full', there is nothing to share yet")
    return _of_layer(config, "indexer_types", layer_idx) == "shared"

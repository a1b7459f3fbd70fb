"""compiled_dsa inside Hugging Face transformers.

model = replace_attention(model)
model = compiled_dsa.compile_model(model)
model.generate(**inputs, past_key_values=PagedCache(model.config, batch_size, max_len))
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from compiled_dsa.config import DSAConfig
from compiled_dsa.family import model_spec
from compiled_dsa.huggingface import masks
from compiled_dsa.huggingface.attention import AttentionStats, DSAAttentionMixin, configure, convert
from compiled_dsa.huggingface.cache import PagedCache
from compiled_dsa.huggingface.selections import capture_indices, inject_indices
from compiled_dsa.weights import hold_weight

__all__ = ["AttentionStats", "PagedCache", "capture_indices", "inject_indices", "replace_attention"]

OLDEST, NEWEST = (5, 17), (5, 23)  # releases of transformers whose calls of attention modules are known
SLIDING = "sliding_attention"  # the layer type of windows


def replace_attention(model: PreTrainedModel, **options: int) -> PreTrainedModel:
    """Turns the attention of a transformers model into compiled_dsa's, in place, and returns the model.

    Parameters, their names, hooks and saved checkpoints stay as they are. The model then works with ``PagedCache``,
    with transformers' own Dynamic and Static caches and without a cache. Calls that the ops cannot serve (gradients,
    dropout, masks over queries and keys, packed sequences, requested attention weights, autocast) run its own forward
    and are counted in ``model.dsa_stats``; with a PagedCache they are a ValueError. Layers with a sliding window
    (dots3_note) run on the ops over a PagedCache, and their own forward over any other.

    A second call changes nothing but the options that it names. The attention implementation is written into
    ``model.config``: another, stock model that shares this config object needs a copy of it, made before.

    Args:
        options: what a checkpoint leaves open, for every layer and its indexer (``DSAConfig`` says more):
            ``deterministic``: top-k prefers the lowest position among equal scores, selects in the order of positions
            and replays bitwise, and a row's attention has the same bits in any batch, which costs time where rows are
            few.
            ``scratch_bytes``: bound on the temporary memory of each prefill op, 512 MiB by default.
            ``index_init_tokens``, ``index_local_tokens``: the first and the last so many tokens that are always
            selected, by default as ``model.config`` says.

    Raises:
        ValueError: the model is none of those in family.py (the message says why), the release of transformers is not
            one of 5.17 to 5.23, an option is unknown or has a value that is not allowed, or the model is compiled and
            options are given. The model is unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; it must be a transformers PreTrainedModel")
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        raise ValueError(
            f"transformers {transformers.__version__} is not supported; it calls attention modules in another way than "
            f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        )
    config = model.config.get_text_config(decoder=True)
    DSAConfig.from_hf(config).with_options(**options)
    if options and hasattr(model, "graph_stats"):
        raise ValueError(f"the model is compiled; {', '.join(options)} must be given before compile_model")
    spec = model_spec(config)
    modules = [m for m in model.modules() if type(m).__name__ == spec.attention]
    converted = [m for m in model.modules() if isinstance(m, DSAAttentionMixin)]  # of a part replaced before
    if not modules and not converted:
        raise ValueError(f"model has no {spec.attention}; replace_attention takes the whole model or its base model")
    # all configs are read before any module is changed
    changed = [(layer, layer.dsa_config.with_options(**options)) for layer in converted]
    new = [(module, DSAConfig.from_hf(config, module.layer_idx).with_options(**options)) for module in modules]
    for layer, dsa_config in changed:
        configure(layer, dsa_config)
    if hasattr(model, "dsa_stats"):
        return model
    masks.register()
    model.dsa_stats = converted[0].dsa_stats if converted else AttentionStats()
    for module, dsa_config in new:
        convert(module, dsa_config, spec.passes_selection, model.dsa_stats)
    model.dsa_layers = [m for m in model.modules() if isinstance(m, DSAAttentionMixin)]
    parts = [name for name in model.config.sub_configs if getattr(model.config, name) is config]  # vision stays stock
    model.set_attn_implementation(dict.fromkeys(parts, masks.IMPLEMENTATION) if parts else masks.IMPLEMENTATION)
    model.register_forward_pre_hook(_begin_forward, with_kwargs=True)
    return model


def _begin_forward(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]):
    """Forward pre-hook: what the host has to check and note before a forward, most of it for a PagedCache."""
    if torch.compiler.is_compiling():
        return None
    dtype = model.dtype
    for layer in model.dsa_layers:
        layer.keep_packed()
        up = layer.kv_b_proj
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in up.parameters())):  # then it is called
            hold_weight(up, dtype)
    arguments = dict(zip(_positional_names(type(model).forward), args)) | kwargs
    cache = arguments.get("past_key_values")
    if not isinstance(cache, PagedCache):
        return None
    _refuse_stock_forward(model, arguments)
    if cache.serves != (id(model.dsa_stats), dtype):  # a walk over all modules, so not at every step
        layers = [m for m in model.modules() if isinstance(m, DSAAttentionMixin)]
        for layer in layers:
            layer.refuse_stock(layer.weights_reason())
        cache.check_model([layer.dsa_config for layer in layers], dtype)
        cache.serves = id(model.dsa_stats), dtype
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None  # transformers names what is missing
    cache.allocate(model.device, dtype)
    mask = arguments.get("attention_mask")
    columns_real = cache.begin(tokens.shape[0], tokens.shape[1], _column_mask(mask))
    if isinstance(mask, dict):  # generate() has made the masks, one a layer type
        arguments["attention_mask"] = {kind: None if kind == SLIDING else columns_real for kind in mask}
    else:
        arguments["attention_mask"] = columns_real
    return (), arguments


def _column_mask(mask: Tensor | dict[str, Tensor | None] | None) -> Tensor | None:
    """Of masks by layer type the one of indexed layers, which tells columns with tokens from padding."""
    return next(m for kind, m in mask.items() if kind != SLIDING) if isinstance(mask, dict) else mask


@functools.cache
def _positional_names(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _refuse_stock_forward(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raises before the cache notes anything when the call would need transformers' own forward."""
    embeds = arguments.get("inputs_embeds")
    module = next(m for m in model.modules() if isinstance(m, DSAAttentionMixin))
    hidden = torch.empty(0, device=model.device) if embeds is None else embeds
    mask = _column_mask(arguments.get("attention_mask"))
    module.refuse_stock(module.stock_reason(hidden, mask, arguments["past_key_values"], arguments))
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.base_model.parameters()):
        module.refuse_stock("gradients")  # of any layer, not of the first only
    positions = arguments.get("position_ids")
    if mask is None and positions is not None and positions.shape[-1] > 1 and bool((positions.diff() <= 0).any()):
        module.refuse_stock("packed")

"""Masks between transformers and compiled_dsa, and the attention function under which HF's own forward runs.

transformers asks a registered function for the mask of a step. Ours answers with which *columns* are real tokens
(``None`` or bool [B, columns]) instead of the [B, 1, S, columns] square that the stock models build at every step:
causality follows from the lengths.
"""

import sys

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

IMPLEMENTATION = "compiled_dsa"


def column_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    **kwargs,
) -> Tensor | None:
    """Mask function for transformers: bool [B, kv_length], True where a column holds a token; None when all do.

    A mask that is more than causal (packed sequences, user-given overlays) cannot be said that way and is built whole,
    bool [B, 1, q_length, kv_length], for which the modules run HF's own forward.
    """
    if mask_function is not causal_mask_function:
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    return None if attention_mask is None else fit_columns(attention_mask, kv_length)


def fit_columns(mask: Tensor, columns: int) -> Tensor:
    """A 2D mask as bool [B, columns]: columns that it does not reach hold no token yet."""
    mask = mask.bool()[:, :columns]
    return torch.nn.functional.pad(mask, (0, columns - mask.shape[1]))


def square_mask(columns_real: Tensor | None, batch_size: int, first_column, q_length: int, columns: int, device):
    """The bool [B, 1, S, columns] mask that HF's own forward expects, from the column mask.

    Args:
        columns_real: bool [B, columns] or None.
        first_column: column of the step's first token, an int or a 0-d tensor.
    """
    query = torch.arange(q_length, device=device).unsqueeze(1) + first_column
    mask = (torch.arange(columns, device=device) <= query).expand(batch_size, 1, q_length, columns)
    return mask if columns_real is None else mask & columns_real[:, None, None, :]


def selected_attention(module, query, key, value, attention_mask, indices=None, **kwargs):
    """Attention function for transformers, used by HF's own forward: the mask ANDed with the indexer's choice.

    It is sdpa, or the module's eager attention for what sdpa lacks: attention weights, when the caller asked for them,
    and sinks (``s_aux``).
    """
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
        if attention_mask is None or attention_mask.dtype == torch.bool:
            attention_mask = chosen if attention_mask is None else attention_mask & chosen
        else:
            attention_mask = attention_mask.masked_fill(~chosen, torch.finfo(query.dtype).min)
    if not wants_weights(module, kwargs) and kwargs.get("s_aux") is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        additive = torch.zeros_like(attention_mask, dtype=query.dtype)
        attention_mask = additive.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).stock_class.__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, **kwargs)


def wants_weights(module, kwargs: dict) -> bool:
    """True when the caller asked for attention weights, by argument or config."""
    return bool(kwargs.get("output_attentions", getattr(module.config, "output_attentions", False)))


def register() -> None:
    """Makes ``attn_implementation="compiled_dsa"`` known to transformers."""
    AttentionMaskInterface.register(IMPLEMENTATION, column_mask)
    AttentionInterface.register(IMPLEMENTATION, selected_attention)

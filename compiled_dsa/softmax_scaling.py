"""Scaled softmax: how positions enter the queries of mistral_large4, beside rope."""

from typing import Any

import torch
from torch import Tensor, nn


class SoftmaxScaling(nn.Module):
    """Parameters of ``query_factors``, named as in Hugging Face's mistral_large4; as made they scale by 1."""

    def __init__(self, num_heads: int, device=None, dtype=None):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype))


def query_factors(scaling: Any, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What queries [T, heads, .] are multiplied by, [T, heads, 1]: scale * ln(position + 1) + bias, in ``dtype``.

    Args:
        scaling: a module with ``scale`` and ``bias``, [heads].
        positions: int [T].
    """
    log_position = (positions + 1).float().log().to(dtype).unsqueeze(-1)
    return (scaling.scale.to(dtype) * log_position + scaling.bias.to(dtype)).unsqueeze(-1)

"""A transformers model as a serving loop calls it: a flat list of rows, described by a Batch, over a PagePool."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_dsa import Batch, DSAConfig, PagePool, SparseAttention
from compiled_dsa.huggingface import replace_attention

SERVED = ("deepseek_v32", "glm_moe_dsa", "axk2")


class ServedModel(nn.Module):
    """The layers of a transformers model (deepseek_v32, glm_moe_dsa, axk2), whose parameters it shares, over rows
    instead of a [B, S] grid.

    Args:
        model: a causal language model; its attention is replaced.

    Raises:
        ValueError: another model; its decoder layers do more around attention and MLP than ``forward`` does here.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        if model.config.model_type not in SERVED:
            raise ValueError(f"model_type={model.config.model_type!r}; it must be one of {', '.join(SERVED)}")
        self.model = replace_attention(model)
        self.configs = [DSAConfig.from_hf(model.config, i) for i in range(model.config.num_hidden_layers)]

    def make_pool(self, num_pages: int, max_requests: int, max_len: int, **dtypes: torch.dtype) -> PagePool:
        """Pools for all layers on the model's device. ``latent_dtype`` and ``index_dtype``: the model's by default."""
        dtypes = {"latent_dtype": self.model.dtype, "index_dtype": self.model.dtype} | dtypes
        device = self.model.device
        return PagePool(
            self.configs, num_pages=num_pages, max_requests=max_requests, max_len=max_len, device=device, **dtypes
        )

    def forward(self, ids: Tensor, batch: Batch, pool: PagePool) -> Tensor:
        """Logits [T, vocabulary] of the rows ``ids`` [T], whose keys are stored on the way."""
        return self.forward_and_selections(ids, batch, pool)[0]

    def forward_and_selections(self, ids: Tensor, batch: Batch, pool: PagePool) -> tuple[Tensor, list[Tensor]]:
        """(logits, the slots int32 [T, index_topk] that each indexer selects; none where scores are skipped)."""
        base = self.model.model
        x = base.embed_tokens(ids)  # [T, hidden]
        cos, sin = base.rotary_emb(x.unsqueeze(0), batch.positions.unsqueeze(0))  # [1, T, R], the angles twice
        half = cos.shape[-1] // 2
        cos, sin = cos[0, :, :half], sin[0, :, :half]
        topk, selections = None, []
        for layer, pools in zip(base.layers, pool.layers):
            attended, topk = SparseAttention.forward(
                layer.self_attn, layer.input_layernorm(x), cos, sin, batch, pools, topk
            )
            if topk is not None and layer.self_attn.indexer is not None:
                selections.append(topk)
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x).unsqueeze(0)).squeeze(0)
        return self.model.lm_head(base.norm(x)), selections

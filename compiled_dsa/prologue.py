"""What lies between the GEMMs of a layer before its attention, in two ops, for the layers that these know.

Norms, ropes, quantisation, both stores and the weights of index heads: ten launches as plain torch after Inductor,
whose fusions end at every reduction over columns of another kind. Layers of other kinds go on as plain torch. In a
decode, a third op selects beside the absorption.

Legend: T rows, H heads, N nope dim, R rope dim, L latent dim, HI index heads, D index head dim, K top-k.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_dsa.batch import Batch
from compiled_dsa.cache import LayerPools
from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.encode_queries import encode_queries
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.custom_ops.select_and_absorb import select_and_absorb
from compiled_dsa.custom_ops.store_tokens import store_tokens
from compiled_dsa.packing import group_names, product, unhooked
from compiled_dsa.weights import up_projection


class Encoded(NamedTuple):
    """Queries as the ops take them.

    Attributes:
        q_nope, q_rope: [T, H, N], and [T, H, R] after the rope.
        index_q, weights: e4m3 [T, HI, D] and fp32 [T, HI] of index_topk; None where nothing is scored.
        made: products of packed projections of the hidden states, by name.
    """

    q_nope: Tensor
    q_rope: Tensor
    index_q: Tensor | None
    weights: Tensor | None
    made: dict[str, Tensor]


def _known(c: DSAConfig) -> bool:
    """Does the layer do what the ops do, and nothing else?"""
    index = c.index_format
    plain = c.q_lora_rank is not None and c.kv_source is None and not (c.k_rope_norm or c.query_scaling)
    unscaled = c.q_lora_scale == 1.0 and c.latent_scale == 1.0 and c.output_gate != "query"
    indexed = not c.index_shared and c.index_k_norm == "layer" and not (index.hadamard or index.rope_last)
    return plain and unscaled and indexed


def fuses(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, pools: LayerPools) -> bool:
    """Do the ops serve a call? Its pools must be such that they write, and its norms of the kinds that they know."""
    if not _known(layer.dsa_config) or pools.index_keys is None or pools.index_keys.dtype != torch.uint8:
        return False
    if 2 * cos.shape[-1] != layer.dsa_config.qk_rope_head_dim:  # angles of other layers, in a layer without rope
        return False
    if cos.shape[-1] > 1 and (cos.stride(-1), sin.stride(-1)) != (1, 1):  # as of every other one of R: kernels refuse
        return False
    q, kv, k = layer.q_a_layernorm, layer.kv_a_layernorm, layer.indexer.k_norm
    eps = _rms_eps(q)
    if eps is None or eps != _rms_eps(kv) or type(k) is not nn.LayerNorm or k.bias is None:
        return False
    same_dtype = q.weight.dtype == kv.weight.dtype == x.dtype and pools.latents.dtype in (torch.uint8, x.dtype)
    return same_dtype and cos.dtype.itemsize <= 4


def _rms_eps(norm: nn.Module) -> float | None:
    """eps of a root-mean-square norm of ours or of transformers, which round alike; None of any other module."""
    ours = type(norm).__module__.split(".")[0] in ("compiled_dsa", "transformers")
    if not ours or not type(norm).__name__.endswith("RMSNorm") or set(norm._parameters) != {"weight"}:
        return None
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) if unhooked(norm) else None


def store_and_encode(
    layer: Any, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, pools: LayerPools, *, scores: bool
) -> Encoded:
    """Stores the keys of hidden states x [T, hidden] and makes their queries; arguments as of the layer's forward.

    Only where ``fuses``. ``scores``: index queries are wanted.
    """
    c, indexer = layer.dsa_config, layer.indexer
    T = x.shape[0]
    made = layer.products("hidden", x, group_names("hidden", scores=scores), fp32=scores, rounded=False)
    q_a = product(layer, "q_a_proj", x, made)
    kv = product(layer, "kv_a_proj_with_mqa", x, made)
    k = product(indexer, "wk", x, made)
    q_norm, k_norm = layer.q_a_layernorm, indexer.k_norm
    q_lora = x.new_empty(T, c.q_lora_rank)
    index = c.index_format
    store_tokens(
        pools.latents, pools.index_keys, q_lora, q_a, kv, k, q_norm.weight, layer.kv_a_layernorm.weight, k_norm.weight,
        k_norm.bias, cos, sin, batch.slots, _rms_eps(q_norm), k_norm.eps, c.rope_interleaved, index.rope_interleaved,
        index.scale_ue8m0,
    )  # fmt: skip
    projected = layer.products("q_lora", q_lora, group_names("q_lora", scores=scores))
    q = product(layer, "q_b_proj", q_lora, projected).unflatten(-1, (-1, c.qk_head_dim))
    q_nope, rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    if not scores:
        return Encoded(q_nope, layer.rotate(rope, cos.unsqueeze(1), sin.unsqueeze(1)), None, None, made)
    index_q = product(indexer, "wq_b", q_lora, projected).unflatten(-1, (-1, c.index_head_dim))
    head_weights = indexer.head_weights(x, fp32=True, made=made)
    q_rope = x.new_empty(rope.shape)
    codes = torch.empty(index_q.shape, dtype=FP8, device=x.device)
    weights = torch.empty(head_weights.shape, dtype=torch.float32, device=x.device)
    encode_queries(
        q_rope, codes, weights, rope, index_q, head_weights, cos, sin, c.index_scale, c.rope_interleaved,
        index.rope_interleaved, index.scale_ue8m0,
    )  # fmt: skip
    return Encoded(q_nope, q_rope, codes, weights, made)


def select_and_absorb_queries(
    layer: Any, e: Encoded, batch: Batch, pools: LayerPools, positions_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(selection int32 [T, K], absorbed queries [T, H, L] in memory head by head) of a decode that scores."""
    c = layer.dsa_config
    T, H, N = e.q_nope.shape
    kv_b = up_projection(layer.kv_b_proj, N + c.v_head_dim, e.q_nope.dtype)
    topk = torch.empty(T, c.index_topk, dtype=torch.int32, device=e.q_nope.device)
    q_latent = e.q_nope.new_empty(H, T, c.kv_lora_rank).transpose(0, 1)
    where = (pools.index_keys, batch.page_table, batch.req_of_row, batch.visible)
    absorption = (e.q_nope, kv_b[:, :N], q_latent)
    options = (positions_out, c.index_init_tokens, c.index_local_tokens)
    select_and_absorb(e.index_q, e.weights, *where, topk, c.deterministic, *absorption, *options)
    return topk, q_latent

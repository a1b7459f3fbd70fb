"""The lightning indexer: which keys each query attends.

Legend: T rows, HI index heads, D index head dim, R rope dims, K = index_topk.
"""

import functools

import torch
from torch import Tensor, nn

from compiled_dsa.batch import DECODE, Batch
from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.index_topk import index_topk_decode, index_topk_prefill
from compiled_dsa.custom_ops.layout import compute_dtype
from compiled_dsa.custom_ops.rope import rotate_part
from compiled_dsa.custom_ops.store_index_keys import quantize_rows, store_index_keys
from compiled_dsa.packing import product
from compiled_dsa.softmax_scaling import SoftmaxScaling, query_factors
from compiled_dsa.weights import FP8, effective_weight, is_readable


@functools.cache
def hadamard_matrix(size: int) -> Tensor:
    """Orthonormal Hadamard matrix [size, size] in fp64 (Sylvester's construction)."""
    with torch.inference_mode(False):  # it is kept, and may be needed outside of inference mode
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        return matrix / size**0.5


def write_visible_positions(batch: Batch, positions_out: Tensor | None) -> None:
    """Where every visible key is selected: positions 0, 1, .. of each row, then -1, into ``positions_out`` if given."""
    if positions_out is not None:
        lanes = torch.arange(positions_out.shape[1], dtype=torch.int32, device=batch.visible.device)
        positions_out.copy_(torch.where(lanes < batch.visible[:, None], lanes, -1))


class Indexer(nn.Module):
    """Scores all visible keys with a few cheap heads and selects the best K (DeepSeek-V3.2 report, section 2.1).

    Parameter names are those of Hugging Face: ``wq_b``, ``wk``, ``k_norm``, ``weights_proj``.
    A cache in the model's dtype gives Hugging Face's rounding (norm and projection in the model's dtype, scores from
    there in fp32); an fp8 cache has norm, rope and weights in fp32 before quantisation.

    Arguments ``made`` hold products of these projections that exist already, by name (packing.py).
    """

    def __init__(self, config: DSAConfig, device=None, dtype=None):
        super().__init__()
        kw = {"device": device, "dtype": dtype}
        self.dsa_config = config
        q_features = config.q_lora_rank or config.hidden_size
        self.wq_b = nn.Linear(q_features, config.index_n_heads * config.index_head_dim, bias=False, **kw)
        if config.q_lora_rank is None:
            self.q_input_norm = nn.LayerNorm(config.hidden_size, eps=1e-6, **kw)
        if config.query_scaling:
            self.softmax_scaling = SoftmaxScaling(config.index_n_heads, **kw)
        self.wk = nn.Linear(config.hidden_size, config.index_head_dim, bias=False, **kw)
        norm = nn.LayerNorm if config.index_k_norm == "layer" else nn.RMSNorm
        self.k_norm = norm(config.index_head_dim, eps=config.index_k_norm_eps, **kw)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False, **kw)

    def make_keys(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        fp8: bool,
        deinterleave: bool = False,
        made: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Index keys [T, D] of hidden states [T, hidden]; fp32 for an fp8 cache, else in the wider dtype of x and cos.

        ``deinterleave``: rope values in the order in which Hugging Face caches them (custom_ops/rope.py).
        """
        k = product(self, "wk", x, made)
        # hy_v4 keeps this norm in fp32 and computes it there
        k = self._norm_fp32(k) if fp8 else self.k_norm(k.to(self.k_norm.weight.dtype)).to(x.dtype)
        return self._encode(k, cos, sin, deinterleave)

    def make_queries(
        self,
        x: Tensor,
        q_lora: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        fp8: bool,
        deinterleave: bool = False,
        made: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Index queries [T, HI, D] (e4m3 for an fp8 cache) and weights fp32 [T, HI] with every scale folded in.

        ``positions``: int [T], read with ``query_scaling`` only.
        """
        c = self.dsa_config
        q = product(self, "wq_b", self.q_input_norm(x) if q_lora is None else q_lora, made)
        q = q.unflatten(-1, (-1, c.index_head_dim))  # [T, HI, D]
        q = q.float() if fp8 else q
        if c.query_scaling:
            q = q * query_factors(self.softmax_scaling, positions, q.dtype)
        q = self._encode(q, cos.unsqueeze(1), sin.unsqueeze(1), deinterleave)
        if not fp8:
            return q, self.head_weights(x, fp32=False, made=made).to(compute_dtype(x.dtype)) * c.index_scale
        q, scales = quantize_rows(q, c.index_format.scale_ue8m0)
        return q, self.head_weights(x, fp32=True, made=made).float() * c.index_scale * scales

    def store(self, keys: Tensor, batch: Batch, pool: Tensor) -> None:
        """Writes the rows' keys into the pool, in its dtype. A keys-only call is this alone."""
        if pool.dtype != torch.uint8:
            keys = keys.to(pool.dtype)  # angles in fp32 give keys in fp32
        store_index_keys(pool, keys, batch.slots, self.dsa_config.index_format.scale_ue8m0)

    def select(
        self,
        x: Tensor,
        q_lora: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pool: Tensor,
        positions: Tensor | None = None,
        *,
        deinterleave: bool = False,
        positions_out: Tensor | None = None,
        made: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Physical slots int32 [T, K] of the selected keys, -1 where fewer are visible.

        ``positions_out``: int32 [T, K], gets their positions in the row's request, lane by lane.
        """
        fp8 = pool.dtype == torch.uint8
        positions = batch.positions if positions is None else positions
        q, weights = self.make_queries(x, q_lora, cos, sin, positions, fp8=fp8, deinterleave=deinterleave, made=made)
        return self.choose(q if fp8 else q.to(pool.dtype), weights, batch, pool, positions_out)

    def choose(self, q: Tensor, weights: Tensor, batch: Batch, pool: Tensor, positions_out: Tensor | None) -> Tensor:
        """As ``select``, of queries and weights that ``make_queries`` or ``encode_queries`` made."""
        c = self.dsa_config
        topk = torch.empty(q.shape[0], c.index_topk, dtype=torch.int32, device=q.device)
        keys = (pool, batch.page_table, batch.req_of_row, batch.visible)
        options = (positions_out, c.index_init_tokens, c.index_local_tokens)
        if batch.kind == DECODE:
            index_topk_decode(q, weights, *keys, topk, c.deterministic, *options)
        else:
            index_topk_prefill(q, weights, *keys, topk, c.deterministic, c.scratch_bytes, *options)
        return topk

    def store_and_select(
        self,
        x: Tensor,
        q_lora: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pool: Tensor,
        positions: Tensor | None = None,
        positions_out: Tensor | None = None,
        *,
        made: dict[str, Tensor] | None = None,
    ) -> Tensor | None:
        """Stores the rows' keys, then selects; None when every visible key is selected (``batch.skip_scores``).

        Args:
            x: [T, hidden]; cos, sin: [T, R/2].
            q_lora: [T, q_lora_rank], after its norm; None in a model without, whose queries come from x.
            pool: index-key pool of this layer, see custom_ops/layout.py.
            positions: int [T], what ``query_scaling`` takes as positions; None: those of the batch.
            positions_out: int32 [T, K], gets the positions of the selected keys in their requests, -1 past the last.
        """
        self.store(self.make_keys(x, cos, sin, fp8=pool.dtype == torch.uint8, made=made), batch, pool)
        if batch.skip_scores:
            write_visible_positions(batch, positions_out)
            return None
        return self.select(x, q_lora, cos, sin, batch, pool, positions, positions_out=positions_out, made=made)

    forward = store_and_select

    def head_weights(self, x: Tensor, *, fp32: bool, made: dict[str, Tensor] | None) -> Tensor:
        """``weights_proj`` of x [T, hidden]: [T, HI], in fp32 or as the layer itself rounds.

        Never in fp8, whatever the layer: its rounding decides the selection. A layer with hooks or an adapter of an
        unknown kind is called.
        """
        if made and "weights_proj" in made:
            return made["weights_proj"]
        linear = self.weights_proj
        if is_readable(linear) and (fp32 or linear.weight.dtype == FP8):
            dtype = torch.float32 if fp32 else x.dtype
            return nn.functional.linear(x.to(dtype), effective_weight(linear, dtype))
        return linear(x if linear.weight.dtype == FP8 else x.to(linear.weight.dtype))

    def _norm_fp32(self, k: Tensor) -> Tensor:
        norm = self.k_norm
        if isinstance(norm, nn.LayerNorm):
            bias = None if norm.bias is None else norm.bias.float()
            return nn.functional.layer_norm(k.float(), norm.normalized_shape, norm.weight.float(), bias, norm.eps)
        return nn.functional.rms_norm(k.float(), norm.normalized_shape, norm.weight.float(), norm.eps)

    def _encode(self, x: Tensor, cos: Tensor, sin: Tensor, deinterleave: bool) -> Tensor:
        """Rope and optional Hadamard transform, the same for keys [T, D] and queries [T, HI, D]."""
        fmt = self.dsa_config.index_format
        pairs = {"interleaved": fmt.rope_interleaved, "deinterleave": deinterleave}
        if self.dsa_config.qk_rope_head_dim:
            x = rotate_part(x, cos, sin, last=fmt.rope_last, **pairs)
        if fmt.hadamard:
            x = x @ hadamard_matrix(x.shape[-1]).to(x.device, x.dtype)
        return x

"""Multi-head latent attention over the tokens that an indexer selects.

Legend: T rows, H heads, N nope dim, R rope dim, L latent dim, V value dim, K = index_topk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compiled_dsa import prologue
from compiled_dsa.batch import DECODE, Batch
from compiled_dsa.cache import LayerPools
from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.layout import compute_dtype, logical_slots
from compiled_dsa.custom_ops.mla_prefill import mla_prefill
from compiled_dsa.custom_ops.rope import rotate
from compiled_dsa.custom_ops.sparse_mla import sparse_mla_decode
from compiled_dsa.custom_ops.store_latents import store_latents
from compiled_dsa.custom_ops.unabsorb import unabsorb
from compiled_dsa.indexer import Indexer, write_visible_positions
from compiled_dsa.packing import PackedProjections, call, group_names, product
from compiled_dsa.softmax_scaling import SoftmaxScaling, query_factors
from compiled_dsa.weights import dequantize_rows, local, up_projection


class RMSNorm(nn.Module):
    """Root-mean-square norm with Hugging Face's rounding: normalised in fp32, cast, then times the weight."""

    def __init__(self, size: int, eps: float, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(compute_dtype(x.dtype))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


@dataclass
class Projections:
    """What a layer makes of its rows before any key is read, as far as it is not stored or encoded already."""

    q_nope: Tensor  # [T, H, N]
    q_rope: Tensor  # [T, H, R]
    gate: Tensor | None  # [T, H, V] or [T, H, 1] before the sigmoid, or None
    made: dict[str, Tensor]  # products of packed projections by name, of which the indexer takes its own
    q_lora: Tensor | None = None  # [T, q_lora_rank], after its norm; None in a model without
    latents: Tensor | None = None  # [T, L], after their norm; None in a layer that attends another's
    k_rope: Tensor | None = None  # [T, R], likewise


class SparseAttention(PackedProjections):
    """One attention layer of the DeepSeek-V3.2 family, over paged caches.

    Parameter names are those of Hugging Face, so its state dicts load strictly. The layer is plain torch around
    custom ops and traces with ``fullgraph=True``: one graph for each (batch kind, skip_scores), none per token count.
    """

    def __init__(self, config: DSAConfig, device=None, dtype=None):
        super().__init__()
        kw = {"device": device, "dtype": dtype}
        c = self.dsa_config = config
        if c.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=c.attention_bias, **kw)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, **kw)
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.qk_head_dim, bias=False, **kw)
        elif c.output_gate == "query":
            out_features = c.num_heads * (c.qk_head_dim + c.v_head_dim)
            self.q_gate_proj = nn.Linear(2 * c.q_lora_rank, out_features, bias=False, **kw)
        else:
            self.q_b_proj = nn.Linear(c.q_lora_rank, c.num_heads * c.qk_head_dim, bias=False, **kw)
        if c.query_scaling:
            self.softmax_scaling = SoftmaxScaling(c.num_heads, **kw)
        if c.kv_source is None:
            latent_features = c.kv_lora_rank + c.qk_rope_head_dim
            self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, latent_features, bias=c.attention_bias, **kw)
            self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, **kw)
        if c.k_rope_norm:
            self.k_rope_only_layernorm = RMSNorm(c.qk_rope_head_dim, c.latent_norm_eps, **kw)
        kv_features = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, kv_features, bias=False, **kw)
        if c.output_gate == "value":
            self.gate_proj = nn.Linear(c.hidden_size, c.num_heads * c.v_head_dim, bias=False, **kw)
        if c.output_gate == "head":
            self.g_proj = nn.Linear(c.hidden_size, c.num_heads, bias=False, **kw)
        if c.sinks:
            self.sinks = nn.Parameter(torch.zeros(c.num_heads, device=device, dtype=torch.float32))
        self.o_proj = nn.Linear(c.num_heads * c.v_head_dim, c.hidden_size, bias=c.attention_bias, **kw)
        self.indexer = None if c.index_shared else Indexer(c, **kw)

    def project(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        *,
        deinterleave: bool = False,
        scores: bool = False,
        fp8: bool = False,
    ) -> Projections:
        """Projections of hidden states [T, hidden].

        Args:
            positions: int [T], read with ``query_scaling`` only.
            deinterleave: rope values in Hugging Face's order (custom_ops/rope.py).
            scores: the layer's indexer will score; what it needs for that is made too where it is packed.
            fp8: the indexer has an fp8 cache.
        """
        c = self.dsa_config
        made = self.products("hidden", x, group_names("hidden", scores=scores), fp32=fp8)
        q, q_lora, gate = self._queries(x, made, scores)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = self.rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1), deinterleave)
        if c.query_scaling:
            factors = query_factors(self.softmax_scaling, positions, q.dtype)
            q_nope, q_rope = q_nope * factors, q_rope * factors
        if c.kv_source is not None:
            return Projections(q_nope, q_rope, gate, made, q_lora)
        return Projections(q_nope, q_rope, gate, made, q_lora, *self._latents(x, cos, sin, deinterleave, made))

    def _latents(
        self, x: Tensor, cos: Tensor, sin: Tensor, deinterleave: bool, made: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What the layer caches of hidden states [T, hidden]: latents [T, L] and the keys' rope part [T, R]."""
        c = self.dsa_config
        kv = product(self, "kv_a_proj_with_mqa", x, made)
        latents, k_rope = kv.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latents = _scaled(self.kv_a_layernorm(latents), c.latent_scale)
        if c.k_rope_norm:
            k_rope = self.k_rope_only_layernorm(k_rope)
        return latents, self.rotate(k_rope, cos, sin, deinterleave)

    def _queries(self, x: Tensor, made: dict[str, Tensor], scores: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries [T, H, N+R] before the rope, q_lora and the output gate of hidden states [T, hidden].

        ``made``: the packed products of x; gets those of q_lora.
        """
        c = self.dsa_config
        q_lora = gate = None
        if c.q_lora_rank is None:
            q = product(self, "q_proj", x, made).unflatten(-1, (-1, c.qk_head_dim))
        else:
            q_compressed = product(self, "q_a_proj", x, made)
            q_lora = _scaled(self.q_a_layernorm(q_compressed), c.q_lora_scale)
            if c.output_gate == "query":
                q_gate = self.q_gate_proj(torch.cat([q_lora, q_compressed], dim=-1))
                q_gate = q_gate.unflatten(-1, (-1, c.qk_head_dim + c.v_head_dim))
                q, gate = q_gate.split([c.qk_head_dim, c.v_head_dim], dim=-1)
            else:
                made.update(self.products("q_lora", q_lora, group_names("q_lora", scores=scores)))
                q = product(self, "q_b_proj", q_lora, made).unflatten(-1, (-1, c.qk_head_dim))
        return q, q_lora, gate if c.output_gate == "query" else self._gate(x, made)

    def _gate(self, x: Tensor, made: dict[str, Tensor]) -> Tensor | None:
        """The output gate that is projected from hidden states, before its sigmoid; None of a layer without."""
        c = self.dsa_config
        if c.output_gate == "value":
            return product(self, "gate_proj", x, made).to(x.dtype).unflatten(-1, (-1, c.v_head_dim))
        if c.output_gate == "head":
            return product(self, "g_proj", x, made).to(x.dtype).unsqueeze(-1)
        return None

    def _dtype(self) -> torch.dtype:
        """The dtype of activations, which linear layers in fp8 do not tell."""
        norm = getattr(self, "q_a_layernorm", None) or getattr(self, "kv_a_layernorm", self.o_proj)
        return norm.weight.dtype

    def _rows(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [T, hidden], of a pair (e4m3, scales) too."""
        return dequantize_rows(x, self._dtype()) if isinstance(x, tuple) else x

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, deinterleave: bool = False) -> Tensor:
        """x [..., R] in its dtype; the angles may be in a wider one."""
        c = self.dsa_config
        if not c.qk_rope_head_dim:
            return x
        return rotate(x, cos, sin, interleaved=c.rope_interleaved, deinterleave=deinterleave).to(x.dtype)

    def attend(
        self, p: Projections, batch: Batch, latent_pool: Tensor, topk: Tensor | None, q_latent: Tensor | None = None
    ) -> Tensor:
        """Attention [T, hidden] of the rows over the tokens of ``topk``, or over all visible ones when it is None.

        ``q_latent``: [T, H, L], the absorbed queries of a decode where they exist already.
        """
        c = self.dsa_config
        T, H, N = p.q_nope.shape
        kv_b = up_projection(self.kv_b_proj, N + c.v_head_dim, p.q_nope.dtype)
        sinks = local(self.sinks).float() if c.sinks else None
        where = (latent_pool, topk, batch.visible, batch.page_table, batch.req_of_row)  # the ops count no lane past K
        if batch.kind == DECODE:
            # absorb and un-absorb are batched GEMMs over heads; the ops take the [H, T, L] layout through strides
            if q_latent is None:
                q_latent = torch.bmm(p.q_nope.transpose(0, 1), kv_b[:, :N]).transpose(0, 1)  # [T, H, L]
            o = torch.empty(H, T, c.kv_lora_rank, dtype=q_latent.dtype, device=q_latent.device).transpose(0, 1)
            lse = torch.empty(T, H, dtype=torch.float32, device=q_latent.device)
            sparse_mla_decode(q_latent, p.q_rope, *where, c.scale, sinks, o, lse, c.deterministic)
            out = torch.empty(T, H, c.v_head_dim, dtype=q_latent.dtype, device=q_latent.device)
            unabsorb(o, kv_b[:, N:], out)
        else:
            out = torch.empty(T, H, c.v_head_dim, dtype=p.q_nope.dtype, device=p.q_nope.device)
            most = c.index_topk if topk is None and batch.skip_scores else None
            options = (c.scratch_bytes, most, c.deterministic, True)  # what indexers select is on the batch's pages
            mla_prefill(p.q_nope, p.q_rope, *where, kv_b, c.scale, sinks, out, *options)
        if p.gate is not None:
            gate = p.gate.float() if c.output_gate == "query" else p.gate  # as Hugging Face rounds
            out = (out * torch.sigmoid(gate)).to(out.dtype)
        return call(self.o_proj, out.flatten(1))

    def store_keys(
        self, x: Tensor | tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, batch: Batch, pools: LayerPools
    ) -> None:
        """A keys-only call: stores the rows' latents and index keys and attends nothing.

        What a draft layer needs of the tokens before its first: later calls see these as if ``forward`` had stored
        them. Arguments as of ``forward``.
        """
        x = self._rows(x)
        made = self.products("hidden", x, ("kv_a_proj_with_mqa", "wk"))
        if self.dsa_config.kv_source is None:
            latents = self._latents(x, cos, sin, deinterleave=False, made=made)
            store_latents(pools.latents, *latents, batch.slots)
        if self.indexer is not None:
            self.store_index_keys(x, cos, sin, batch, pools, made)

    def store_index_keys(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, pools: LayerPools, made: dict[str, Tensor]
    ) -> None:
        """The index keys alone, of a layer with an indexer. ``made``: as of ``Projections``."""
        fp8 = pools.index_keys.dtype == torch.uint8
        self.indexer.store(self.indexer.make_keys(x, cos, sin, fp8=fp8, made=made), batch, pools.index_keys)

    def _fused(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pools: LayerPools,
        positions_out: Tensor | None,
        *,
        scores: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """``forward`` where ``prologue.fuses``."""
        e = prologue.store_and_encode(self, x, cos, sin, batch, pools, scores=scores)
        topk = q_latent = None
        if not scores:
            write_visible_positions(batch, positions_out)
        elif batch.kind == DECODE:
            topk, q_latent = prologue.select_and_absorb_queries(self, e, batch, pools, positions_out)
        else:
            topk = self.indexer.choose(e.index_q, e.weights, batch, pools.index_keys, positions_out)
        p = Projections(e.q_nope, e.q_rope, self._gate(x, e.made), e.made)
        return self.attend(p, batch, pools.latents, topk, q_latent), topk

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pools: LayerPools,
        prev_topk: Tensor | None = None,
        window_start: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        positions_out: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Stores the rows' keys in the pools, selects, attends.

        Args:
            x: [T, hidden], or a pair (e4m3 [T, hidden], scales fp32 [T, ceil(hidden/128)]), which is dequantised to the
                dtype of the layer's norms first: the indexer must see what the projections do.
            cos, sin: [T, R/2], one angle a rope pair.
            batch: where the rows stand, see batch.py.
            pools: this layer's caches, written in place. The latents of a layer with ``kv_source`` are that layer's.
            prev_topk: selection of the last layer that has an indexer, slots on pages of ``batch.page_table``. A layer
                that has none needs it.
            window_start: int [T], for a layer with a window: the row attends none of its request's positions before
                this one. None: it attends the latest ``window``.
            positions: int [T], what ``query_scaling`` takes as positions; None: those of the batch.
            positions_out: int32 [T, index_topk], gets the positions that the layer's indexer selects, -1 past the last:
                what ``selected`` takes in another run.
            selected: int32 or int64 [T, n], distinct positions of the row's request to attend in place of those that
                the indexer, or ``prev_topk``, would give. What the row does not see, such as -1, is left out. Keys are
                stored as ever. Layers that share this selection need it too where ``batch.skip_scores``.

        Returns:
            (output [T, hidden], selection int32 [T, K] of physical slots or None when all visible keys are attended). A
            layer with a window hands ``prev_topk`` on.

        Raises:
            ValueError: a layer without an indexer gets no selection although scores are needed, or ``positions_out``; a
                layer with a window gets ``selected``, or any layer both; ``selected`` has another number of rows; the
                pair does not fit.
        """
        c = self.dsa_config
        x = self._rows(x)
        if positions_out is not None and (self.indexer is None or selected is not None):
            raise ValueError("positions_out is given to a layer without an indexer, or along with selected")
        positions = batch.positions if positions is None else positions
        scores = self.indexer is not None and selected is None and not batch.skip_scores
        if selected is None and prologue.fuses(self, x, cos, sin, pools):
            return self._fused(x, cos, sin, batch, pools, positions_out, scores=scores)
        p = self.project(x, cos, sin, positions, scores=scores, fp8=scores and pools.index_keys.dtype == torch.uint8)
        if p.latents is not None:
            store_latents(pools.latents, p.latents, p.k_rope, batch.slots)
        if c.window is not None:
            if selected is not None:
                raise ValueError(f"selected is given to a layer with window={c.window}")
            latest = latest_tokens(batch, c.window, window_start)
            return self.attend(p, batch, pools.latents, latest), prev_topk
        if selected is not None:
            if self.indexer is not None:
                self.store_index_keys(x, cos, sin, batch, pools, p.made)
            topk = selected_slots(selected, batch)
        elif self.indexer is not None:
            topk = self.indexer.store_and_select(
                x, p.q_lora, cos, sin, batch, pools.index_keys, positions, positions_out, made=p.made
            )
        else:
            topk = shared_selection(prev_topk, batch)
        return self.attend(p, batch, pools.latents, topk), topk


def selected_slots(positions: Tensor, batch: Batch) -> Tensor:
    """Slots int32 [T, n] of positions [T, n] in the requests of the rows.

    Those that a row does not see become -1 and move behind the others, whose order stays: lanes are counted from the
    first (see ``SparseAttention.attend``).
    """
    if positions.dim() != 2 or positions.shape[0] != batch.visible.shape[0]:
        raise ValueError(f"selected has shape {tuple(positions.shape)}; it must be [{batch.visible.shape[0]}, n]")
    slots = logical_slots(batch.page_table, batch.req_of_row.long()[:, None], positions.long())
    slots = torch.where(positions < batch.visible[:, None], slots, -1)
    return slots.gather(1, (slots < 0).long().argsort(dim=1, stable=True)).int()


def shared_selection(prev_topk: Tensor | None, batch: Batch) -> Tensor | None:
    """The selection that a layer without an indexer uses: the previous one, or None when all visible keys are."""
    if batch.skip_scores:
        return None
    if prev_topk is None:
        raise ValueError("prev_topk=None; a layer without an indexer needs the selection of an earlier layer")
    return prev_topk


def latest_tokens(batch: Batch, window: int, start: Tensor | None = None) -> Tensor:
    """Slots int32 [T, window] of the latest tokens that each row sees, its own first; -1 past the first token.

    ``start``: int [T], positions before it are left out too.
    """
    positions = batch.visible[:, None] - 1 - torch.arange(window, device=batch.visible.device)  # [T, window]
    slots = logical_slots(batch.page_table, batch.req_of_row.long()[:, None], positions)
    return (slots if start is None else torch.where(positions >= start[:, None], slots, -1)).int()


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale

"""transformers' attention modules, turned into ours in place.

``DSAAttentionMixin.forward`` has the signature that transformers' decoder layers call. It runs the ops on a PagedCache,
on transformers' own caches or without one, and hands over to the stock forward where the ops cannot serve the call.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compiled_dsa.attention import SparseAttention, selected_slots, shared_selection
from compiled_dsa.config import DSAConfig
from compiled_dsa.huggingface import masks
from compiled_dsa.huggingface.cache import PagedCache
from compiled_dsa.huggingface.masks import square_mask, wants_weights
from compiled_dsa.huggingface.stock_cache import Columns
from compiled_dsa.indexer import Indexer, write_visible_positions
from compiled_dsa.weights import is_readable


@dataclass
class AttentionStats:
    """How the layers of a model ran, counted a layer call.

    A layer inside compiled code is counted once, when it is traced, in ``traced`` and ``traced_stock``.

    Attributes:
        calls: layer calls that ran on the ops.
        stock_calls: layer calls that ran transformers' own forward, by reason.
    """

    calls: int = 0
    stock_calls: Counter[str] = field(default_factory=Counter)
    traced: int = 0
    traced_stock: Counter[str] = field(default_factory=Counter)

    def note(self, reason: str | None) -> None:
        if torch.compiler.is_compiling():
            self._note_trace(reason)
        elif reason is None:
            self.calls += 1
        else:
            self.stock_calls[reason] += 1

    # Runs while tracing and leaves nothing in the graph: a counter in the traced code would be a guard that fails.
    @torch._dynamo.assume_constant_result
    def _note_trace(self, reason: str | None) -> int:
        if reason is None:
            self.traced += 1
        else:
            self.traced_stock[reason] += 1
        return 0


class DSAAttentionMixin(SparseAttention):
    """Base of the converted attention classes; ``stock_class`` is the transformers class it stands in for."""

    stock_class: type[nn.Module]
    returns_topk: bool  # the decoder layer expects (output, weights, selection)
    config: Any
    layer_idx: int
    dsa_stats: AttentionStats
    dsa_exchange: Any = None  # an Exchange while selections are handed out or taken in (selections.py)
    stock_forward: Callable | None = None  # where more than the class has a say in it

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values=None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs,
    ):
        reason = self.stock_reason(hidden_states, attention_mask, past_key_values, kwargs)
        self.dsa_stats.note(reason)
        if reason is not None:
            if isinstance(past_key_values, PagedCache):
                self.refuse_stock(reason)
            if self.dsa_exchange is not None and reason != "window":
                raise ValueError(
                    f"{reason}: the call needs transformers' own forward, which neither hands out nor takes in what is "
                    f"selected; {_ADVICE[reason]}"
                )
            return self._stock_forward(
                hidden_states, position_embeddings, attention_mask, past_key_values, position_ids, prev_topk_indices,
                kwargs,
            )  # fmt: skip
        B, S, _ = hidden_states.shape
        cos, sin = (_angles(e, B, S) for e in position_embeddings)
        positions = None if position_ids is None else position_ids.expand(B, S).flatten()
        if isinstance(past_key_values, PagedCache):
            batch, pools, start = past_key_values.step(self.layer_idx, hidden_states, attention_mask)
            x = hidden_states.reshape(B * S, -1)
            out, topk = SparseAttention.forward(
                self, x, cos, sin, batch, pools, prev_topk_indices, start, positions, **self._exchanged(x)
            )
        else:
            shared_kv = kwargs.get("shared_kv_states")
            out, topk = self._on_stock_cache(
                hidden_states, cos, sin, positions, attention_mask, past_key_values, prev_topk_indices, shared_kv
            )
        out = out.view(B, S, -1)
        return (out, None, topk) if self.returns_topk else (out, None)

    def _exchanged(self, x: Tensor) -> dict[str, Tensor]:
        exchange = self.dsa_exchange
        return {} if exchange is None else exchange.options(self, x.shape[0], x.device)

    @staticmethod
    def refuse_stock(reason: str | None) -> None:
        """Raises ValueError for a reason that PagedCache cannot serve."""
        if reason is not None:
            raise ValueError(
                f"{reason}: the call needs transformers' own forward, which cannot read a PagedCache; {_ADVICE[reason]}"
            )

    def stock_reason(self, hidden_states: Tensor, attention_mask: Tensor | None, cache, kwargs: dict) -> str | None:
        """Why this call needs transformers' own forward, or None."""
        if hidden_states.requires_grad or (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return "gradients"
        if self.training and self.attention_dropout:
            return "dropout"
        window = self.dsa_config.window is not None
        if attention_mask is not None and attention_mask.dim() != 2 and not window:
            return "mask"
        if wants_weights(self, kwargs):
            return "attentions"
        if torch.is_autocast_enabled(hidden_states.device.type):
            return "autocast"  # one op's arguments would come in several dtypes
        if window and not isinstance(cache, PagedCache):
            return "window"  # other caches keep no more than the window reaches
        return self.weights_reason()

    def weights_reason(self) -> str | None:
        """Absorption reads the weight of ``kv_b_proj`` and never calls it: what hooks add would be lost."""
        return None if is_readable(self.kv_b_proj) else "kv_b_proj"

    def _stock_forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values, position_ids, prev_topk, kwargs
    ):
        B, S, _ = hidden_states.shape
        if attention_mask is None or attention_mask.dim() == 2:
            first = self._first_column(past_key_values, S)
            if self.dsa_config.kv_source is not None:
                columns = kwargs["shared_kv_states"][self._kind()][0].shape[2]
            else:
                columns = S if past_key_values is None else past_key_values.get_mask_sizes(S, self.layer_idx)[0]
            attention_mask = square_mask(attention_mask, B, first, S, columns, hidden_states.device)
        if self.returns_topk:
            kwargs = {**kwargs, "prev_topk_indices": prev_topk}
        forward = self.stock_forward or functools.partial(self.stock_class.forward, self)
        return forward(
            hidden_states,
            position_embeddings,
            attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **kwargs,
        )

    def _on_stock_cache(self, hidden_states, cos, sin, positions, columns_real, cache, prev_topk, shared_kv):
        """The ops over transformers' own cache, or over the step's own tokens when ``cache`` is None.

        ``shared_kv``: where layers leave latents for later ones, of a model whose layers do.
        """
        B, S, _ = hidden_states.shape
        x = hidden_states.reshape(B * S, -1)
        p = self.project(x, cos, sin, positions, deinterleave=True)  # transformers' order, also of index keys
        keys = None
        if self.indexer is not None:
            keys = self.indexer.make_keys(x, cos, sin, fp8=False, deinterleave=True, made=p.made).view(B, S, -1)
        first = self._first_column(cache, S)
        if p.latents is None:
            latents, rope = shared_kv[self._kind()]
        else:
            latents, rope = p.latents.view(B, 1, S, -1), p.k_rope.view(B, 1, S, -1)
            if cache is not None:
                latents, rope = cache.update(latents, rope, self.layer_idx)
            if getattr(self, "store_full_length_kv", False):
                shared_kv[self._kind()] = latents, rope
        if cache is not None and keys is not None:
            keys = cache.update_indexer(keys, self.layer_idx)
        topk_size = self.dsa_config.index_topk
        columns = Columns.of_step(columns_real, first, B, S, latents.shape[2], topk_size, x.device)
        batch, exchanged = columns.batch, self._exchanged(x)
        positions_out = exchanged.get("positions_out")
        if "selected" in exchanged:
            topk = selected_slots(exchanged["selected"], batch)
        elif self.indexer is not None:
            topk = None
            if not batch.skip_scores:
                topk = self.indexer.select(
                    x, p.q_lora, cos, sin, batch, columns.pool(keys), positions, deinterleave=True,
                    positions_out=positions_out,
                )  # fmt: skip
            else:
                write_visible_positions(batch, positions_out)
        else:
            topk = shared_selection(None if prev_topk is None else columns.from_hf(prev_topk), batch)
        out = self.attend(p, batch, columns.pool(latents.squeeze(1), rope.squeeze(1)), topk)
        return out, columns.to_hf(topk, S) if self.returns_topk else None

    def _kind(self) -> str:
        """The name under which transformers hands this layer's kind of latents on."""
        return "rope" if self.dsa_config.qk_rope_head_dim else "nope"

    def _first_column(self, cache, S: int):
        """Column of the step's first token, an int or a 0-d tensor."""
        if cache is None:
            return 0
        source = self.dsa_config.kv_source
        if source is not None:  # whose latents this step has stored already
            return cache.get_seq_length(source) - S
        length = cache.get_seq_length(self.layer_idx)
        # static caches return their live counter, which ``update`` advances
        return length.clone() if isinstance(length, Tensor) else length


_ADVICE = {
    "gradients": "call the model under torch.no_grad() or torch.inference_mode()",
    "dropout": "call model.eval()",
    "mask": "pass a 2D attention_mask",
    "attentions": "do not ask for output_attentions",
    "autocast": "convert the model instead, as with model.to(torch.bfloat16)",
    "kv_b_proj": "merge the adapter into the weight, or remove the hook or the bias",
    "packed": "pass packed sequences (position_ids that restart) without a cache, or the mask of a padded batch",
}


def _angles(embedding: Tensor, B: int, S: int) -> Tensor:
    """transformers' cos or sin [1 or B, S, R] = cat(angles, angles) as [B*S, R/2]."""
    half = embedding[..., : embedding.shape[-1] // 2]
    return half.expand(B, S, -1).reshape(B * S, -1)


@functools.cache
def converted_class(stock: type[nn.Module], returns_topk: bool) -> type[DSAAttentionMixin]:
    """The class that an instance of ``stock`` is turned into; still a subclass of ``stock``."""
    name = f"DSA{stock.__name__}"
    members = {
        "stock_class": stock,
        "returns_topk": returns_topk,
        "__module__": __name__,
        "__reduce__": lambda module: (_new_converted, (converted_class, stock, returns_topk), module.__dict__),
    }
    return type(name, (DSAAttentionMixin, stock), members)


@functools.cache
def converted_indexer_class(stock: type[nn.Module]) -> type[Indexer]:
    """The same for the indexer; its ``forward`` stays the stock one, which the stock attention forward calls."""
    members = {
        "forward": stock.forward,
        "__module__": __name__,
        "__reduce__": lambda module: (_new_converted, (converted_indexer_class, stock), module.__dict__),
    }
    return type(f"DSA{stock.__name__}", (Indexer, stock), members)


def _new_converted(make_class, *args) -> nn.Module:
    """For copy and pickle, which cannot find a class made at run time by its name: a module without its state."""
    masks.register()  # in the process that unpickles, replace_attention may never have run
    cls = make_class(*args)
    return cls.__new__(cls)


def convert(module: Any, dsa_config: DSAConfig, returns_topk: bool, stats: AttentionStats) -> None:
    """Turns a transformers attention module into ours: same parameters, names and hooks, another class."""
    stock: type[nn.Module] = type(module)
    module.__class__ = converted_class(stock, returns_topk)  # type: ignore[arg-type]
    module.dsa_stats = stats
    if "forward" in vars(module) and getattr(module, "_is_hooked", False):
        # a tensor-parallel plan that wraps the stock forward, to hand it local parameters; ours asks for them itself
        module.stock_forward = vars(module).pop("forward")
    if module.indexer is not None:
        stock_indexer: type[nn.Module] = type(module.indexer)
        module.indexer.__class__ = converted_indexer_class(stock_indexer)  # type: ignore[arg-type]
    configure(module, dsa_config)


def configure(layer: DSAAttentionMixin, dsa_config: DSAConfig) -> None:
    """Gives a converted layer, and its indexer, their config."""
    layer.dsa_config = dsa_config
    if layer.indexer is not None:
        layer.indexer.dsa_config = dsa_config

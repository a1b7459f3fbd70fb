"""transformers' own attention as benchmarks run it, and steps of whole models, ours and theirs.

Legend: B requests, S new tokens a request, L latent dim, R rope dim, D index head dim.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from compiled_dsa.batch import DECODE
from compiled_dsa.benchmark.cases import HF_SDPA
from compiled_dsa.benchmark.inputs import LayerInputs, Runnable
from compiled_dsa.compile import compile_model
from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.store_index_keys import store_index_keys
from compiled_dsa.custom_ops.store_latents import store_latents
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.huggingface.small_models import SMALL_MLP, model_config, random_model

FP8 = torch.float8_e4m3fn
_SIZES = (
    "hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
ROOM = 128  # tokens that a static cache has room for after its context: a step each time that it is timed


# ---- one layer -------------------------------------------------------------------------------------------------------


class StockLayer:
    """transformers' attention module with the weights of our layer, in eager or compiled code.

    Args:
        model: model_type.
        config: the sizes.
        weights: by transformers' names.
        implementation: "sdpa" or "eager".
        compiled: compile the module, for the sizes of each case anew.
    """

    def __init__(
        self, model: str, config: DSAConfig, weights: Mapping[str, Tensor], implementation: str, compiled: bool = False
    ):
        like = weights["o_proj.weight"]
        sizes = {name: getattr(config, name) for name in _SIZES}
        heads = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_heads}
        self.config = model_config(model, 1, **SMALL_MLP, **sizes, **heads)
        whole = random_model(self.config, seed=0, device=str(like.device), dtype=like.dtype)
        whole.set_attn_implementation(implementation)
        self.attention = whole.get_decoder().layers[0].self_attn
        self.attention.load_state_dict(dict(weights), strict=True)
        self.additive = implementation == "eager"  # the masks that it takes
        # each case for its own sizes, which is the fastest code that a user can have of it
        self.forward = torch.compile(self.attention, fullgraph=True, dynamic=False) if compiled else self.attention

    def runnable(self, inputs: LayerInputs) -> Runnable:
        """A step over transformers' own cache, which holds what ours holds, unrounded.

        The result, whose selection a hook takes, is always that of the module in eager code.

        Raises:
            ValueError: a prefill after a prefix, which is not written here.
        """
        make = self._decode if inputs.batch.kind == DECODE else self._prefill
        grid, mask, cache_of_run = make(inputs)
        angles = tuple(
            torch.cat([a, a], dim=-1).view(*grid.shape[:2], -1) for a in (inputs.cos, inputs.sin)
        )  # [B, S, R]

        def run(forward: Callable = self.forward):
            return forward(grid, angles, mask, cache_of_run())

        def result() -> tuple[Tensor, Tensor]:
            selections: list[Tensor] = []
            hook = self.attention.indexer.register_forward_hook(lambda module, args, out: selections.append(out))
            try:
                output = run(self.attention)[0]
            finally:
                hook.remove()
            return output.flatten(0, 1), _slots(inputs, selections[0].flatten(0, 1))

        return Runnable(run, result)

    def _mask(self, visible: Tensor) -> Tensor:
        """[B, 1, S, columns] of a boolean one."""
        if not self.additive:
            return visible
        dtype = self.attention.o_proj.weight.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )

    def _decode(self, inputs: LayerInputs) -> tuple[Tensor, Tensor, Callable[[], Any]]:
        c, batch = inputs.caches.config, inputs.batch
        B, past = batch.kv_len.shape[0], int(batch.kv_len[0]) - 1
        slots = torch.stack([inputs.slots_of(b)[:past] for b in range(B)])
        latents, keys = (t.flatten(0, 1)[slots] for t in (inputs.caches.latents, inputs.caches.keys))  # [B, past, .]
        L, R = c.kv_lora_rank, c.qk_rope_head_dim
        rope = in_stock_order(latents[..., L:])
        if c.index_format.rope_interleaved:
            keys = torch.cat([in_stock_order(keys[..., :R]), keys[..., R:]], dim=-1)
        # as many columns as whole pages have: sdpa copies masks whose rows are not aligned
        length = past + 1 + ROOM
        cache = StaticCache(self.config, max_cache_len=length)
        cache.update(latents[:, None, :, :L].contiguous(), rope[:, None], 0)
        cache.update_indexer(keys, 0)
        columns = torch.arange(length, device=keys.device)
        visible = (columns <= past).expand(B, 1, 1, -1)
        return inputs.x.unsqueeze(1), self._mask(visible), lambda: cache

    def _prefill(self, inputs: LayerInputs) -> tuple[Tensor, Tensor, Callable[[], Any]]:
        T = inputs.x.shape[0]
        if int(inputs.batch.kv_len[0]) != T:
            raise ValueError(f"a prefill of {T} rows of {int(inputs.batch.kv_len[0])} tokens; it must have no prefix")
        visible = torch.ones(T, T, dtype=torch.bool, device=inputs.x.device).tril()[None, None]
        return inputs.x.unsqueeze(0), self._mask(visible), lambda: DynamicCache(config=self.config)


def in_stock_order(rope: Tensor) -> Tensor:
    """Rope values [..., R] whose pairs are in place -> all even and then all odd ones, as transformers caches them."""
    return torch.cat([rope[..., 0::2], rope[..., 1::2]], dim=-1)


def _slots(inputs: LayerInputs, columns: Tensor) -> Tensor:
    """Slots int64 [T, K] of transformers' columns [T, K]; -1 for columns that the row does not see."""
    batch = inputs.batch
    slots = torch.stack([inputs.slots_of(b) for b in range(batch.kv_len.shape[0])])[batch.req_of_row.long()]
    columns = columns.long()
    seen = columns < batch.visible[:, None]
    return torch.where(seen, slots.gather(1, columns.clamp(max=slots.shape[1] - 1)), -1)


# ---- whole models ----------------------------------------------------------------------------------------------------


def prefill_step(model: Any, tokens: int) -> Callable[[], None]:
    """A prefill of ``tokens`` random tokens into a fresh or emptied cache; ours is fp8."""
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)
    paged = PagedCache(model.config, 1, tokens, latent_dtype=FP8, index_dtype=FP8)
    ours = hasattr(model, "dsa_stats")

    def run() -> None:
        paged.reset()
        model(input_ids=ids, past_key_values=paged if ours else DynamicCache(config=model.config), logits_to_keep=1)

    return run


def decode_step(model: Any, batch: int, context: int, room: int = ROOM) -> Callable[[], None]:
    """One token for each of ``batch`` rows over a cache of ``context`` random tokens; the cache grows by it.

    Args:
        room: steps that the cache has room for.
    """
    config, device, dtype = model.config, model.device, model.dtype
    ours = hasattr(model, "dsa_stats")
    ids = torch.randint(1, config.vocab_size, (batch, 1), device=device)
    if ours:
        cache = PagedCache(config, batch, context + room, latent_dtype=FP8, index_dtype=FP8)
        cache.allocate(device, dtype)
        cache.begin(batch, context, None)
    else:
        cache = StaticCache(config, max_cache_len=context + room)
    for layer, attention in enumerate(layer.self_attn for layer in model.model.layers):
        latents = torch.randn(batch, 1, context, config.kv_lora_rank, device=device, dtype=dtype)
        rope = torch.randn(batch, 1, context, config.qk_rope_head_dim, device=device, dtype=dtype)
        keys = torch.randn(batch, context, config.index_head_dim, device=device, dtype=dtype)
        if ours:
            rows, pools, _ = cache.step(layer, torch.empty(batch, context, 0, device=device), None)
            store_latents(pools.latents, latents.flatten(0, 2), rope.flatten(0, 2), rows.slots)
            if pools.index_keys is not None:
                store_index_keys(pools.index_keys, keys.flatten(0, 1).float(), rows.slots)
        else:
            cache.update(latents, rope, layer)
            if attention.indexer is not None:
                cache.update_indexer(keys, layer)
    position = torch.full((batch, 1), context, device=device)
    return lambda: model(input_ids=ids, past_key_values=cache, position_ids=position)


class Models:
    """A small model of true attention sizes, whose decode is timed with ours and with transformers' attention.

    Args:
        model: model_type.
        sizes: what the config does not have by default.
    """

    def __init__(self, model: str, layers: int, device: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any):
        # transformers' experts need not fit into a graph, so MLPs are dense
        config = model_config(model, layers, **{**SMALL_MLP, "first_k_dense_replace": layers, **sizes})
        self._stock = random_model(config, seed=0, device=device, dtype=dtype, std=0.02)
        self._ours: dict[str, Any] = {}

    def step(self, name: str, batch: int, context: int, backend: str = "inductor") -> Callable[[], None]:
        """``decode_step`` of transformers ("hf_sdpa") or of ours, ``name`` being ``graphs`` of ``compile_model``."""
        if name == HF_SDPA:
            return decode_step(self._stock, batch, context)
        if name not in self._ours:
            self._ours[name] = compile_model(replace_attention(copy.deepcopy(self._stock)), name, backend=backend)
        return decode_step(self._ours[name], batch, context)

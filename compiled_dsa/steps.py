"""Forwards as graphs see them: what is padded to which bucket, what of it is real, and what a trace depends on.

Two kinds are known. A transformers forward into a cache that announces it (PagedCache) is a [B, S] grid of tokens; one
with few tokens a row is taken as it is, another is padded in S. A forward over a ``Batch`` is a list of T rows of B
requests; it is padded in both.
"""

from collections.abc import Hashable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiled_dsa.batch import DECODE, MAX_DECODE_TOKENS, PREFILL, Batch
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.graphs.buckets import Buckets
from compiled_dsa.graphs.runner import Step
from compiled_dsa.graphs.torch_compat import mark_tokens_dynamic, register_dataclass

register_dataclass(Batch)

TOKENS = ("input_ids", "position_ids", "inputs_embeds")  # of transformers: [B, S] or [B, S, hidden]
MASK, KEEP = "attention_mask", "logits_to_keep"


class NoBucket(Exception):
    """The forward fits no captured graph; the message says why."""


class Planner:
    """Finds the bucket of a forward.

    Args:
        token_sizes: of prefills: tokens a row of a transformers forward, rows of a ``Batch``.
        batch_sizes: requests of a ``Batch``.
        max_cache_len: longest request of a ``Batch``; None: as many pages as the first page table has columns.
    """

    def __init__(self, token_sizes: Buckets, batch_sizes: Buckets, max_cache_len: int | None):
        self._tokens, self._requests = token_sizes, batch_sizes
        self._pages = None if max_cache_len is None else -(-max_cache_len // PAGE)

    def plan(self, args: tuple, kwargs: dict[str, Any]) -> tuple[str, Step]:
        """(kind, step) of a forward, the kind being "decode" or "prefill".

        Raises:
            NoBucket: the forward has neither a cache that announced it nor a ``Batch``, or is larger than all buckets.
        """
        arguments = (*args, *kwargs.values())
        batch = next((a for a in arguments if isinstance(a, Batch)), None)
        if batch is not None:
            return batch.kind, self._rows(args, kwargs, batch)
        cache = next((a for a in arguments if hasattr(a, "pad_step")), None)
        if cache is None or cache.trace_facts() is None:
            raise NoBucket("no PagedCache and no Batch")
        if cache.new_tokens <= MAX_DECODE_TOKENS:
            return DECODE, Step(args, kwargs)
        return PREFILL, self._grid(args, kwargs, cache)

    # ---- transformers -----------------------------------------------------------------------------------------------

    def _grid(self, args: tuple, kwargs: dict[str, Any], cache: Any) -> Step:
        size = self._tokens.fit(cache.new_tokens)
        if size is None:
            raise NoBucket(f"more than {self._tokens.largest} tokens")
        others = [
            name for name, a in kwargs.items() if isinstance(a, Tensor) and name not in (*TOKENS, MASK, KEEP)
        ]  # might have an entry a token, or not
        if others or any(isinstance(a, Tensor) for a in args):
            raise NoBucket(f"argument {others[0] if others else 0} is a tensor that cannot be padded")
        tokens = {name: kwargs[name] for name in TOKENS if isinstance(kwargs.get(name), Tensor)}
        B, S = next(iter(tokens.values())).shape[:2]
        keep = kwargs.get(KEEP, 0)
        if isinstance(keep, int) and keep > 0:  # counted from the end, which padding moves
            keep = torch.arange(max(0, S - keep), S, device=next(iter(tokens.values())).device)
            kwargs = kwargs | {KEEP: keep}

        def idle() -> tuple[tuple, dict[str, Any]]:
            padded = {name: t.new_zeros(t.shape[0], size, *t.shape[2:]) for name, t in tokens.items()}
            return args, kwargs | padded

        def crop(output: Tensor) -> Tensor:
            return output[:, :S] if output.shape[:2] == (B, size) else output

        cache.pad_step()
        bucket = (B, size, keep.numel() if isinstance(keep, Tensor) else 0)
        return Step(args, kwargs, bucket, idle, S if B == 1 else None, B * size, crop)

    # ---- Batch ------------------------------------------------------------------------------------------------------

    def _rows(self, args: tuple, kwargs: dict[str, Any], batch: Batch) -> Step:
        T, B = batch.positions.shape[0], batch.kv_len.shape[0]
        if batch.kind == DECODE and T % B:
            raise NoBucket(f"kind 'decode' with {T} rows of {B} requests")
        requests = self._requests.fit(B)
        if requests is None:
            raise NoBucket(f"more than {self._requests.largest} requests")
        if batch.kind == PREFILL:  # requests cost next to nothing there: one graph a number of rows
            requests, rows = self._requests.largest, self._tokens.fit(T)
            if rows is None:
                raise NoBucket(f"more than {self._tokens.largest} rows")
        else:
            rows = requests * (T // B)
        if self._pages is None:
            self._pages = batch.page_table.shape[1]
        pages = self._pages

        def pad(leaf: Any) -> Any:
            if isinstance(leaf, Batch):
                device = leaf.positions.device
                return Batch.idle(rows, requests, pages, device, kind=leaf.kind, skip_scores=leaf.skip_scores)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == T:
                return leaf.new_zeros(rows, *leaf.shape[1:])
            return leaf

        def idle() -> tuple[tuple, dict[str, Any]]:
            return pytree.tree_map(pad, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Batch))

        def crop(output: Tensor) -> Tensor:
            return output[:T] if output.dim() and output.shape[0] == rows else output

        if requests > B:  # requests after the last one begin where that ends
            end = batch.q_start[-1:].expand(requests - B)
            padded = replace(batch, q_start=torch.cat([batch.q_start, end]))
            args, kwargs = pytree.tree_map_only(Batch, lambda _: padded, (args, kwargs), is_leaf=_is_batch)
        return Step(args, kwargs, (rows, requests), idle, T, rows, crop)


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, Batch)


# ---- tracing ---------------------------------------------------------------------------------------------------------


def variant(argument: Any) -> Hashable:
    """What of an argument calls for a trace of its own: sizes of 1, flags, and what a cache's host knows."""
    if isinstance(argument, Tensor):
        return tuple(min(size, 2) for size in argument.shape)
    if isinstance(argument, dict):
        return tuple(variant(value) for value in argument.values())
    if isinstance(argument, Batch):
        return tuple(variant(getattr(argument, field.name)) for field in fields(argument))
    if hasattr(argument, "trace_facts"):
        return argument.trace_facts()
    return argument if isinstance(argument, bool | str) else str(type(argument))


def with_dynamic_tokens(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments, the sizes that count rows, tokens or requests marked dynamic.

    Strides are guarded too, and a slice of a longer prompt would differ in them: token arguments are made contiguous.
    Masks of transformers are bool [B, columns], where the columns are those of the cache and stay fixed; a dict has one
    mask for each type of layer. Other arguments are left alone.
    """
    batch = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)
    if batch is not None:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                _mark(leaf, 2 if leaf is batch.page_table else min(leaf.dim(), 1))
        return args, kwargs
    for argument in args[:1]:
        if isinstance(argument, Tensor) and argument.dim() == 2:
            _mark(argument, 2)
    changed = {}
    for name in TOKENS:
        argument = kwargs.get(name)
        if isinstance(argument, Tensor) and argument.dim() >= 2:
            changed[name] = argument.contiguous()
            _mark(changed[name], 2)
    mask = kwargs.get(MASK)
    for each in mask.values() if isinstance(mask, dict) else (mask,):
        if isinstance(each, Tensor) and each.dim() == 2:
            _mark(each, 1)
    return args, kwargs | changed


def _mark(tensor: Tensor, dims: int) -> None:
    for dim in range(dims):
        mark_tokens_dynamic(tensor, dim)

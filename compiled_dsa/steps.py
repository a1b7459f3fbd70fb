"""Forwards as graphs see them: what is padded to which bucket, what of it is real, and what a trace depends on.

Two kinds are known. A transformers forward into a cache that announces it (PagedCache) is a [B, S] grid of tokens; one
with few tokens a row is taken as it is, another is padded in S. A forward over a ``Batch`` is a list of T rows of B
requests; it is padded in both.
"""

from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
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


def prefill_batch_sizes(batch_sizes: Iterable[int]) -> tuple[int, ...]:
    """Those of ``batch_sizes``, in ascending order, that prefills are captured for: the largest and every third below.

    They are few because requests cost the ops of a prefill next to nothing, but from rows a request these tell how to
    share the loads of keys.
    """
    return tuple(sorted(set(batch_sizes), reverse=True)[::3][::-1])


class Planner:
    """Finds the bucket of a forward.

    Args:
        token_sizes: of prefills: rows of a ``Batch``; tokens a row of a transformers forward, which is taken as long as
            its rows have no more tokens together than the largest size.
        batch_sizes: requests of a ``Batch``.
        max_cache_len: longest request of a ``Batch``; None: as many pages as the first page table has columns.
    """

    def __init__(self, token_sizes: Buckets, batch_sizes: Buckets, max_cache_len: int | None):
        self._tokens, self._requests = token_sizes, batch_sizes
        self._prefill_requests = Buckets("batch_sizes", prefill_batch_sizes(batch_sizes.sizes))
        self._pages = None if max_cache_len is None else -(-max_cache_len // PAGE)

    @property
    def batch_kinds(self) -> int:
        """How many kinds of forwards over a ``Batch`` there are, each with a graph of its own for a pool: sizes of the
        buckets, tokens a request in decode, scores skipped or not."""
        decode = len(self._requests.sizes) * MAX_DECODE_TOKENS
        return 2 * (decode + len(self._tokens.sizes) * len(self._prefill_requests.sizes))

    def plan(self, args: tuple, kwargs: dict[str, Any], kinds: Container[str] = (DECODE, PREFILL)) -> tuple[str, Step]:
        """(kind, step) of a forward, the kind being one of ``kinds``.

        A cache of transformers is told when the forward comes padded; ``unpad`` takes that back.

        Raises:
            NoBucket: the forward has neither a cache that announced it nor a ``Batch``, is of another kind, or does not
                fit a bucket.
        """
        arguments = (*args, *kwargs.values())
        batches = [a for a in arguments if isinstance(a, Batch)]
        cache = _cache_of(arguments)
        if len(batches) > 1:
            raise NoBucket("more than one Batch")
        if not batches and (cache is None or cache.trace_facts() is None):
            raise NoBucket("no PagedCache and no Batch")
        kind = batches[0].kind if batches else DECODE if cache.new_tokens <= MAX_DECODE_TOKENS else PREFILL
        if kind not in kinds:
            raise NoBucket(f"no graphs for {kind}")
        if batches:
            return kind, self._rows(args, kwargs, batches[0])
        return kind, Step(args, kwargs) if kind == DECODE else self._grid(args, kwargs, cache)

    # ---- transformers -----------------------------------------------------------------------------------------------

    def _grid(self, args: tuple, kwargs: dict[str, Any], cache: Any) -> Step:
        others = [name for name, a in kwargs.items() if isinstance(a, Tensor) and name not in (*TOKENS, MASK, KEEP)]
        if others or any(isinstance(a, Tensor) for a in args):  # might have an entry a token, or not
            raise NoBucket(f"{others[0] if others else 'a positional argument'} is a tensor that cannot be padded")
        tokens = {name: kwargs[name] for name in TOKENS if isinstance(kwargs.get(name), Tensor)}
        given = tokens["input_ids"] if "input_ids" in tokens else tokens["inputs_embeds"]
        B, S = given.shape[:2]
        size = self._tokens.fit(S)
        if size is None or B * size > self._tokens.largest:
            raise NoBucket(f"more than {self._tokens.largest} tokens")
        keep = _kept_columns(kwargs.get(KEEP, 0), S, given.device)
        if keep is not None:
            kwargs = kwargs | {KEEP: keep}

        def idle() -> tuple[tuple, dict[str, Any]]:
            return args, kwargs | {n: t.new_zeros(t.shape[0], size, *t.shape[2:]) for n, t in tokens.items()}

        def crop(output: Tensor) -> Tensor:
            return output[:, :S] if output.shape[:2] == (B, size) else output

        cache.pad_step()
        bucket = (B, size, None if keep is None else keep.shape[0])
        return Step(args, kwargs, bucket, idle, S if B == 1 else None, B * size, crop)

    # ---- Batch ------------------------------------------------------------------------------------------------------

    def with_rows(self, args: tuple, kwargs: dict[str, Any]) -> Step | None:
        """A forward whose batch has no row, as one of a few padding rows, which ``plan`` takes where it takes as many
        requests; None for any other.

        Code compiled for some rows would be compiled once more for none, and there is no graph of no rows. In a prefill
        without requests, tensors of requests are taken for rows: they have no entries either.
        """
        batches = [a for a in (*args, *kwargs.values()) if isinstance(a, Batch)]
        if len(batches) != 1 or batches[0].positions.shape[0]:
            return None
        (batch,) = batches
        B = batch.kv_len.shape[0]
        # Two where that fits: sizes of 1 have traces of their own, which a warm-up of larger sizes does not make.
        requests = max(B, min(2, self._requests.largest))
        rows = requests
        if batch.kind == PREFILL and B:  # told apart by their sizes
            rows = min(2 + (requests == 2), self._tokens.largest)
        padding = _Padding(0, B, rows, requests, batch.page_table.shape[1])
        return Step(*padding.idle(args, kwargs), crop=padding.crop)

    def _rows(self, args: tuple, kwargs: dict[str, Any], batch: Batch) -> Step:
        T, B = batch.positions.shape[0], batch.kv_len.shape[0]
        rows, requests = self._sizes(batch.kind, T, B)
        if self._pages is None:
            self._pages = batch.page_table.shape[1]
        padding = _Padding(T, B, rows, requests, self._pages)
        sizes = padding.sizes
        shapes = tuple(
            (sizes.get(a.shape[0], a.shape[0]), *a.shape[1:])
            for a in (*args, *kwargs.values())
            if isinstance(a, Tensor) and a.dim()
        )
        idle = partial(padding.idle, args, kwargs)
        if requests > B:  # requests after the last one begin where that ends
            end = batch.q_start[-1:].expand(requests - B)
            ended = replace(batch, q_start=torch.cat([batch.q_start, end]))
            args = tuple(ended if a is batch else a for a in args)
            kwargs = {name: ended if a is batch else a for name, a in kwargs.items()}
        return Step(args, kwargs, (rows, requests, shapes), idle, T, rows, padding.crop)

    def _sizes(self, kind: str, T: int, B: int) -> tuple[int, int]:
        """Rows and requests of the bucket for a batch of T rows of B requests. They are equal when T and B must be."""
        if not T or not B:
            raise NoBucket("no rows")
        buckets = self._requests if kind == DECODE else self._prefill_requests
        requests = buckets.fit(B)
        if requests is None:
            raise NoBucket(f"more than {buckets.largest} requests")
        if kind == DECODE:
            if T % B:
                raise NoBucket(f"kind 'decode' with {T} rows of {B} requests")
            return requests * (T // B), requests
        rows = self._tokens.fit(T)
        if rows is None:
            raise NoBucket(f"more than {self._tokens.largest} rows")
        return rows, requests + (rows == requests)  # told apart by their sizes


@dataclass(frozen=True)
class _Padding:
    """T rows of B requests, and the sizes to which they are padded."""

    T: int
    B: int
    rows: int
    requests: int
    pages: int  # columns of the page table

    @property
    def sizes(self) -> dict[int, int]:
        """Of dim 0: entries of a tensor -> of its buffer."""
        return {self.B: self.requests} | {self.T: self.rows}

    def idle(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the padded sizes, in which nothing is to be done."""
        sizes = self.sizes

        def pad(leaf: Any) -> Any:
            if isinstance(leaf, Batch):
                padded = self.rows, self.requests, self.pages, leaf.positions.device
                return Batch.idle(*padded, kind=leaf.kind, skip_scores=leaf.skip_scores)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] in sizes:
                return leaf.new_zeros(sizes[leaf.shape[0]], *leaf.shape[1:])
            return leaf

        return pytree.tree_map(pad, (args, kwargs), is_leaf=_is_batch)

    def crop(self, output: Tensor) -> Tensor:
        """An output of the padded forward, cut to the real rows or requests."""
        if output.dim() and output.shape[0] == self.rows:
            return output[: self.T]
        return output[: self.B] if output.dim() and output.shape[0] == self.requests else output


def unpad(args: tuple, kwargs: dict[str, Any]) -> None:
    """Takes back what ``Planner.plan`` told a cache: the forward comes as the caller gave it."""
    cache = _cache_of((*args, *kwargs.values()))
    if cache is not None and cache.trace_facts() is not None:
        cache.pad_step(False)


def _cache_of(arguments: tuple) -> Any:
    return next((a for a in arguments if hasattr(a, "pad_step")), None)


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, Batch)


def _kept_columns(keep: Any, S: int, device: torch.device) -> Tensor | None:
    """transformers' ``logits_to_keep`` as indices of columns, which padding does not move; None: all columns."""
    if isinstance(keep, int):
        return torch.arange(S, device=device)[-keep:] if keep else None
    if isinstance(keep, Tensor) and keep.dim() == 1 and keep.dtype in (torch.int32, torch.int64):
        return torch.where(keep < 0, keep + S, keep)
    raise NoBucket(f"{KEEP} is neither a number nor a list of columns")


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

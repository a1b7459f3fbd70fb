"""Static input buffers of a captured graph: allocated once, refilled before every replay."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

STATE = "<state>"  # stands for the object whose tensors the call advances; it must not be kept alive by a graph


def describe(leaf: Any, state: Any) -> Hashable:
    """What must not change between capture and replay: shape, strides and dtype of a tensor, or the value itself."""
    if leaf is state:
        return STATE
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
    try:
        hash(leaf)
    except TypeError:
        return ("object", id(leaf))
    return leaf


def call_key(args: tuple, kwargs: dict[str, Any], state: Any) -> Hashable:
    """A key that two calls share when one captured graph can serve both."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(describe(leaf, state) for leaf in leaves)


class StaticInputs:
    """Copies of the tensors of one call, at addresses that stay."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], state: Any):
        paths, self._spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        self._names = [pytree.keystr(path) for path, _ in paths]
        self._expected = [describe(leaf, state) for leaf in leaves]
        self._tensors = [leaf.clone() if isinstance(leaf, Tensor) else None for leaf in leaves]

    def call(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with their tensors replaced by the static ones."""
        leaves = pytree.tree_leaves((args, kwargs))
        static = [leaf if held is None else held for leaf, held in zip(leaves, self._tensors)]
        return pytree.tree_unflatten(static, self._spec)

    def fill(self, args: tuple, kwargs: dict[str, Any], state: Any) -> None:
        """Copies the tensors of another call in.

        Raises:
            ValueError: an input differs from the captured one in more than a tensor's values; names it and both.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise ValueError(f"the call has structure {spec}; the graph was captured with {self._spec}")
        for name, leaf, expected in zip(self._names, leaves, self._expected):
            if describe(leaf, state) != expected:
                raise ValueError(f"input {name} is {describe(leaf, state)}; the graph was captured with {expected}")
        pairs = [(held, leaf) for held, leaf in zip(self._tensors, leaves) if held is not None]
        if pairs:
            torch._foreach_copy_([held for held, _ in pairs], [leaf for _, leaf in pairs])

"""Static input buffers of a captured graph: allocated once, refilled before every replay."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

STATE = "<state>"  # stands for the object whose tensors the call advances; it must not be kept alive by a graph


class Call:
    """The arguments of one call, taken apart.

    Attributes:
        leaves: tensors and other values, in the order of ``spec``.
        described: of each leaf, what must not change between capture and replay: shape, strides, dtype and device of a
            tensor, ``STATE`` for the state, else the value itself.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], state: Any):
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.described = tuple(_describe(leaf, state) for leaf in self.leaves)

    @property
    def key(self) -> Hashable:
        """Two calls share it when one captured graph can serve both."""
        return str(self.spec), self.described

    def names(self) -> list[str]:
        """How each leaf is reached in ``(args, kwargs)``."""
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self.leaves, self.spec))
        return [pytree.keystr(path) for path, _ in paths]


def _describe(leaf: Any, state: Any) -> Hashable:
    if leaf is state:
        return STATE
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    try:
        hash(leaf)
    except TypeError:
        return ("object", id(leaf))
    return leaf


class StaticInputs:
    """Copies of the tensors of one call, at addresses that stay."""

    def __init__(self, call: Call):
        self._spec, self._described = call.spec, call.described
        self._tensors = [leaf.clone() if isinstance(leaf, Tensor) else None for leaf in call.leaves]

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the call with its tensors replaced by the static ones."""
        static = [leaf if held is None else held for leaf, held in zip(call.leaves, self._tensors)]
        return pytree.tree_unflatten(static, self._spec)

    def fill(self, call: Call) -> None:
        """Copies the tensors of another call in.

        Raises:
            ValueError: an input differs from the captured one in more than a tensor's values; names it and both.
        """
        if call.spec != self._spec:
            raise ValueError(f"the call has structure {call.spec}; the graph was captured with {self._spec}")
        if call.described != self._described:
            for name, given, captured in zip(call.names(), call.described, self._described):
                if given != captured:
                    raise ValueError(f"input {name} is {given}; the graph was captured with {captured}")
        pairs = [(held, leaf) for held, leaf in zip(self._tensors, call.leaves) if held is not None]
        if pairs:
            torch._foreach_copy_([held for held, _ in pairs], [leaf for _, leaf in pairs])

"""Static input buffers of a captured graph: allocated once, refilled before every replay."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

STATE = "<state>"  # stands for the object whose tensors the call advances; it must not be kept alive by a graph
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class CaptureError(RuntimeError):
    """A call cannot be captured in a CUDA graph; nothing that it advances has advanced."""


def describe(leaf: Any, state: Any, name: str) -> Hashable:
    """What a graph fixes of a leaf: a tensor's shape, strides, dtype and device, or the type and value of a constant.

    Raises:
        CaptureError: anything else. It might hold tensors that no replay would refresh.
    """
    if leaf is state:
        return STATE
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    if isinstance(leaf, CONSTANTS):
        return (type(leaf), leaf)
    raise CaptureError(f"{name} is a {type(leaf).__name__}; a graph takes tensors, constants and the state it advances")


class Call:
    """The arguments of one call, taken apart.

    Attributes:
        leaves: tensors and other values, in the order of ``spec``.
        key: hashable; two calls share it when one captured graph can serve both.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], state: Any):
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        described = tuple(describe(leaf, state, "an argument") for leaf in self.leaves)
        self.key: tuple[str, tuple] = (str(self.spec), described)

    def difference(self, captured: tuple[str, tuple]) -> str:
        """What of this call differs from a captured one's key, for a message."""
        structure, described = captured
        if self.key[0] != structure:
            return f"the call has structure {self.key[0]}, the graph {structure}"
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self.leaves, self.spec))
        pairs = zip(paths, self.key[1], described)
        return "; ".join(
            f"input {pytree.keystr(path)} is {given}, captured was {held}"
            for (path, _), given, held in pairs
            if given != held
        )


class StaticInputs:
    """Copies of the tensors of one call, at addresses that stay."""

    def __init__(self, call: Call):
        self._key, self._spec = call.key, call.spec
        with torch.inference_mode(False):  # a buffer made in inference mode could not be refilled outside of it
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
        if call.key != self._key:
            raise ValueError(f"the graph was captured for another call: {call.difference(self._key)}")
        pairs = [(held, leaf) for held, leaf in zip(self._tensors, call.leaves) if held is not None]
        if pairs:
            torch._foreach_copy_([held for held, _ in pairs], [leaf for _, leaf in pairs])

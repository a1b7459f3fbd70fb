"""Static input buffers of a captured graph: allocated once, refilled before every replay."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
_SHAPES_KEPT = 64


class CaptureError(RuntimeError):
    """A call cannot be captured in a CUDA graph; nothing that it advances has advanced."""


class UnsupportedCallError(CaptureError):
    """An argument or an output of this call cannot be part of a captured one; other calls may well be."""


class GraphState(Protocol):
    """An argument that a graph reads and writes where it lies (a cache), instead of a copy of it.

    A warm-up must not advance it, a capture runs nothing on the device, and a replay runs no Python.
    """

    def advanced_tensors(self) -> list[Tensor]:
        """The tensors that a call advances (lengths). What a call writes again in the same place need not be here."""

    def trace_facts(self) -> Hashable:
        """What the host knows of the coming call and its trace depends on; None when nothing was announced."""

    def set_trace_facts(self, facts: Any) -> None:
        """Announces the call again after a warm-up; None once a replay has served it."""

    def signature(self) -> Hashable:
        """Equal for two states when a call that was warmed up with one needs no warm-up with the other."""


def is_state(leaf: Any) -> bool:
    return hasattr(leaf, "advanced_tensors")


def describe(leaf: Any, name: str, *, sizes: bool) -> Hashable:
    """What a graph fixes of a leaf: dtype, device and (with ``sizes``) shape of a tensor, or a constant.

    Raises:
        UnsupportedCallError: anything else. It might hold tensors that no replay would refresh.
    """
    if is_state(leaf):
        return ("state", id(leaf))
    if isinstance(leaf, Tensor):
        return (leaf.shape if sizes else leaf.dim(), leaf.dtype, leaf.device)
    if isinstance(leaf, CONSTANTS):
        return (type(leaf), leaf)
    raise UnsupportedCallError(f"{name} is a {type(leaf).__name__}; a graph takes tensors, constants and states")


class Call:
    """The arguments of one call, taken apart.

    Args:
        bucket: of a call that is padded: calls of one bucket share a graph, whatever their own sizes. None: the sizes
            must be the same.

    Attributes:
        leaves: tensors and other values, in the order of ``spec``.
        states: those that are a ``GraphState``.
        key: hashable; two calls share it when one captured graph can serve both.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], bucket: Hashable = None):
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.states: list[GraphState] = [leaf for leaf in self.leaves if is_state(leaf)]
        described = tuple(describe(leaf, "an argument", sizes=bucket is None) for leaf in self.leaves)
        facts = tuple(state.trace_facts() for state in self.states)
        self.key: tuple = (str(self.spec), described, facts, bucket)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def path(self, place: int) -> str:
        """Where a leaf stands in the arguments, for a message."""
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self.leaves, self.spec))
        return pytree.keystr(paths[place][0])


class StaticInputs:
    """Tensors at addresses that stay, for the calls of one key.

    Args:
        idle: a call of the largest sizes in which nothing is to be done. What a smaller call leaves of a buffer holds
            the values of this one.
    """

    def __init__(self, idle: Call):
        self._spec, self._structure = idle.spec, idle.key[0]
        self._constants = [None if is_state(leaf) else leaf for leaf in idle.leaves]
        with torch.inference_mode(False):  # a buffer made in inference mode could not be refilled outside of it
            # contiguous, whatever the first call had: another one may come with other strides
            copies = [leaf.contiguous() if isinstance(leaf, Tensor) else None for leaf in idle.leaves]
            self._idle = [None if leaf is None else leaf.clone() for leaf in copies]
            self._tensors = [None if leaf is None else leaf.clone() for leaf in copies]
        self._views: OrderedDict[tuple, tuple[list[Tensor], list[tuple[Tensor, Tensor]]]] = OrderedDict()

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the call with its tensors replaced by the static ones."""
        static = [leaf if held is None else held for leaf, held in zip(call.leaves, self._tensors)]
        return pytree.tree_unflatten(static, self._spec)

    def fill(self, call: Call) -> None:
        """Copies the tensors of another call in, those of a dtype in one launch where their strides allow it.

        Raises:
            ValueError: another structure or constant, or a tensor that does not fit its buffer; names the input and
                both. Nothing was copied.
        """
        if call.key[0] != self._structure:
            raise ValueError(f"the call has structure {call.key[0]}, captured was {self._structure}")
        for place, (held, leaf) in enumerate(zip(self._tensors, call.leaves)):
            if held is None:
                if not is_state(leaf) and leaf != self._constants[place]:
                    raise ValueError(f"input {call.path(place)} is {leaf!r}, captured was {self._constants[place]!r}")
                continue
            if not isinstance(leaf, Tensor) or leaf.dim() != held.dim() or leaf.dtype != held.dtype:
                raise ValueError(f"input {call.path(place)} is {_shown(leaf)}, captured was {_shown(held)}")
            if any(size > room for size, room in zip(leaf.shape, held.shape)):
                raise ValueError(f"input {call.path(place)} is {_shown(leaf)}, captured was room for {_shown(held)}")
        given = call.tensors
        regions, outside = self._regions(tuple(leaf.shape for leaf in given))
        _copy([*outside, *zip(regions, given)])

    def _regions(self, shapes: tuple[torch.Size, ...]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Where tensors of these shapes go, and the pairs that fill what they leave of their buffers. Both are views,
        which take longer to make than to copy, so those of the latest shapes are kept."""
        if shapes not in self._views:
            regions, outside = [], []
            held = [(tensor, idle) for tensor, idle in zip(self._tensors, self._idle) if tensor is not None]
            with torch.inference_mode(False):  # as for buffers
                for (tensor, idle), shape in zip(held, shapes):
                    regions.append(tensor[tuple(slice(size) for size in shape)])
                    outside += _complement(tensor, idle, shape)
            self._views[shapes] = regions, [(view, values) for view, values in outside if view.numel()]
            if len(self._views) > _SHAPES_KEPT:
                self._views.popitem(last=False)
        self._views.move_to_end(shapes)
        return self._views[shapes]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensors into the first. ``_foreach_copy_`` needs one launch for tensors of one dtype whose
    strides match pairwise, and falls back to one each for all when one does not."""
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for held, leaf in pairs:
        if held.is_contiguous() and leaf.is_contiguous():
            lists = together.setdefault(held.dtype, ([], []))
            lists[0].append(held)
            lists[1].append(leaf)
        else:
            held.copy_(leaf)
    for held_list, leaves in together.values():
        torch._foreach_copy_(held_list, leaves)


def _complement(held: Tensor, idle: Tensor, shape: torch.Size) -> list[tuple[Tensor, Tensor]]:
    """What of ``held`` and ``idle`` lies outside the region [0, shape), in disjoint parts."""
    parts = []
    for dim, size in enumerate(shape):
        outside = tuple(slice(s) for s in shape[:dim]) + (slice(size, None),)
        parts.append((held[outside], idle[outside]))
    return parts


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)

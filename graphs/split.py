"""Cutting a traced graph at its split ops.

A split op is an operator tagged ``cudagraph_unsafe`` where it is registered (``registry.define(split=True)`` and
``capture.split_op`` do so): breakable and piecewise graphs, and torch's, are cut at it. One that carries the tag alone,
without what these two add, cuts the compiled code likewise, but no capture knows how to go on after it (unsafe.py).
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

PIECE, CUT = "piece_", "cut_"  # names of the submodules of a split graph, numbered in the order in which they run
# Ops that may return views; whether one does is seen from the memory of its output.
_VIEWS = frozenset(
    (
        "chunk", "diagonal", "expand", "expand_as", "flatten", "getitem", "movedim", "narrow", "permute", "reshape",
        "reshape_as", "select", "split", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind",
        "unflatten", "unfold", "unsqueeze", "view", "view_as",
    )
)  # fmt: skip
_MODES = (torch._C._set_grad_enabled, torch.amp._enter_autocast, torch.amp._exit_autocast)


def split_op_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The split op that a node calls, or None."""
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    else:
        overloads = [target] if isinstance(target, torch._ops.OpOverload) else []
    return next((overload for overload in overloads if torch.Tag.cudagraph_unsafe in overload.tags), None)


def split_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same computation as a sequence of submodules: pieces between the cuts, and cuts of one split op each.

    The submodules are ``piece_0``, ``cut_1``, ``piece_2`` and so on, in the order in which they run. No piece is empty:
    sizes, views and switches of grad mode or autocast, which run no kernel, belong to the part that comes after them.

    Args:
        graph_module: a graph as Dynamo hands it to a backend (values in ``meta["example_value"]``); it is not changed.
    """
    graph_module = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    _make_views_where_used(graph_module.graph)
    parts = _parts(graph_module.graph)
    place = {node: index for index, part in enumerate(parts) for node in part.nodes}
    split = split_module(graph_module, None, place.__getitem__, keep_original_order=True)
    for node in list(split.graph.find_nodes(op="call_module")):
        index = int(node.target.removeprefix("submod_"))
        part = split.get_submodule(node.target)
        assert isinstance(part, fx.GraphModule)
        node.target = f"{CUT if parts[index].cut else PIECE}{index}"
        split.add_submodule(node.target, _with_code(part))
    return _with_code(split)


def _with_code(lazy: fx.GraphModule) -> fx.GraphModule:
    """The same module with its code made now: under Dynamo, split_module's make it at the first of their calls, each of
    which goes through nn.Module's hooks too."""
    return fx.GraphModule(lazy, lazy.graph)


@dataclass
class _Part:
    cut: bool
    nodes: list[fx.Node] = field(default_factory=list)


def _parts(graph: fx.Graph) -> list[_Part]:
    """The nodes that compute, in order, as maximal runs without a split op, and split ops by themselves."""
    parts: list[_Part] = []
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        waiting.append(node)
        if _runs_no_kernel(node):
            continue
        cut = split_op_of(node) is not None
        if cut or not parts or parts[-1].cut:
            parts.append(_Part(cut))
        parts[-1].nodes += waiting
        waiting = []
    if waiting:
        parts = parts or [_Part(cut=False)]
        parts[-1].nodes += waiting
    return parts


def _runs_no_kernel(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return (
        node.target in _MODES
        or isinstance(value, (torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, int))
        or _is_view(node)
    )


def _is_view(node: fx.Node) -> bool:
    """True when all outputs of a node are views of its inputs' memory, and it does nothing else."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not node.op.startswith("call") or name not in _VIEWS:
        return False
    source = node.all_input_nodes[0]
    if name == "getitem" and not isinstance(source.meta.get("example_value"), torch.Tensor):
        return _is_view(source)  # one of several outputs
    memory = {value.untyped_storage()._cdata for each in node.all_input_nodes for value in _tensors(each)}
    outputs = _tensors(node)
    return bool(outputs) and all(value.untyped_storage()._cdata in memory for value in outputs)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("example_value")
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]


def _make_views_where_used(graph: fx.Graph) -> None:
    """Repeats views, and reading a whole ``torch.Size``, before each of their users, in whatever part that is.

    Parts then hand each other tensors that own their memory: of two inputs that share memory, one of which it writes, a
    compiled piece expects the relation that they had when traced, and compiled code does not keep it. A ``torch.Size``
    is no input that compilers take.
    """
    for node in reversed(list(graph.nodes)):
        if isinstance(node.meta.get("example_value"), torch.Size) or _is_view(node):
            for user in list(node.users):
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
            graph.erase_node(node)

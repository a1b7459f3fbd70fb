"""Cutting a traced graph at its split ops.

A split op is an operator tagged ``cudagraph_unsafe`` where it is registered (``registry.define(split=True)`` and
``registry.split_op`` do so): what it launches cannot lie inside a captured CUDA graph.
"""

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

PIECE, CUT = "piece_", "cut_"  # names of the submodules of a split graph, numbered in the order in which they run


def split_op_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The split op that a node calls, or None."""
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.cudagraph_unsafe in target.tags:
        return target
    return None


def split_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same computation as a sequence of submodules: pieces between the cuts, and cuts of one split op each.

    The submodules are ``piece_0``, ``cut_1``, ``piece_2`` and so on in order; there is no empty piece, and sizes and
    other things that run no kernel go where they are first needed.
    """
    place: dict[fx.Node, int] = {}
    at = 0
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if split_op_of(node) is not None:
            at += 1
            place[node] = at
            at += 1
        else:
            place[node] = at
    cuts = {index for node, index in place.items() if split_op_of(node) is not None}
    names: dict[int, str] = {}
    for index in sorted(set(place.values())):
        names[index] = f"{CUT if index in cuts else PIECE}{len(names)}"
    split = split_module(graph_module, None, lambda node: names[place[node]], keep_original_order=True)
    for index, name in names.items():
        # split_module names its modules submod_<partition>
        module = getattr(split, f"submod_{name}")
        delattr(split, f"submod_{name}")
        split.add_submodule(name, module)
    for node in split.graph.nodes:
        if node.op == "call_module":
            node.target = node.target.removeprefix("submod_")
    split.recompile()
    return split

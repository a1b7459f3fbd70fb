"""Joining a traced graph with what Inductor launches for it: layer by layer, pieces and cuts in the order they run.

A layer is an entry of a ``ModuleList``, or any module whose name is a number, read from ``nn_module_stack``, where
Dynamo notes the modules that a node was traced in. What lies outside of all layers is before or after them.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from compiled_dsa.custom_ops.registry import OPS
from compiled_dsa.graphs.report_code import EXTERN, KERNEL, OP, Launch
from compiled_dsa.graphs.split import split_op_of
from compiled_dsa.graphs.torch_compat import function_of_op

BEFORE, AFTER, WHOLE = "before the layers", "after the layers", "whole graph"
_NO_OPERATION = ("placeholder", "output", "get_attr")


@dataclass(frozen=True)
class Placed:
    """A launch, the module whose result it computes ("" where Inductor does not say), and the layer it counts in."""

    launch: Launch
    module: str
    layer: str


@dataclass
class Part:
    """What one layer has of a piece, or a cut.

    Attributes:
        number: of the piece or cut in the graph, both counted together, as ``split_graph`` names its submodules.
        cut: name of the op that cuts, or "" for a piece.
        why: for a cut, why it is one.
        modules: those whose operations lie in it, without the layer's own name.
        operations: nodes of the traced graph.
        inside: custom ops that stay inside the piece.
        launches: what Inductor launches.
    """

    number: int
    cut: str = ""
    why: str = ""
    modules: list[str] = field(default_factory=list)
    operations: int = 0
    inside: list[str] = field(default_factory=list)
    launches: list[Placed] = field(default_factory=list)


@dataclass
class Layer:
    name: str
    parts: list[Part] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """Launches of a kind; a cut counts as cut and not as custom op."""
        return sum(p.launch.kind == kind for part in self.parts if not part.cut for p in part.launches)

    @property
    def cuts(self) -> int:
        return sum(bool(part.cut) for part in self.parts)

    @property
    def launches(self) -> int:
        return self.cuts + sum(self.count(kind) for kind in (KERNEL, EXTERN, OP))


def lay_out(graph: fx.Graph, launches: Sequence[Launch]) -> list[Layer]:
    """The layers of a graph in order, with their pieces, cuts and launches."""
    nodes = [node for node in graph.nodes if node.op not in _NO_OPERATION]
    layers = dict(zip(nodes, _layer_names(nodes)))
    cuts = [node for node in nodes if split_op_of(node) is not None]
    names = list(dict.fromkeys(layers.values())) or [WHOLE]
    places: dict[tuple[int, str], Part] = {}  # (twice the cuts passed, one more for the cut itself; layer)

    def part(at: int, layer: str) -> Part:
        return places.setdefault((at, layer), Part(at))

    at = 0
    for node in nodes:
        overload = split_op_of(node)
        if overload is not None:
            mine = part(at + 1, layers[node])
            mine.cut, mine.why = qualified(overload), why_cut(overload)
            at += 2
        else:
            mine = part(at, layers[node])
            name = _custom_op(node)
            mine.inside += [name] if name else []
        mine.operations += 1
        module = _within(module_of(node), layers[node])
        if module and module not in mine.modules:
            mine.modules.append(module)

    at, of_cuts = 0, {qualified(split_op_of(node)) for node in cuts}
    for placed in _place(launches, {node.name: node for node in nodes}, layers, names):
        if placed.launch.name in of_cuts:
            traced = [mine for (place, _), mine in places.items() if place == at + 1]
            for mine in traced:  # none where Inductor launches it more often than it was traced
                mine.launches.append(placed)
            at += 2 if traced else 0
        else:
            part(at, placed.layer).launches.append(placed)

    numbers = {at: number for number, at in enumerate(sorted({at for at, _ in places}))}
    found = {name: Layer(name) for name in names}
    for (at, name), mine in sorted(places.items(), key=lambda item: item[0][0]):
        mine.number = numbers[at]
        found[name].parts.append(mine)
    return list(found.values())


def _layer_names(nodes: Iterable[fx.Node]) -> list[str]:
    """The layer of each node; a node outside of all layers that stands between two nodes of one belongs there too."""
    own = [_layer_of(module_of(node)) for node in nodes]
    if not any(own):
        return [WHOLE] * len(own)
    last = max(i for i, name in enumerate(own) if name)
    names, current = [], BEFORE
    for i, name in enumerate(own):
        current = name or (AFTER if i > last else current)
        names.append(current)
    return names


def _layer_of(module: str) -> str:
    parts = module.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that a node was traced in, from the model on; "" outside of all modules.

    Dynamo writes ``L['function'].__self__.model.layers.0.mlp``, or ``_modules['mlp']`` in place of a name.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\[[^\]]*\]|\.__self__|\._modules", "", path)
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).strip(".")


def _within(module: str, layer: str) -> str:
    return module.removeprefix(layer).strip(".")


def _place(launches, by_name: dict[str, fx.Node], layers: dict[fx.Node, str], names: list[str]) -> list[Placed]:
    """Launches with their layers: that of the last node they compute; else that of the next one known, which they
    prepare the input of; else that of the one before."""
    placed = []
    for launch in launches:
        known = [by_name[name] for name in launch.nodes if name in by_name]
        layer = layers[known[-1]] if known else ""
        placed.append(Placed(launch, _within(module_of(known[-1]), layer) if known else "", layer))
    following = ""
    for i in reversed(range(len(placed))):
        following = placed[i].layer or following
        placed[i] = replace(placed[i], layer=following)
    previous = names[0]
    for i, each in enumerate(placed):
        previous = each.layer or previous
        placed[i] = replace(each, layer=previous)
    return placed


def qualified(overload: torch._ops.OpOverload) -> str:
    """``library::op.overload``, as output code has it."""
    return f"{overload._schema.name}.{overload._overloadname}"


def _custom_op(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prim", "prims"):
        return qualified(target)
    return ""


def why_cut(overload: torch._ops.OpOverload) -> str:
    """The tag that makes an op a split op, and what the op says of itself.

    That is the docstring of its contract file for the ops of the registry, of the function for ``split_op``.
    """
    name = overload._schema.name.removeprefix("compiled_dsa::")
    if name in OPS:
        text = sys.modules[OPS[name].reference.__module__].__doc__
    else:
        text = getattr(function_of_op(overload), "__doc__", None)
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text or "")]
    own = " ".join(p for p in paragraphs if p and not p.startswith("Legend"))
    tagged = (
        "Tagged cudagraph_unsafe where it is registered: breakable and piecewise graphs, and torch's, are cut at it."
    )
    return f"{tagged} {own}".strip()

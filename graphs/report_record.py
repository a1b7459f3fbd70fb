"""What a report notes of each graph while it is compiled, and of its guards once the run is over."""

import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from compiled_dsa.graphs.report_code import OutputCode, read_output_code
from compiled_dsa.graphs.report_layers import Layer, lay_out
from compiled_dsa.graphs.torch_compat import frame_in_compilation, guards_text, output_code_to, source_of_input

_GUARD = re.compile(r"^[| ]*\+- ([A-Z][A-Z_]+): (.*?)(?:\s+# .*)?$")
_TENSOR_GUARD = re.compile(r"check_tensor\((.*?), \w+, DispatchKeySet.*?, torch\.(\w+), .*?(size=.*)\)$")
# Guards on what rarely changes between calls: types and identities, settings of the process, modules and code.
_DULL = {"TYPE_MATCH", "ID_MATCH", "DICT_CONTAINS", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_TENSOR_ALIASING"}
_DULL |= {"GLOBAL_STATE", "TORCH_FUNCTION_MODE_STACK", "DEFAULT_DEVICE"}
_DULL_OBJECTS = re.compile(r"G\['|\._(modules|parameters|buffers)\b|__closure__|__defaults__|_functorch|_dynamo_")


@dataclass(frozen=True)
class Input:
    """An input of a graph: expression it is taken from, dtype, shape with symbols, and the bytes that it has."""

    name: str
    dtype: str
    shape: str
    bytes: int
    is_weight: bool


@dataclass(frozen=True)
class Guards:
    """Attributes:
    text: the whole tree as Dynamo prints it.
    kinds: how many there are of each kind.
    telling: those that decide in practice whether a call reuses the code: sizes, values and flags of what it is given.
    """

    text: str
    kinds: dict[str, int]
    telling: list[str]


@dataclass
class Graph:
    """One compiled graph.

    Attributes:
        number: from 1, in the order of compilation.
        function: name and place of the function that was traced.
        compile_id: Dynamo's: number of the frame / how often it was compiled before.
        inputs: without weights and symbols.
        symbols: symbol -> its value when traced and its range, in words.
        readable: the traced graph as Python.
        layers: of the traced graph, with what Inductor launches for it.
        code: Inductor's output code; None where it could not be had, a note of the report says why.
    """

    number: int
    function: str
    compile_id: str
    inputs: list[Input]
    weights: list[Input]
    symbols: dict[str, str]
    readable: str
    layers: list[Layer] = field(default_factory=list)
    code: OutputCode | None = None
    guards: Guards | None = None

    @property
    def title(self) -> str:
        """Names the first input, which tells most variants of one model apart."""
        first = next((f": {each.name} {each.shape}" for each in self.inputs if each.shape != "[]"), "")
        return f"Graph {self.number}{first}"

    def sequence(self) -> list[tuple[int, str]]:
        """(number, op that cuts or "" for a piece), in order."""
        return sorted({(part.number, part.cut) for layer in self.layers for part in layer.parts})

    def count(self, kind: str) -> int:
        return sum(layer.count(kind) for layer in self.layers)

    @property
    def cuts(self) -> int:
        return sum(bool(cut) for _, cut in self.sequence())


@dataclass
class _Frame:
    """What is needed of a frame after the run: its code, whose guards are read then, and its globals."""

    code: types.CodeType
    globals: dict[str, Any]
    compile_id: str
    graph: Graph


class Recorder:
    """A backend that compiles with Inductor and notes what it sees; what it cannot note becomes a line of ``notes``."""

    def __init__(self, notes: list[str]):
        self.graphs: list[Graph] = []
        self.frames: list[_Frame] = []
        self._notes = notes
        self._inductor = torch._dynamo.lookup_backend("inductor")

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list, **kwargs) -> Callable:
        number = len(self.graphs) + 1
        graph = Graph(number, "?", "?", [], [], {}, "")
        traced = fx.Graph()  # Inductor changes the one it is given
        with self._noting(f"graph {number} could not be read"):
            traced.graph_copy(graph_module.graph, {})
            graph = self._look_at(graph_module, number)
        self.graphs.append(graph)
        codes: list[str] = []
        with output_code_to(codes):
            compiled = self._inductor(graph_module, example_inputs, **kwargs)
        with self._noting(f"graph {number}: its kernels could not be read"):
            graph.code = read_output_code(codes[0]) if codes else None
        with self._noting(f"graph {number} could not be laid out by layers"):
            graph.layers = lay_out(traced, graph.code.launches if graph.code else ())
        return compiled

    def _look_at(self, graph_module: fx.GraphModule, number: int) -> Graph:
        code, its_globals, compile_id = frame_in_compilation()
        inputs, weights, symbols = _inputs(graph_module.graph)
        readable = graph_module.print_readable(print_output=False)
        function = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        graph = Graph(number, function, compile_id, inputs, weights, symbols, readable)
        self.frames.append(_Frame(code, its_globals, compile_id, graph))
        return graph

    def read_guards(self) -> None:
        """To be called once the run is over: guards are made after a graph is compiled."""
        for frame in self.frames:
            number = frame.graph.number
            with self._noting(f"graph {number}: its guards could not be read"):
                text = guards_text(frame.code, frame.compile_id)
                if text:
                    frame.graph.guards = read_guards(text)
                else:
                    self._notes.append(f"graph {number}: its guards are gone, with what they guarded")

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """The report must not end the run that it reports on, whatever a torch to come does differently."""
        try:
            yield
        except Exception as error:
            self._notes.append(f"{what}: {type(error).__name__}: {error}")


def _inputs(graph: fx.Graph) -> tuple[list[Input], list[Input], dict[str, str]]:
    inputs: list[Input] = []
    weights: list[Input] = []
    symbols: dict[str, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            symbols |= _symbols(value)
        elif isinstance(value, torch.Tensor):
            source = source_of_input(node)
            is_weight = "._parameters[" in source or "._buffers[" in source
            shape = ", ".join(str(size) for size in value.shape)
            size = 0 if any(isinstance(s, torch.SymInt) for s in value.shape) else value.numel() * value.element_size()
            each = Input(plain(source), str(value.dtype).removeprefix("torch."), f"[{shape}]", size, is_weight)
            (weights if is_weight else inputs).append(each)
            for dim in value.shape:
                symbols |= _symbols(dim) if isinstance(dim, torch.SymInt) else {}
    return inputs, weights, symbols


def _symbols(size: torch.SymInt) -> dict[str, str]:
    """{symbol: "100 when traced, 2 or more"} of a size; nothing for an expression of symbols."""
    expression = size.node.expr
    limits = size.node.shape_env.var_to_range.get(expression)
    if limits is None:
        return {}
    upper = f"to {limits.upper}" if limits.upper.is_finite and limits.upper < 2**62 else "or more"
    traced = "not known when traced" if size.node.hint is None else f"{size.node.hint} when traced"
    return {str(expression): f"{traced}, {limits.lower} {upper}"}


def plain(source: str) -> str:
    """Dynamo's expression as one would write it: ``L['kwargs']['input_ids']`` is ``input_ids``."""
    path = re.sub(r"\._(modules|parameters|buffers)\['([^']*)'\]", r".\2", source)
    path = re.sub(r"L\['kwargs'\]\['([^']*)'\]", r"\1", path)
    path = re.sub(r"L\['([^']*)'\]", r"\1", path)
    return path.replace("function.__self__.", "").removeprefix("self.")


def read_guards(text: str) -> Guards:
    """Sorts the guards of Dynamo's tree."""
    kinds: Counter[str] = Counter()
    telling = []
    for line in text.splitlines():
        found = _GUARD.match(line)
        if found is None:
            continue
        kind, condition = found.groups()
        kinds[kind] += 1
        if kind not in _DULL and not _DULL_OBJECTS.search(condition):
            tensor = _TENSOR_GUARD.match(condition)
            condition = " ".join(tensor.groups()) if tensor else condition
            telling.append(f"{kind}: {plain(condition)}")
    return Guards(text, dict(kinds.most_common()), telling)

"""Piecewise compilation: each piece between two split ops is compiled by itself, and the split ops run as they are.

The compiled code of a whole graph calls its split ops through the compiler's wrapper; here they are ordinary calls
between compiled pieces, so that a piece can be looked at, timed and captured on its own, and a backend sees no op that
it could reorder, functionalise or copy arguments of. The price is some Python between the pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from compiled_dsa.graphs.split import PIECE, split_graph, split_op_of


@dataclass
class Pieces:
    """What ``piecewise_backend`` has made so far, over all graphs that it compiled.

    Attributes:
        pieces: compiled pieces.
        cuts: names of the split ops (``library::op``) between them, in order.
    """

    pieces: int = 0
    cuts: list[str] = field(default_factory=list)


def piecewise_backend(backend: str | Callable = "inductor", pieces: Pieces | None = None) -> Callable:
    """A backend for ``torch.compile`` that cuts each graph at its split ops and compiles the pieces one by one.

    Sizes that are dynamic in the whole graph are dynamic in the pieces: one compile serves them all.

    Args:
        backend: compiles the pieces; a name that torch.compile knows, or a callable (graph module, inputs) -> callable.
        pieces: counts what is cut.

    Returns:
        ``compile(graph_module, example_inputs) -> callable``. The callable runs piece, split op, piece and so on from
        plain Python; a capture that is under way sees the split ops (custom_ops/capture.py).
    """
    compile_piece = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
    made = Pieces() if pieces is None else pieces

    def compile_pieces(graph_module: fx.GraphModule, example_inputs: list) -> Callable:
        split = split_graph(graph_module)
        for name, part in list(split.named_children()):
            assert isinstance(part, fx.GraphModule)
            if name.startswith(PIECE):
                run = _compiled(part, compile_piece)
                made.pieces += 1
            else:
                run = part.forward
                made.cuts += [op.name() for op in map(split_op_of, part.graph.nodes) if op is not None]
            delattr(split, name)
            setattr(split, name, run)  # a plain function, which the generated forward calls without nn.Module's hooks
        return split.forward

    return compile_pieces


def _compiled(piece: fx.GraphModule, compile_piece: Callable) -> Callable:
    """A piece compiled for the fake tensors and sizes that Dynamo noted at its inputs."""
    output = piece.graph.output_node()
    single = not isinstance(output.args[0], tuple)
    if single:  # Dynamo's graphs return tuples, and backends may rely on it
        output.args = ((output.args[0],),)
        piece.recompile()
    run = compile_piece(piece, [node.meta["example_value"] for node in piece.graph.find_nodes(op="placeholder")])
    return (lambda *args: run(*args)[0]) if single else run

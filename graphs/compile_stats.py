"""Counting what torch.compile makes of a callable."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class CompileStats:
    """Attributes:
    compiles: graphs compiled, recompiles included.
    """

    compiles: int = 0


def counting_backend(
    stats: CompileStats, backend: str | Callable = "inductor", before: Callable[[], None] = lambda: None
) -> Callable:
    """A backend that compiles with ``backend`` and counts each graph in ``stats``.

    Args:
        before: called before each compile; what it raises ends the call that needed the compile.
    """
    compile_fx = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_and_count(graph_module: torch.fx.GraphModule, example_inputs, **kwargs):
        before()
        stats.compiles += 1
        return compile_fx(graph_module, example_inputs, **kwargs)

    return compile_and_count

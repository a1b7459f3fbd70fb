"""Ops that carry torch's tag ``cudagraph_unsafe`` but are no split ops of ours.

torch's tag ``cudagraph_unsafe`` says that an op must not be captured. It does not say what a replay needs to know to
run the op between segments (custom_ops/capture.py), and the op itself does not notice a capture: it would be captured
like any other.
"""

from collections.abc import Callable

import torch
from torch import fx

from compiled_dsa.custom_ops.capture import SPLIT_OPS, under_capture
from compiled_dsa.graphs.buffers import CaptureError
from compiled_dsa.graphs.split import split_op_of


def unsafe_ops(graph_module: fx.GraphModule) -> list[str]:
    """Names (``library::op``) of the ops of a graph that carry the tag and are no split ops."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    tagged = (split_op_of(node) for graph in graphs for node in graph.nodes)
    return sorted({op.name() for op in tagged if op is not None} - SPLIT_OPS)


def refusing_backend(backend: str | Callable) -> Callable:
    """A backend that compiles with ``backend``; code with such an op runs as ever, but not under a capture.

    Under one it raises ``CaptureError``, which names the op, before any of its kernels is captured.
    """
    compile_fx = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_and_refuse(graph_module: fx.GraphModule, example_inputs, **kwargs) -> Callable:
        unsafe = unsafe_ops(graph_module)
        compiled = compile_fx(graph_module, example_inputs, **kwargs)
        if not unsafe:
            return compiled

        def uncaptured(*args):
            if under_capture():
                raise CaptureError(
                    f"{', '.join(unsafe)}: tagged cudagraph_unsafe, but nothing says how to go on after it; register "
                    "it with compiled_dsa.custom_ops.capture.split_op, or use graphs='off'"
                )
            return compiled(*args)

        return uncaptured

    return compile_and_refuse

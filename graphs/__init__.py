"""CUDA graphs around compiled callables, and counting what torch.compile makes of them.

Knows torch alone; nothing of models, kernels or transformers.
"""

if __name__ != "compiled_dsa.graphs":
    raise ImportError(f"import compiled_dsa.graphs, not {__name__!r}: this folder is part of compiled_dsa")

from compiled_dsa.graphs.report import report

__all__ = ["report"]

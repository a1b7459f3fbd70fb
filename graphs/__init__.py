"""CUDA graphs around compiled models: buckets, static buffers, capture, and cuts at the split ops.

Knows torch and the names of the ops at which graphs are cut; nothing of models, kernels or transformers.
"""

if __name__ != "compiled_dsa.graphs":
    raise ImportError(f"import compiled_dsa.graphs, not {__name__!r}: this folder is part of compiled_dsa")

"""DeepSeek Sparse Attention for PyTorch, written so that ``torch.compile`` makes it fast.

``import compiled_dsa`` brings in torch and nothing else; ``compiled_dsa.huggingface`` imports transformers, and a
kernel provider is imported when an op first runs with it.
"""

from compiled_dsa.attention import SparseAttention
from compiled_dsa.batch import Batch
from compiled_dsa.cache import LayerPools, PagePool
from compiled_dsa.compile import compile_model
from compiled_dsa.config import DSAConfig, IndexFormat
from compiled_dsa.graphs.warm_start import load_compiled, save_compiled
from compiled_dsa.indexer import Indexer
from compiled_dsa.packing import pack_projections, unpack_projections
from compiled_dsa.pages import OutOfPagesError, PoolStats, page_keys

__all__ = [
    "Batch",
    "DSAConfig",
    "IndexFormat",
    "Indexer",
    "LayerPools",
    "OutOfPagesError",
    "PagePool",
    "PoolStats",
    "SparseAttention",
    "compile_model",
    "load_compiled",
    "pack_projections",
    "page_keys",
    "save_compiled",
    "unpack_projections",
]

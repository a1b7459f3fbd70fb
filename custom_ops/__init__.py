"""The custom operators of compiled_dsa: contracts, CPU references, Triton kernels.

Importing this package registers ``torch.ops.compiled_dsa.*``. It imports torch and nothing else; a provider
(Triton, a library) is imported when an op first runs with it.
"""

if __name__ != "compiled_dsa.custom_ops":
    raise ImportError(f"import compiled_dsa.custom_ops, not {__name__!r}: this folder is part of compiled_dsa")

from compiled_dsa.custom_ops.batch_metadata import BATCH_METADATA
from compiled_dsa.custom_ops.encode_queries import ENCODE_QUERIES
from compiled_dsa.custom_ops.index_topk import INDEX_TOPK_DECODE, INDEX_TOPK_PREFILL
from compiled_dsa.custom_ops.mla_prefill import MLA_PREFILL
from compiled_dsa.custom_ops.registry import OPS, Op
from compiled_dsa.custom_ops.select_and_absorb import SELECT_AND_ABSORB
from compiled_dsa.custom_ops.skinny_linear import SKINNY_LINEAR
from compiled_dsa.custom_ops.sparse_mla import SPARSE_MLA_DECODE
from compiled_dsa.custom_ops.store_index_keys import STORE_INDEX_KEYS
from compiled_dsa.custom_ops.store_latents import STORE_LATENTS
from compiled_dsa.custom_ops.store_tokens import STORE_TOKENS
from compiled_dsa.custom_ops.unabsorb import UNABSORB

__all__ = [
    "BATCH_METADATA",
    "ENCODE_QUERIES",
    "INDEX_TOPK_DECODE",
    "INDEX_TOPK_PREFILL",
    "MLA_PREFILL",
    "OPS",
    "SELECT_AND_ABSORB",
    "SKINNY_LINEAR",
    "SPARSE_MLA_DECODE",
    "STORE_INDEX_KEYS",
    "STORE_LATENTS",
    "STORE_TOKENS",
    "UNABSORB",
    "Op",
]

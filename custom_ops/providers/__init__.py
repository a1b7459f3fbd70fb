"""Providers that call a library, one module a library and op; importing one imports its library.

Each says in its docstring what it takes over from the library and what it does around it to keep the op's contract.
``common.py`` and ``scored.py`` are what they share.
"""

ELSEWHERE = {
    "fa3": "FlashAttention 3 attends selected tokens only as pages of one token, of a model-dtype cache; "
    "flash_mla is the library for that here",
    "tilelang": "kernels written in TileLang come inside of the engines that use them, not as a library to call",
    "trtllm": "sparse MLA of TensorRT-LLM (also the one in flashinfer) is for Blackwell GPUs",
}

"""skinny_linear with torch.mm through cuBLASLt, which torch prefers for a product without a bias only when told to.

us on an H200, torch.mm's own choice beside (one run, of products one after the other): the output projection of V3.2
(7168 x 16384) of 32, 64 and 128 rows 58.5, 60.2, 63.9 (62.5, 61.9, 72.3), GLM-5's (6144 x 16384) 52.1, 52.0, 58.1
(53.8, 58.1, 62.4); first projections (2304 x 7168) of 128 rows 14.4 (16.7). A decode layer of V3.2 with 128 rows of 8k
keys took 387.9 us with the former, 394.0 with the latter and 395.9 without.
"""

import functools
import threading
import warnings

import torch
from torch import Tensor

MOST_ROWS = 128  # measured up to here

_SWITCH = threading.Lock()  # one thread at a time, or the first would restore what the second has not yet read


@functools.cache
def _silence() -> None:
    """torch warns once that the switch is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.preferred_blas_library("cublaslt")


def refuses(x: Tensor, weight: Tensor, out: Tensor) -> str | None:
    if x.device.type != "cuda" or torch.version.cuda is None:
        return "needs a CUDA device"
    if x.element_size() != 2 or out.dtype != x.dtype:
        return f"x has dtype {x.dtype} and out {out.dtype}; both must be the same, of two bytes"
    if not 2 <= x.shape[0] <= MOST_ROWS:
        return f"x has {x.shape[0]} rows; 2 to {MOST_ROWS} are taken"
    return None


def run(x: Tensor, weight: Tensor, out: Tensor) -> None:
    with _SWITCH:
        before = torch.backends.cuda.preferred_blas_library()
        _silence()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            torch.mm(x, weight.t(), out=out)
        finally:
            torch.backends.cuda.preferred_blas_library(before)

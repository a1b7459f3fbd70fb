"""skinny_linear: the product of few rows with a matrix, as decoding makes them.

Legend: T rows, N rows and K columns of the weights.
"""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.layout import check_dtype, check_shape
from compiled_dsa.custom_ops.registry import define


def check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    check_shape("x", x, None, None)
    check_shape("weight", weight, None, x.shape[1])
    check_shape("out", out, x.shape[0], weight.shape[0])
    check_dtype("weight", weight, x.dtype)
    check_dtype("out", out, x.dtype, *([torch.float32] if x.element_size() == 2 else []))


def reference(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)  # sums are in fp32 anyway
    else:
        torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)


SKINNY_LINEAR = define(
    "skinny_linear(Tensor x, Tensor weight, Tensor(a!) out)",
    check=check,
    reference=reference,
    providers={
        "triton": "compiled_dsa.custom_ops.kernels.skinny_linear",
        "cublaslt": "compiled_dsa.custom_ops.providers.cublaslt",
    },
    library=True,
)


def skinny_linear(x: Tensor, weight: Tensor, out: Tensor, *, provider: str | None = None) -> None:
    """out[t] = weight @ x[t].

    An op, since few rows are bound by the reading of the weights, which libraries spread over too few multiprocessors
    or split, with a second launch for the sums. Where there are more rows, or tiles of another number than fill a
    device, it is a library's product. Sums are in fp32, save that torch lets cuBLAS add partial sums in the dtype of
    ``out``; no gradient is computed.

    Args:
        x: [T, K].
        weight: [N, K], dtype of x.
        out: [T, N], dtype of x, or fp32 of an x of two bytes.

    Raises:
        ValueError: a shape or dtype outside this contract.
    """
    torch.ops.compiled_dsa.skinny_linear(x, weight, out, provider=provider)

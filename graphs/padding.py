"""Padding rows of what a split op writes, filled inside of the segment after it: a replay launches nothing for them.

This module imports triton: import it only where CUDA graphs are about to be captured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FILLED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
_BLOCK, _PROGRAMS = 1024, 256  # enough to fill the device, few enough to cost next to nothing where no row is padding


def can_fill(tensor: Tensor) -> bool:
    """Whether ``fill_padding`` takes the tensor."""
    return tensor.is_contiguous() and tensor.dtype in FILLED_DTYPES and tensor.numel() < 2**31


def compile_fills(device: torch.device) -> None:
    """Compiles and loads what ``fill_padding`` may run, which is not to happen during a capture."""
    rows = torch.zeros((), dtype=torch.int32, device=device)
    for dtype in FILLED_DTYPES:
        fill_padding(torch.zeros(1, dtype=dtype, device=device), rows, 0.0)


@triton.jit(do_not_specialize=["out", "rows", "elements", "row_elements"])  # one variant a dtype
def _fill(out, rows, value, elements, row_elements, BLOCK: tl.constexpr):
    first = tl.load(rows).to(tl.int64) * row_elements + tl.program_id(0) * BLOCK
    filled = tl.full([BLOCK], value, tl.float32).to(out.dtype.element_ty)
    for start in range(first, elements, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(out + place, filled, mask=place < elements)


def fill_padding(tensor: Tensor, rows: Tensor, value: float) -> None:
    """Fills ``tensor[rows:]``, in one launch that reads the number of rows on the device.

    Args:
        tensor: [T, ...], see ``can_fill``.
        rows: int32 [], between 0 and T.
    """
    if tensor.numel():
        row_elements = tensor.numel() // tensor.shape[0]
        _fill[(_PROGRAMS,)](tensor, rows, float(value), tensor.numel(), row_elements, BLOCK=_BLOCK)

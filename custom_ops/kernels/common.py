"""What the Triton providers share: reasons to refuse, sizes of launches, and small pieces of kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_dsa.custom_ops.layout import PAGE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert e4m3
HOPPER = (9, 0)  # wgmma is its alone

# A grid on the CPU is sized as for a GPU of this many multiprocessors: so few that at the sizes of tests some calls
# split the keys of a row and others do not.
INTERPRETER_MULTIPROCESSORS = 8

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_PAGE = tl.constexpr(PAGE)


def refuses_device(pool: Tensor) -> str | None:
    """Why kernels cannot run where ``pool`` lies, or cannot read its format there."""
    if pool.device.type != "cuda":
        return None if triton.knobs.runtime.interpret else "needs a CUDA device (or TRITON_INTERPRET=1)"
    capability = torch.cuda.get_device_capability(pool.device)
    if pool.dtype == torch.uint8 and capability < FP8_CAPABILITY:
        return f"fp8 pools need compute capability {FP8_CAPABILITY}, this device has {capability}"
    return None


def refuses_dtype(**tensors: Tensor) -> str | None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            return f"{name} has dtype {tensor.dtype}; it must be {' or '.join(str(d) for d in DTYPES)}"
    return None


def refuses_dot(dtype: torch.dtype) -> str | None:
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        return "triton's interpreter multiplies the bits of bfloat16, not its values"
    return None


def refuses_strides(**tensors: Tensor | None) -> str | None:
    """Kernels take every stride but the last from the tensors; the last must be 1."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} has strides {tensor.stride()}; its last dim must be dense"
    return None


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def dependent_launch(device: torch.device) -> bool:
    """Can a kernel be launched before the one in front of it has ended (programmatic dependent launch)?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_start(early: bool) -> dict[str, bool]:
    """Keywords of the launch of a kernel with an argument EARLY: with ``early`` it may start before the kernel in front
    of it has ended, and waits for that itself."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def outputs(topk_out: Tensor | None, positions_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both outputs of a selection; the other one in the place of one that is None, which its kernel does not write."""
    return positions_out if topk_out is None else topk_out, topk_out if positions_out is None else positions_out


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 dots are exact products: tf32 would change which tokens are selected."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def wait_for_kernel_in_front():
    """The kernel behind starts and waits likewise. Whoever waits may assume all that came before as done, as long as
    every program of every kernel launched so waits before it reads or writes what others do. One that waits at its end
    instead (select_and_absorb.py) keeps that true for those behind it."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def finite(maximum):
    """The value to subtract before exponentiating: 0 where nothing was seen, so that exp2(-inf - x) is 0, not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def slots_in(page, positions, pages):
    """int64 physical slots of token positions that lie in these pages; -1 where no page of the pool is."""
    return tl.where((page >= 0) & (page < pages), page.to(tl.int64) * _PAGE + positions % _PAGE, -1)


@triton.jit
def paged_slots(table, positions, inside, pages):
    """int64 physical slots of token positions of one request; -1 outside ``inside`` and where no page of the pool is.

    ``table`` points at the request's row of the page table.
    """
    return slots_in(tl.load(table + positions // _PAGE, mask=inside, other=-1), positions, pages)

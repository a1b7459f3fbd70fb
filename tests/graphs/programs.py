"""Split ops of nobody's library, and functions around them: graphs must not depend on our own ops."""

from collections.abc import Callable

import torch
from torch import Tensor

from compiled_dsa.custom_ops.capture import split_op


@split_op("toy::prefix_sum", mutates_args=["out"], rows={"x": None, "out": 0})
def prefix_sum(x: Tensor, out: Tensor, times: int = 1) -> None:
    out.copy_(x.cumsum(0) * times)


@split_op("toy::append", mutates_args=["pool"], rows={"x": None, "slots": None})
def append(pool: Tensor, x: Tensor, slots: Tensor) -> None:
    """Row t of x goes to row ``slots[t]`` of the pool."""
    pool.index_copy_(0, slots, x)


def program(steps: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A function of x [T, 4] and a buffer like it that does one thing a letter.

    p: pointwise; m: pointwise, in place; v: in place through a view; c: a split op writes the buffer; w: a split op
    writes views of it; n: a split op is given the number of rows; s: uses a whole shape; t: an op of two outputs; g:
    without gradients; a: autocast switched off.
    """

    def run(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        left, turned = buffer[:, :2], buffer.t()
        for step in steps:
            if step == "p":
                x = x * 0.5 + buffer
            elif step == "m":
                buffer.mul_(2)
            elif step == "v":
                left.add_(x[:, 2:])
            elif step == "c":
                prefix_sum(x, buffer)
            elif step == "w":
                prefix_sum(x.t(), turned)
            elif step == "n":
                prefix_sum(buffer, x, x.shape[0])
            elif step == "s":
                x = x.flatten().view(buffer.shape)
            elif step == "t":
                halves = x.chunk(2, -1)
                x = torch.cat([halves[1], halves[0]], -1)
            elif step == "g":
                with torch.no_grad():
                    x = x - buffer
            elif step == "a":
                with torch.autocast(x.device.type, enabled=False):
                    x = x @ torch.eye(4, dtype=x.dtype, device=x.device)
        return x, buffer

    return run

"""Callables and states on which graph runners are tested."""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.capture import split_op


@split_op("compiled_dsa_tests::running_sum", mutates_args=["out"], rows={"x": None, "out": 0})
def running_sum(x: Tensor, out: Tensor) -> None:
    """A split op whose result depends on the rows that it sees: each row's sum of all rows up to it."""
    SEEN.append(x.shape[0])
    out.copy_(x.cumsum(0))


@split_op("compiled_dsa_tests::scale_rows_in_place", mutates_args=["x"])
def scale_rows_in_place(x: Tensor, factor: float) -> None:
    """A split op that names no rows and mutates what pointwise ops before and after it use."""
    SEEN.append(x.shape[0])
    x.mul_(factor)


SEEN: list[int] = []  # rows that split ops saw, call by call


class Counter:
    """A toy state: every call appends its input at ``length`` and advances by one."""

    def __init__(self, room: int = 64, device: str = "cuda"):
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.rows = torch.zeros(room, 4, device=device)
        self.facts = None

    def advanced_tensors(self):
        return [self.length]

    def trace_facts(self):
        return self.facts

    def set_trace_facts(self, facts):
        self.facts = facts

    def signature(self):
        return self.rows.shape


def append_and_sum(x: Tensor, state: Counter, *, scale: float = 1.0):
    state.rows.index_copy_(0, state.length.unsqueeze(0), x * scale if state.facts == "scaled" else x)
    state.length.add_(1)
    state.set_trace_facts(None)
    return {"sum": state.rows.sum(0), "state": state}


def two_layers(x: Tensor, weight: Tensor) -> Tensor:
    """[T, 4] -> [T, 4]: two layers of pointwise work and a matmul around split ops."""
    for _ in range(2):
        summed = torch.empty_like(x)
        running_sum(torch.relu(x) + 0.5, summed)
        x = torch.tanh(summed @ weight) * 2
    return x

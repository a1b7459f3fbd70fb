"""Padding rows are filled from a number of rows on the device."""

import pytest
import torch

from compiled_dsa.graphs import padding
from compiled_dsa.graphs.padding import FILLED_DTYPES, can_fill, fill_padding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs one after the other: fewer of them, which fill several blocks each."""
    if DEVICE == "cpu":
        monkeypatch.setattr(padding, "_PROGRAMS", 3)
        monkeypatch.setattr(padding, "_BLOCK", 256)


@pytest.mark.parametrize("dtype", FILLED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (7, 2, 600), (4, 0), (0, 3)], ids=str)
def test_rows_after_the_real_ones_are_filled(dtype, shape):
    for rows in {0, 1, shape[0] // 2, shape[0]}:
        if rows > shape[0]:
            continue
        tensor = torch.ones(shape, dtype=dtype, device=DEVICE)
        fill_padding(tensor, torch.tensor(rows, dtype=torch.int32, device=DEVICE), -1)
        assert (tensor[:rows] == 1).all() and (tensor[rows:] == -1).all()


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 0.5])
def test_values(value):
    tensor = torch.ones(3, 2, device=DEVICE)
    fill_padding(tensor, torch.tensor(1, dtype=torch.int32, device=DEVICE), value)
    torch.testing.assert_close(tensor[1:].cpu(), torch.full((2, 2), value), equal_nan=True)


def test_what_it_does_not_take():
    assert can_fill(torch.zeros(4, 2))
    assert not can_fill(torch.zeros(2, 4).t())
    assert not can_fill(torch.zeros(4, dtype=torch.int64))
    assert not can_fill(torch.empty(1).expand(2**31))

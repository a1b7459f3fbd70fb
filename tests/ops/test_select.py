"""The Triton selection of index_topk alone: rows of hard scores, against a stable sort."""

import pytest
import torch

from compiled_dsa.custom_ops.kernels import select
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.testing import poisoned, random_page_table
from tests.ops.index_cases import (
    check_positions,
    far_rows,
    hard_rows,
    narrow_rows_of,
    scores_and_maxima,
    zeros_of_both_signs,
)


def write_slots(values, visible, K, device, prefill=False):
    """(slots, page table): the Triton selection alone, of rows whose scores are ``values``."""
    rows, columns = values.shape
    group = select.group_size(columns, K, prefill)
    scores, maxima = scores_and_maxima(values, visible, group)
    table = random_page_table(rows, columns // PAGE, rows * columns // PAGE, device)
    requests = torch.arange(rows, dtype=torch.int32, device=device)
    chosen = poisoned(rows, K, dtype=torch.int32, device=device)
    select.write_slots(scores, maxima, table, requests, visible, chosen, table.numel(), group, early=False)
    return chosen, table


@pytest.mark.parametrize("K", [16, 33, 100])
@pytest.mark.parametrize("columns", [64, 256])
def test_selection_of_hard_rows(device, K, columns, monkeypatch):
    """Rows of 512 keys, narrowed down to groups whose number is K, or above it, or not at all."""
    narrow_rows_of(columns * 2, monkeypatch)
    values = hard_rows(512, device)
    visible = torch.tensor([512, 511, 510, 512, 512, 509, 512, 500, 258], dtype=torch.int32, device=device)
    check_positions(*write_slots(values, visible, K, device), values, visible, K)


@pytest.mark.parametrize("n", [-1, 0, 1, 32, 33, 34, 127, 129])
def test_selection_around_k(device, n, monkeypatch):
    """Windows of 0, K - 1, K, K + 1 keys and more, in a page table that is longer than they need."""
    narrow_rows_of(128, monkeypatch)
    values = hard_rows(512, device)
    visible = torch.full((9,), n, dtype=torch.int32, device=device)
    check_positions(*write_slots(values, visible, 33, device), values, visible, 33)


@pytest.mark.parametrize("columns", [128, 512])
def test_zeros_of_both_signs(device, columns, monkeypatch):
    """They are equal, also where none is larger; keys tell them apart."""
    narrow_rows_of(columns, monkeypatch)
    values = zeros_of_both_signs(512, device)
    visible = torch.full((4,), 512, dtype=torch.int32, device=device)
    check_positions(*write_slots(values, visible, 20, device), values, visible, 20)


@pytest.mark.parametrize("K", [16, 33, 100])
@pytest.mark.parametrize("columns", [64, 256])
def test_far_rows(device, K, columns, monkeypatch):
    narrow_rows_of(columns * 2, monkeypatch)
    values = far_rows(512, device)
    visible = torch.full((7,), 512 - 1, dtype=torch.int32, device=device)
    check_positions(*write_slots(values, visible, K, device), values, visible, K)


@pytest.mark.parametrize("numbers", [1, 20, 33, 100])
def test_numbers_in_fewer_groups_than_k(device, numbers, monkeypatch):
    """Their maxima bound nothing: a score below all of them may be among the best."""
    narrow_rows_of(128, monkeypatch)
    values = torch.full((2, 512), torch.nan, device=device)
    values[0, :numbers] = torch.randn(numbers, device=device)
    values[1, 512 - numbers :] = torch.randn(numbers, device=device).relu()
    visible = torch.tensor([512, 512], dtype=torch.int32, device=device)
    check_positions(*write_slots(values, visible, 33, device), values, visible, 33)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 33, 512, 2047, 2048])
@pytest.mark.parametrize(("columns", "prefill"), [(8192, False), (32768, False), (32768, True), (131072, False)])
def test_selection_of_long_rows(K, columns, prefill):
    values = torch.cat([hard_rows(columns, "cuda"), far_rows(columns, "cuda")])
    visible = torch.tensor([columns - t for t in range(8)] + [K + 1] + [columns] * 7, dtype=torch.int32, device="cuda")
    check_positions(*write_slots(values, visible, K, "cuda", prefill), values, visible, K)

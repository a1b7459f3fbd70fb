"""The Triton selection of index_topk alone: rows of hard scores, against a stable sort."""

import pytest
import torch

from compiled_dsa.custom_ops.kernels import select
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.testing import poisoned, random_page_table


def positions(chosen, table):
    """Chosen slots of one request -> sorted logical positions."""
    slots = (table.long()[:, None] * PAGE + torch.arange(PAGE, device=table.device)).flatten()
    return torch.isin(slots, chosen[chosen >= 0].long()).nonzero().flatten()


def best_positions(row: torch.Tensor, K: int) -> torch.Tensor:
    """Positions of the K best scores, sorted: of equal ones the lowest, never NaN. All of a row of at most K."""
    if row.numel() <= K:
        return torch.arange(row.numel(), device=row.device)
    number = (~row.isnan()).nonzero().flatten()
    return number[(row[number] + 0.0).sort(descending=True, stable=True).indices[:K]].sort().values


def check_positions(chosen, table, values, visible, K):
    for t, n in enumerate(visible.tolist()):
        want = best_positions(values[t, : max(n, 0)], K)
        assert (chosen[t, : want.numel()] >= 0).all() and (chosen[t, want.numel() :] == -1).all(), f"row {t}"
        assert torch.equal(positions(chosen[t], table[t]), want), f"row {t}"


def narrow_rows_of(columns, monkeypatch):
    """Longer ones are narrowed down, in tiles that suit tests."""
    for name in ("DIRECT_SCORES", "DIRECT_SCORES_PREFILL", "NARROWED_MAXIMA"):
        monkeypatch.setattr(select, name, columns)
    monkeypatch.setattr(select, "SMALLEST_TILE", 64)


def hard_rows(columns, device):
    """[9, columns]: random; half zeros; few values; one value; few numbers; -inf; no number; +inf; rising."""
    values = torch.randn(9, columns, device=device)
    values[1] = values[1].relu()
    values[2] = (values[2] * 2).round()
    values[3] = 0.0
    values[4] = torch.where(torch.rand(columns, device=device) < 0.9, torch.nan, values[4])
    values[5] = -torch.inf
    values[5, ::50] = 1.0
    values[6] = torch.nan
    values[6, 5] = 1.0
    values[7, ::3] = torch.inf
    values[8] = torch.arange(columns, device=device)
    return values


def zeros_of_both_signs(columns, device):
    """[4, columns]: 0.0 and -0.0 in turn; -0.0 only; both and -1.0; both in parts of a row of -1.0."""
    values = torch.zeros(4, columns, device=device)
    values[0, ::2], values[1] = -0.0, -0.0
    values[2, ::3], values[2, 1::3] = -1.0, -0.0
    values[3] = -1.0
    values[3, 100:110], values[3, 300:320] = -0.0, 0.0
    return values


def write_slots(values, visible, K, device, prefill=False):
    """The Triton selection alone, from scores and maxima as the scores kernel leaves them, the rest 1e30."""
    rows, columns = values.shape
    group = select.group_size(columns, K, prefill)
    inside = torch.arange(columns, device=device) < visible[:, None]
    scores = values.masked_fill(~inside, 1e30)
    maxima = torch.full((rows, select.maxima_of(columns, group)), 1e30, device=device)
    if group:
        numbers = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = numbers.view(rows, -1, group).amax(-1)
        maxima[:, : columns // group] = best.masked_fill(scores.isnan().view(rows, -1, group).all(-1), torch.nan)
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


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 33, 512, 2047, 2048])
@pytest.mark.parametrize(("columns", "prefill"), [(8192, False), (32768, False), (32768, True), (131072, False)])
def test_selection_of_long_rows(K, columns, prefill):
    values = hard_rows(columns, "cuda")
    visible = torch.tensor([columns - t for t in range(8)] + [K + 1], dtype=torch.int32, device="cuda")
    check_positions(*write_slots(values, visible, K, "cuda", prefill), values, visible, K)

"""The Triton selection of several programs a row: alone, against a stable sort, and within index_topk_decode."""

import pytest
import torch

from compiled_dsa.custom_ops.kernels import select, select_split
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import check_topk, index_scores_oracle, poisoned, random_index_pool, random_page_table
from tests.ops.index_cases import (
    batch,
    check_positions,
    far_rows,
    hard_rows,
    narrow_rows_of,
    one_hot,
    positions,
    queries,
    scored_pool,
    scores_and_maxima,
    zeros_of_both_signs,
)

COLUMNS = 512


@pytest.fixture
def small(monkeypatch):
    """Sizes that suit tests: rows of 512 keys are split over up to eight programs, in lists of 4 K candidates."""
    narrow_rows_of(128, monkeypatch)
    for name, value in (("CHUNK", 64), ("SMALLEST_LIST", 64), ("LOG_BINS", 5)):
        monkeypatch.setattr(select_split, name, value)


def select_rows(values, visible, K, splits, with_positions=False):
    """(slots, page table[, positions]): this selection alone, of rows whose scores are ``values``."""
    rows, columns = values.shape
    device = values.device
    group = select.group_size(columns, K, False)
    scores, maxima = scores_and_maxima(values, visible, group)
    counters = select_split.empty_counters(rows, splits, device)
    counters = None if counters is None else counters.zero_()
    table = random_page_table(rows, columns // PAGE, rows * columns // PAGE, device)
    requests = torch.arange(rows, dtype=torch.int32, device=device)
    chosen, where = (poisoned(rows, K, dtype=torch.int32, device=device) for _ in range(2))
    select_split.write_slots_split(
        scores, maxima, counters, table, requests, visible, chosen, table.numel(), group, splits, False,
        where if with_positions else None,
    )  # fmt: skip
    return (chosen, table, where) if with_positions else (chosen, table)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("log_bins", [0, 5, 11])
@pytest.mark.parametrize(("K", "splits"), [(16, 1), (16, 4), (33, 2), (33, 8), (60, 2)])
def test_hard_rows(device, small, K, splits, log_bins, monkeypatch):
    """Few candidates and lists that overflow, more and less equal scores than K, -inf, +inf and NaN."""
    monkeypatch.setattr(select_split, "LOG_BINS", log_bins)
    values = hard_rows(COLUMNS, device)
    visible = int32([512, 511, 510, 512, 512, 509, 512, 500, 258], device)
    check_positions(*select_rows(values, visible, K, splits), values, visible, K)


@pytest.mark.parametrize("log_bins", [0, 11])
@pytest.mark.parametrize(("K", "splits"), [(16, 1), (33, 4)])
def test_far_rows(device, small, K, splits, log_bins, monkeypatch):
    monkeypatch.setattr(select_split, "LOG_BINS", log_bins)
    values = far_rows(COLUMNS, device)
    visible = torch.full((7,), COLUMNS - 1, dtype=torch.int32, device=device)
    check_positions(*select_rows(values, visible, K, splits), values, visible, K)


@pytest.mark.parametrize("n", [-1, 0, 32, 33, 34, 127, 129, 300])
def test_windows(device, small, n):
    """Windows of K keys and about as many, and of so few that scores take the place of maxima."""
    values = hard_rows(COLUMNS, device)
    visible = torch.full((9,), n, dtype=torch.int32, device=device)
    check_positions(*select_rows(values, visible, 33, 4), values, visible, 33)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("share", [0, 1, 8])
def test_lists_that_overflow(device, small, splits, share, monkeypatch):
    """Room for K / 2 candidates, for K and for more, and a segment that is too small: the whole row is searched."""
    monkeypatch.setattr(select_split, "SMALLEST_LIST", 16)
    monkeypatch.setattr(select_split, "CANDIDATES", share)
    values = hard_rows(COLUMNS, device)
    values[0, 64:128] += 10.0  # on one page, so for one program
    visible = torch.full((9,), COLUMNS, dtype=torch.int32, device=device)
    check_positions(*select_rows(values, visible, 32, splits), values, visible, 32)


def test_zeros_of_both_signs(device, small):
    """The bound is -0.0 or 0.0; both are equal, and the lowest positions win."""
    values = zeros_of_both_signs(COLUMNS, device)
    visible = torch.full((4,), COLUMNS, dtype=torch.int32, device=device)
    check_positions(*select_rows(values, visible, 20, 4), values, visible, 20)


def test_neighbouring_best_keys(device, small):
    """All of the best keys in one run."""
    values = torch.randn(3, COLUMNS, device=device)
    values[0, 130:170] += 20.0
    values[1, :64] = 7.0
    values[2, -70:] += 1e30
    visible = torch.full((3,), COLUMNS, dtype=torch.int32, device=device)
    check_positions(*select_rows(values, visible, 40, 4), values, visible, 40)


def test_positions_beside_slots(device, small):
    values = hard_rows(COLUMNS, device)
    visible = int32([512, 511, 20, 512, 512, 509, 512, 500, 258], device)
    chosen, table, where = select_rows(values, visible, 33, 4, with_positions=True)
    for t in range(9):
        good = where[t] >= 0
        assert torch.equal(good, chosen[t] >= 0)
        slots = table[t, where[t, good].long() // PAGE] * PAGE + where[t, good] % PAGE
        assert torch.equal(slots, chosen[t, good])


def test_programs_a_row():
    device = torch.device("cpu")
    assert select_split.multiprocessors(device) == 8
    of = select_split.splits_of
    assert [of(rows, 1 << 17, 2048, 8, device) for rows in (1, 2, 3, 4, 5)] == [8, 4, 2, 2, 0]
    assert of(1, 3 * select_split.CHUNK, 2048, 8, device) == 2
    assert of(1, 1 << 17, 2048, 0, device) == 0  # no maxima
    assert of(1, 1 << 17, 2049, 8, device) == 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("forced", [(0, 0), (2, 5)])
def test_decode(device, small, rows, forced, monkeypatch):
    """Scores, zeroed counters and selection together, in scratch that holds anything."""
    empty = torch.empty
    split = []
    write = select_split.write_slots_split
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: empty(*size, **kwargs).fill_(123))
    monkeypatch.setattr(
        "compiled_dsa.custom_ops.kernels.index_topk.write_slots_split",
        lambda *args, **kwargs: split.append(1) or write(*args, **kwargs),
    )
    lengths = [500, 512, 30][:rows]
    data, pages = batch(lengths, 8, device)
    pool = random_index_pool(pages, 32, FP8, device)
    q, weights = queries(rows, 16, 32, FP8, device)
    chosen, again, want = (poisoned(rows, 40, dtype=torch.int32, device=device) for _ in range(3))
    decode = torch.ops.compiled_dsa.index_topk_decode
    for out in (chosen, again):
        decode(q, weights, pool, *data, out, True, None, *forced, provider="triton")
    assert len(split) == 2
    assert torch.equal(chosen, again)
    decode(q, weights, pool, *data, want, True, None, *forced, provider="reference")
    scores = index_scores_oracle(q, weights, pool, *data)
    if forced == (0, 0):
        check_topk(chosen, data[2], *scores)
    for t in range(rows):
        close = positions(chosen[t], data[0][t]).tolist(), positions(want[t], data[0][t]).tolist()
        assert len(close[0]) == len(close[1]) and len(set(close[0]) ^ set(close[1])) <= 2  # rounding at the threshold


def test_decode_takes_the_lowest_of_equal_scores(device, small):
    values = torch.randn(2, COLUMNS, device=device).relu().round()
    pool, table = scored_pool(values, 2, COLUMNS // PAGE)
    visible = int32([512, 333], device)
    chosen = poisoned(2, 50, dtype=torch.int32, device=device)
    q, weights = one_hot(2, device)
    torch.ops.compiled_dsa.index_topk_decode(
        q, weights, pool, table, int32([0, 1], device), visible, chosen, True, provider="triton"
    )
    check_positions(chosen, table, values, visible, 50, ordered=True)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [33, 512, 2047, 2048])
@pytest.mark.parametrize(("columns", "splits"), [(32768, 8), (65536, 1), (65536, 4), (131072, 32), (1 << 20, 32)])
def test_long_rows(K, columns, splits):
    """In the same order each time, though programs end in any order."""
    values = hard_rows(columns, "cuda")
    visible = torch.tensor([columns - t for t in range(8)] + [K + 1], dtype=torch.int32, device="cuda")
    chosen, table = select_rows(values, visible, K, splits)
    check_positions(chosen, table, values, visible, K)
    slots = torch.arange(table.numel() * PAGE, device="cuda")
    for _ in range(20):
        again, other = select_rows(values, visible, K, splits)
        moved = torch.empty_like(slots)
        moved.view(-1, PAGE)[other.long().flatten()] = slots.view(-1, PAGE)[table.long().flatten()]
        assert torch.equal(torch.where(again < 0, -1, moved[again.clamp(min=0).long()].int()), chosen)

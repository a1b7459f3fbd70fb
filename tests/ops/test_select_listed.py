"""The Triton selection of index_topk for long rows of a prefill: hard rows and orders, against a stable sort."""

import pytest
import torch

from compiled_dsa.custom_ops.kernels import select_listed
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.testing import check_topk, index_scores_oracle, poisoned, random_index_pool, random_page_table
from tests.ops.index_cases import (
    check_positions,
    far_rows,
    hard_rows,
    one_hot,
    prefill_batch,
    queries,
    run,
    scored_pool,
    scores_and_maxima,
)

COLUMNS = 512


@pytest.fixture
def small(monkeypatch):
    """Sizes that suit tests: lists of 64 scores (of 256 with K = 100), several chunks and cuts a row."""
    for name, value in {"LISTED_SCORES": 128, "SMALLEST_LIST": 64, "SAMPLE": 32, "CHUNK": 64, "WARPS": 4}.items():
        monkeypatch.setattr(select_listed, name, value)


def hard_orders(columns, device):
    """[6, columns]: rising, falling, equal ones first, best ones last, best ones first, NaN but at the end."""
    rising = torch.arange(columns, device=device).float()
    values = rising.repeat(6, 1)
    values[1] = rising.flip(0)
    values[2] = torch.where(rising < columns // 2, 5.0, rising % 7)
    values[3] = torch.where(rising >= columns - 40, 9.0, torch.randn(columns, device=device))
    values[4] = torch.where(rising < 40, 9.0, torch.randn(columns, device=device).clamp(max=8))
    values[5] = torch.where(rising < columns - 120, torch.nan, rising % 50)
    return values


def select(values, visible, K, device, programs=3):
    """(slots, positions, page table): this selection alone, of rows whose scores are ``values``."""
    rows, columns = values.shape
    scores, _ = scores_and_maxima(values, visible, 0)
    lists = poisoned(programs, select_listed.list_size(columns, K, True), dtype=torch.int64, device=device)
    table = random_page_table(rows, columns // PAGE, rows * columns // PAGE, device)
    requests = torch.arange(rows, dtype=torch.int32, device=device)
    chosen, where = (poisoned(rows, K, dtype=torch.int32, device=device) for _ in range(2))
    select_listed.write_slots_listed(
        scores, lists, table, requests, visible, chosen, table.numel(), early=False, positions_out=where
    )
    return chosen, where, table


def check(values, visible, K, device, programs=3):
    chosen, where, table = select(values, visible, K, device, programs)
    check_positions(chosen, table, values, visible, K)
    pages = table.gather(1, where.clamp(min=0).long() // PAGE)
    assert torch.equal(chosen, torch.where(where >= 0, pages * PAGE + where % PAGE, -1).int())


@pytest.mark.parametrize("K", [1, 16, 33, 100])
def test_hard_rows(device, small, K):
    values = hard_rows(COLUMNS, device)
    visible = torch.tensor([512, 511, 510, 512, 512, 509, 512, 500, 258], dtype=torch.int32, device=device)
    check(values, visible, K, device)


@pytest.mark.parametrize("K", [16, 33, 100])
def test_far_rows(device, small, K):
    values = far_rows(COLUMNS, device)
    check(values, torch.full((7,), COLUMNS - 1, dtype=torch.int32, device=device), K, device)


@pytest.mark.parametrize("K", [16, 33, 100])
def test_hard_orders(device, small, K):
    values = hard_orders(COLUMNS, device)
    visible = torch.tensor([512, 512, 507, 511, 512, 509], dtype=torch.int32, device=device)
    check(values, visible, K, device)


@pytest.mark.parametrize("n", [-1, 0, 1, 32, 33, 34, 63, 64, 65, 127, 130])
def test_windows_around_k_and_the_list(device, small, n):
    values = hard_rows(COLUMNS, device)
    check(values, torch.full((9,), n, dtype=torch.int32, device=device), 33, device, programs=9)


@pytest.mark.parametrize("sampled", [float("inf"), float("nan"), float("-inf")])
def test_a_sample_that_says_nothing(device, small, sampled):
    """Where the sample falls holds +inf, NaN or -inf: the bound is too high, none, or none."""
    K = 33
    values = torch.randn(1, COLUMNS, device=device)
    values[0, sample_positions(COLUMNS)] = sampled
    check(values, torch.full((1,), COLUMNS, dtype=torch.int32, device=device), K, device)


def sample_positions(n):
    load = torch.arange(select_listed.SAMPLE // select_listed.SAMPLE_LOAD)
    loads = n // select_listed.SAMPLE_LOAD
    stride = loads // len(load)
    at = load * stride + load * (loads % len(load)) // len(load) + ((load * 40503 & 0xFFFF) * stride >> 16)
    return (at[:, None] * select_listed.SAMPLE_LOAD + torch.arange(select_listed.SAMPLE_LOAD)).flatten()


def test_the_programs_do_not_matter(device, small):
    """Bit for bit, and in the same order: rows are taken in turn by any number of programs."""
    values = torch.cat([hard_rows(COLUMNS, device)[:3], hard_orders(COLUMNS, device)[:2]])
    visible = torch.full((5,), COLUMNS, dtype=torch.int32, device=device)
    wheres = [select(values, visible, 33, device, programs)[1] for programs in (1, 3, 5)]
    assert torch.equal(wheres[0], wheres[1]) and torch.equal(wheres[0], wheres[2])


@pytest.fixture
def listed(monkeypatch):
    """Numbers of programs, call by call."""
    calls = []
    write = select_listed.write_slots_listed
    from compiled_dsa.custom_ops.kernels import index_topk

    def counted(scores, lists, *args, **kwargs):
        calls.append((scores.shape[0], lists.shape[0]))
        write(scores, lists, *args, **kwargs)

    monkeypatch.setattr(index_topk, "write_slots_listed", counted)
    return calls


def test_prefill_of_ragged_rows(backend, small, listed):
    """Requests without a prefix and with one, rows of fewer than K keys, pages outside the pool."""
    rows, pages = prefill_batch([9, 8, 7], [140, 20, 120], backend.device)
    rows[0][0, 1], rows[0][2, 0] = -1, pages
    pool = random_index_pool(pages, 32, torch.float16, backend.device)
    q, weights = queries(24, 16, 32, torch.float16, backend.device)
    chosen = run(backend, q, weights, pool, rows, 24, deterministic=backend.provider != "torch")
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))
    assert bool(listed) == (backend.provider == "triton")


def test_equal_scores_of_a_prefill(backend, small):
    """Most scores are zero, as ReLU makes them; the lowest positions are chosen."""
    if backend.library:
        pytest.skip("of Triton's selection")
    values = torch.randn(1, 256, device=backend.device).relu() * (torch.rand(256, device=backend.device) < 0.1)
    pool, table = scored_pool(values, 1, 4)
    visible = torch.arange(256 - 8, 256, dtype=torch.int32, device=backend.device) + 1
    rows = (table, torch.zeros_like(visible), visible)
    chosen = run(backend, *one_hot(8, backend.device), pool, rows, 40, deterministic=True)
    check_positions(chosen, table.expand(8, -1), values.expand(8, -1), visible, 40, ordered=True)


def test_the_result_does_not_depend_on_the_budget(backend, small, listed):
    """Cuts inside requests, one program, and no room for a list beside a row."""
    rows, pages = prefill_batch([9, 7], [130, 51], backend.device)
    pool = random_index_pool(pages, 32, torch.float32, backend.device)
    q, weights = queries(16, 8, 32, torch.float32, backend.device)
    row_bytes, list_bytes = 4 * PAGE * rows[0].shape[1], 8 * 64
    deterministic = backend.provider != "torch"
    whole = run(backend, q, weights, pool, rows, 32, deterministic)
    for budget in (row_bytes, row_bytes + list_bytes, 9 * row_bytes):
        listed.clear()
        cut = run(backend, q, weights, pool, rows, 32, deterministic, budget=budget)
        if deterministic:
            assert torch.equal(cut, whole)
        else:
            assert torch.equal(cut.sort().values, whole.sort().values)
        assert all(at_once * row_bytes + lists * list_bytes <= budget for at_once, lists in listed)
        assert bool(listed) == (backend.provider == "triton" and budget > row_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 33, 512, 2047, 2048])
@pytest.mark.parametrize("columns", [16384, 32768, 131072])
def test_long_rows(K, columns):
    values = torch.cat([hard_rows(columns, "cuda"), hard_orders(columns, "cuda")])
    visible = torch.tensor([columns - t for t in range(14)] + [K + 1], dtype=torch.int32, device="cuda")
    check(values, visible, K, "cuda", programs=7)

"""index_topk with ``deterministic``: a row's keys lie by ascending position, whatever chose them.

So a row gets the same bits alone, among others, over a wider page table, in a decode, in a prefill, within any budget.
"""

from functools import partial

import pytest
import torch

from compiled_dsa.custom_ops.kernels import in_order, index_scores, index_topk, select, select_listed, select_split
from compiled_dsa.custom_ops.kernels.common import multiprocessors
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import poisoned, random_index_pool, random_page_table
from tests.ops.index_cases import (
    BUDGET,
    best_positions,
    hard_rows,
    narrow_rows_of,
    one_hot,
    scored_pool,
    scores_and_maxima,
)

K, COLUMNS = 40, 8
# (request, visible) of rows that see many keys, K and fewer; one of more than K has fewer numbers
ROWS = [(0, 512), (1, 512), (1, 60), (1, 40), (2, 250), (2, 30)]
if torch.cuda.is_available():  # the interpreter takes seconds each
    ROWS += [(0, 300), (2, 500), (2, 200)]
WRITERS = ("write_slots", "write_slots_split", "write_slots_listed")


@pytest.fixture
def small(monkeypatch):
    """Sizes at which rows of 512 keys are narrowed down, split over programs, and listed in a prefill."""
    narrow_rows_of(128, monkeypatch)
    for module, sizes in (
        (select_split, {"CHUNK": 64, "SMALLEST_LIST": 64, "LOG_BINS": 5}),
        (select_listed, {"LISTED_SCORES": 128, "SMALLEST_LIST": 64, "SAMPLE": 32, "CHUNK": 64, "WARPS": 4}),
    ):
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def written(monkeypatch):
    """The names of the selections that run."""
    names = set()

    def noted(name, write):
        return lambda *args, **kwargs: names.add(name) or write(*args, **kwargs)

    for name in WRITERS:
        monkeypatch.setattr(index_topk, name, noted(name, getattr(index_topk, name)))
    return names


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def slots_of(where, pages):
    """Slots of positions [rows, K] on pages [rows, W]."""
    page = pages.gather(1, where.clamp(min=0).long() // PAGE)
    return torch.where(where >= 0, page * PAGE + where % PAGE, -1).int()


def ordered_positions(values, exists):
    """[rows of ROWS, K]: what each is to get of scores and whether there is a key, both [requests, COLUMNS * PAGE]."""
    where = torch.full((len(ROWS), K), -1, dtype=torch.int32, device=values.device)
    for row, (request, n) in zip(where, ROWS):
        if n <= K:
            lanes = torch.arange(n, device=values.device)
            row[:n] = torch.where(exists[request, :n], lanes, -1)
        else:
            best = best_positions(values[request, :n].masked_fill(~exists[request, :n], torch.nan), K)
            row[: best.numel()] = best
    return where


def test_rows_get_the_same_bits_in_any_call(backend, small, written):
    """Half of the scores of a request are equal, half of another's are NaN, and the pages of the third have gaps."""
    values = torch.randn(3, COLUMNS * PAGE, device=backend.device).relu()
    values[1, ::2] = torch.nan
    pool, table = scored_pool(values, 3, COLUMNS)
    table[2, 3], table[2, 0] = -1, len(pool)
    wide = torch.cat([table, random_page_table(3, COLUMNS, len(pool), backend.device)], 1)
    want = ordered_positions(values, ((table >= 0) & (table < len(pool))).repeat_interleave(PAGE, 1))

    def check(name, rows, page_table, padding=0, budget=BUDGET):
        requests, visible = zip(*[ROWS[row] for row in rows], *[(0, 0)] * padding)
        rest = (int32(requests, backend.device), int32(visible, backend.device))
        chosen, where = (poisoned(len(requests), K, dtype=torch.int32, device=backend.device) for _ in range(2))
        scratch = [budget] if name == "index_topk_prefill" else []
        backend(name, *one_hot(len(requests), backend.device), pool, page_table, *rest, chosen, True, *scratch, where)
        assert torch.equal(where[: len(rows)], want[rows]) and (where[len(rows) :] == -1).all()
        assert torch.equal(chosen, slots_of(where, page_table[rest[0].long()]))

    every = list(range(len(ROWS)))
    for row in every[::2]:
        check("index_topk_decode", [row], table)
    check("index_topk_decode", every[::-1], table, padding=multiprocessors(pool.device))  # too many rows to split
    check("index_topk_decode", every[1::3], wide)
    check("index_topk_prefill", every, wide)
    for budget in (20, 2) if backend.library else (20, 2, 1):  # rows, of which one has no list beside it
        check("index_topk_prefill", every[::2], table, padding=21, budget=budget * 4 * PAGE * COLUMNS)
    if backend.provider == "triton":
        assert written == set(WRITERS)


@pytest.mark.gpu  # the interpreter sums in numpy, which rounds by shapes
@pytest.mark.parametrize("HI", [8, 32, 64, 128])
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("group", [0, 4])
def test_scores_get_the_same_bits_in_any_call(HI, dtype, group):
    """Else two nearly equal keys would change places with the number of rows, which decides how many a tile has."""
    pages, rows, device = 60, 80, "cuda"
    pool, table = random_index_pool(pages, 128, dtype, device), random_page_table(1, pages, pages, device)
    q, weights = torch.randn(rows, HI, 128, device=device).to(dtype), torch.randn(rows, HI, device=device)
    visible = int32([PAGE * pages - 3] * rows, device)

    def scores_of(count, rows_per_request):
        scores = poisoned(count, PAGE * pages, dtype=torch.float32, device=device)
        maxima = poisoned(count, PAGE * pages // (group or 1), dtype=torch.float32, device=device)
        index_scores.write_scores(
            q[:count], weights[:count], pool, table, int32([0] * count, device), visible[:count], scores, maxima, 1,
            group, rows_per_request,
        )  # fmt: skip
        assert scores[0, : visible[0]].isfinite().all()
        return scores[0, : visible[0]]

    alone = scores_of(1, 1)
    # the last two in the loop of a prefill, and where Hopper has a kernel for it
    for count, rows_per_request in ((2, 2), (rows, 4), (rows, 40), (rows, rows)):
        assert torch.equal(scores_of(count, rows_per_request), alone)


@pytest.mark.parametrize("K", [1, 16, 33, 100, 500, 2048])
@pytest.mark.parametrize("with_positions", [False, True])
def test_any_order_becomes_one(device, K, with_positions):
    """Outputs whose rows lie apart; rows of more keys than K, some with fewer numbers, and of fewer keys."""
    if K > 100 and device == "cpu":
        pytest.skip("Triton's interpreter sorts 2048 lanes for 8 seconds")
    columns = K // PAGE + 2
    n = columns * PAGE
    table = random_page_table(2, columns, 2 * columns + 1, device)
    visible, requests = int32([n, K + 1, n, n + 5, K, K // 2, -1], device), int32([0, 1, 0, 1, 0, 1, 0], device)
    want = torch.full((7, K), -1, dtype=torch.int32, device=device)
    mixed = want.clone()
    for t, (seen, numbers) in enumerate([(n, K), (K + 1, K), (n, K // 3), (n, 0), (K, K), (K // 2, K // 2), (0, 0)]):
        some = torch.randperm(seen, device=device)[:numbers].int()
        want[t, :numbers] = some.sort().values
        mixed[t, :numbers] = want[t, :numbers] if seen <= K else some
    want[4, :1] = mixed[4, :1] = -1  # a key that does not exist leaves a gap
    out, where = (poisoned(7, K + 5, dtype=torch.int32, device=device) for _ in range(2))

    def write(page_table, req_of_row, visible, topk_out, pages, positions_out):
        assert topk_out is None
        positions_out.copy_(mixed)

    slots, positions = out[:, 2 : K + 2], where[:, 1 : K + 1]
    in_order.write_selection(
        write, table, requests, visible, slots, 2 * columns + 1, positions if with_positions else None, True
    )
    assert torch.equal(slots, slots_of(want, table[requests.long()]))
    assert (out[:, :2] == 123456789).all() and (out[:, K + 2 :] == 123456789).all()
    assert torch.equal(positions, want) if with_positions else (where == 123456789).all()


@pytest.mark.parametrize("kernel", WRITERS)
def test_positions_alone(device, small, kernel):
    """Each selection writes the same positions with slots and without."""
    values = hard_rows(COLUMNS * PAGE, device)[[1, 2, 4, 8]]
    visible = int32([511, 20, 512, 258], device)
    table = random_page_table(4, COLUMNS, 4 * COLUMNS, device)
    requests = torch.arange(4, dtype=torch.int32, device=device)
    wheres = [poisoned(4, K, dtype=torch.int32, device=device) for _ in range(2)]
    slots = poisoned(4, K, dtype=torch.int32, device=device)
    for out, where in zip((slots, None), wheres):
        group = select.group_size(COLUMNS * PAGE, K, False)
        scores, maxima = scores_and_maxima(values, visible, group)
        if kernel == "write_slots":
            write = partial(select.write_slots, scores, maxima, group=group)
        elif kernel == "write_slots_split":
            counters = select_split.empty_counters(4, 4, device).zero_()
            write = partial(select_split.write_slots_split, scores, maxima, counters, group=group, splits=4)
        else:
            lists = poisoned(3, 2 * PAGE, dtype=torch.int64, device=device)
            write = partial(select_listed.write_slots_listed, scores, lists)
        write(table, requests, visible, out, table.numel(), early=False, positions_out=where)
    assert torch.equal(*wheres)
    assert torch.equal(slots, slots_of(wheres[0], table))


def test_without_deterministic_nothing_is_put_in_order(device, small, monkeypatch):
    """Nor where the page table holds at most K keys."""
    monkeypatch.setattr(in_order, "_put_in_order", None)
    pool, table = scored_pool(torch.randn(1, COLUMNS * PAGE, device=device), 1, COLUMNS)
    for n, deterministic in ((K, False), (COLUMNS * PAGE, True)):
        out = poisoned(1, n, dtype=torch.int32, device=device)
        rest = (int32([0], device), int32([COLUMNS * PAGE], device), out, deterministic)
        torch.ops.compiled_dsa.index_topk_decode(*one_hot(1, device), pool, table, *rest, provider="triton")
        assert (out >= 0).all()

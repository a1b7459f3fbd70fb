"""index_topk: logical positions beside slots, and tokens that are always chosen."""

import pytest
import torch

from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import check_topk, index_scores_oracle, poisoned, random_index_pool
from tests.ops.index_cases import BUDGET, batch, lanes_of, narrow_rows_of, one_hot, prefill_batch, queries, scored_pool


def run_options(backend, name, q, weights, pool, rows, K, deterministic=True, init=0, local=0, budget=BUDGET):
    """(topk_out, positions_out) [T, K], the second one strided."""
    T = q.shape[0]
    out = poisoned(T, K, dtype=torch.int32, device=backend.device)
    where = poisoned(T, K + 3, dtype=torch.int32, device=backend.device)
    scratch = [budget] if name == "index_topk_prefill" else []
    deterministic = deterministic and backend.provider != "torch"
    backend(name, q, weights, pool, *rows, out, deterministic, *scratch, where[:, 1 : K + 1], init, local)
    assert (where[:, 0] == 123456789).all() and (where[:, K + 1 :] == 123456789).all()
    return out, where[:, 1 : K + 1]


@pytest.mark.parametrize("name", ["index_topk_decode", "index_topk_prefill"])
@pytest.mark.parametrize(("dtype", "K"), [(FP8, 33), (torch.float16, 64)])
def test_positions_of_the_lanes(backend, name, dtype, K):
    """Rows that see none, few and many keys, and one with pages outside the pool, cut by a small budget."""
    rows, pages = batch([200, 33, 10, 0, 250, 40], 4, backend.device)
    rows[0][4, 1], rows[0][5, 0] = -1, pages
    pool = random_index_pool(pages, 32, dtype, backend.device)
    q, weights = queries(6, 16, 32, dtype, backend.device)
    budget = 3 * 4 * PAGE * rows[0].shape[1]
    chosen, where = run_options(backend, name, q, weights, pool, rows, K, budget=budget)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))
    for t in range(6):
        assert torch.equal(where[t], lanes_of(chosen[t], rows[0][t]))


DECODE_AND_PREFILL = ["index_topk_decode", "index_topk_prefill"]
COUNTS = [(3, 5), (0, 40), (40, 0), (1, 0), (20, 20)]
# Triton's interpreter takes seconds each: there all counts once, and every kind of selection with both at once
FEWER = [
    *((3, 5, name, narrow) for name in DECODE_AND_PREFILL for narrow in (False, True)),
    (0, 40, "index_topk_decode", True),
    (40, 0, "index_topk_prefill", True),
    (1, 0, "index_topk_decode", False),
    (20, 20, "index_topk_prefill", False),
    (20, 20, "index_topk_decode", True),
]
ALL = [(*counts, name, narrow) for counts in COUNTS for name in DECODE_AND_PREFILL for narrow in (False, True)]


@pytest.mark.parametrize(("init", "local", "name", "narrow"), ALL if torch.cuda.is_available() else FEWER)
def test_tokens_that_are_always_chosen(backend, name, narrow, init, local, monkeypatch):
    """NaN, the lowest and the highest scores among the others: the K - init - local best of these are added."""
    if narrow:
        if backend.provider != "triton":
            pytest.skip("of Triton's selection")
        narrow_rows_of(128, monkeypatch)
    K, lengths = 40, [512, 511, 330, 41, 40, 12]
    values = torch.randn(6, 512, device=backend.device).relu()
    values[0, :100] = torch.nan
    values[1, 500:] = torch.nan
    values[2, 50:300:3] = torch.inf
    pool, table = scored_pool(values, 6, 8)
    table[1, 7] = -1  # its local tokens do not exist
    requests = torch.arange(6, dtype=torch.int32, device=backend.device)
    visible = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    rows = (table, requests, visible)
    chosen, where = run_options(backend, name, *one_hot(6, backend.device), pool, rows, K, init=init, local=local)
    for t, n in enumerate(lengths):
        position = torch.arange(n, device=backend.device)
        row = values[t, :n].clone()
        exists = table[t, position // PAGE] >= 0
        forced = ((position < init) | (position >= n - local)) & exists
        row[~exists] = torch.nan
        got = where[t][where[t] >= 0].long()
        assert torch.equal(where[t], lanes_of(chosen[t], table[t]))
        if n <= K:
            assert got.tolist() == list(range(n))
            continue
        assert torch.isin(forced.nonzero().flatten(), got).all()
        others = got[~forced[got]]
        best = row[~forced & ~row.isnan()].sort(descending=True).values[: K - int(forced.sum())]
        assert got.unique().numel() == got.numel() == int(forced.sum()) + best.numel()
        assert torch.equal(row[others].sort(descending=True).values, best)
        if backend.provider != "torch":  # deterministic: among equal scores the lowest positions, in order
            order = row.masked_fill(forced, torch.nan).nan_to_num(nan=-1.0).sort(descending=True, stable=True).indices
            assert torch.equal(others, order[: best.numel()].sort().values)
            assert torch.equal(got, got.sort().values)


def test_more_rows_a_request_with_tokens_always_chosen(backend):
    """Rows of one tile end at different positions: each has its own last tokens."""
    rows, pages = prefill_batch([9, 8], [100, 40], backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(17, 16, 32, FP8, backend.device)
    _, where = run_options(backend, "index_topk_prefill", q, weights, pool, rows, 24, init=2, local=4)
    for t, n in enumerate(rows[2].tolist()):
        assert {0, 1, n - 4, n - 3, n - 2, n - 1} <= set(where[t].tolist())
        assert where[t].unique().numel() == 24 and where[t].max() < n


@pytest.mark.parametrize(("init", "local"), [(10, 7), (-1, 3), (0, -1), (17, 0)])
def test_too_many_tokens_always_chosen_are_refused(init, local):
    rows, pages = batch([100], 2, "cpu")
    q, weights = queries(1, 8, 32, FP8, "cpu")
    args = (q, weights, random_index_pool(pages, 32, FP8), *rows, torch.empty(1, 16, dtype=torch.int32), False)
    with pytest.raises(ValueError, match=f"init_tokens={init}, local_tokens={local}; .* and 16 are selected"):
        torch.ops.compiled_dsa.index_topk_decode(*args, None, init, local)
    with pytest.raises(ValueError, match=r"positions_out has shape \(1, 15\); it must be \[1, 16\]"):
        torch.ops.compiled_dsa.index_topk_decode(*args, torch.empty(1, 15, dtype=torch.int32))

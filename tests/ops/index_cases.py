"""Rows, pools and calls on which index_topk is tested, and scores on which its selections are."""

import torch

from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.testing import poisoned, random_page_table

BUDGET = 1 << 20


def batch(lengths, columns, device):
    """Decode rows: one a request, each seeing all of its keys."""
    visible = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages = len(lengths) * columns + 3
    return (
        random_page_table(len(lengths), columns, pages, device),
        torch.arange(len(lengths), dtype=torch.int32, device=device),
        visible,
    ), pages


def prefill_batch(extend, prefix, device):
    """Rows of a batch that extends prefixes: the causal windows."""
    visible = [p + i + 1 for e, p in zip(extend, prefix) for i in range(e)]
    requests = [b for b, e in enumerate(extend) for _ in range(e)]
    columns = -(-max(e + p for e, p in zip(extend, prefix)) // PAGE)
    pages = len(extend) * columns + 3
    table = random_page_table(len(extend), columns, pages, device)
    return (table, *(torch.tensor(x, dtype=torch.int32, device=device) for x in (requests, visible))), pages


def queries(T, HI, D, dtype, device):
    q = torch.randn(T, HI, D, device=device).to(dtype)
    return q, torch.randn(T, HI, device=device)  # weights of both signs


def run(backend, q, weights, pool, rows, K, deterministic=False, budget=None, name="index_topk_prefill"):
    out = poisoned(q.shape[0], K, dtype=torch.int32, device=backend.device)
    if name == "index_topk_decode":
        backend(name, q, weights, pool, *rows, out, deterministic)
    else:
        backend(name, q, weights, pool, *rows, out, deterministic, budget or BUDGET)
    return out


def scored_pool(values: torch.Tensor, requests: int, columns: int):
    """An fp32 pool of D = 32 in which the score of request b's key j is exactly ``values[b, j]`` (with relu), for the
    queries of ``one_hot``; and its page table."""
    device = values.device
    table = random_page_table(requests, columns, requests * columns, device)
    pool = torch.zeros(requests * columns, PAGE, 32, device=device)
    pool[table.long().flatten(), :, 0] = values.view(requests * columns, PAGE)
    return pool, table


def one_hot(T, device, HI=1):
    """Queries that read the first element of a key, in every head; weights 1 / HI."""
    q = torch.zeros(T, HI, 32, device=device)
    q[:, :, 0] = 1.0
    return q, torch.full((T, HI), 1 / HI, device=device)


def positions(chosen, table):
    """Chosen slots of one request -> sorted logical positions."""
    slots = (table.long()[:, None] * PAGE + torch.arange(PAGE, device=table.device)).flatten()
    return torch.isin(slots, chosen[chosen >= 0].long()).nonzero().flatten()


def lanes_of(chosen, table):
    """Physical slots [K] of one request -> logical positions of the same lanes, -1 where there is no slot."""
    slots = (table.long()[:, None] * PAGE + torch.arange(PAGE, device=table.device)).flatten()
    return torch.where(chosen >= 0, (chosen.long()[:, None] == slots).int().argmax(1), -1).int()


def best_positions(row: torch.Tensor, K: int) -> torch.Tensor:
    """Positions of the K best scores, sorted: of equal ones the lowest, never NaN. All of a row of at most K."""
    if row.numel() <= K:
        return torch.arange(row.numel(), device=row.device)
    number = (~row.isnan()).nonzero().flatten()
    return number[(row[number] + 0.0).sort(descending=True, stable=True).indices[:K]].sort().values


def check_positions(chosen, table, values, visible, K, ordered=False):
    for t, n in enumerate(visible.tolist()):
        want = best_positions(values[t, : max(n, 0)], K)
        assert (chosen[t, : want.numel()] >= 0).all() and (chosen[t, want.numel() :] == -1).all(), f"row {t}"
        assert torch.equal(positions(chosen[t], table[t]), want), f"row {t}"
        if ordered:
            assert torch.equal(lanes_of(chosen[t, : want.numel()], table[t]), want.int()), f"row {t}"


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


def far_rows(columns, device):
    """[7, columns], random but for: few +inf; many -inf; both; the largest numbers of both signs; two narrow lumps far
    apart, of which the upper one has some more or less than 33; powers of 2; subnormal numbers."""
    values = torch.randn(7, columns, device=device)
    values[0, ::99] = torch.inf
    values[1, ::2] = -torch.inf
    values[2, ::99], values[2, 1::3] = torch.inf, -torch.inf
    values[3, 5], values[3, 7] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    values[4] = values[4] * 1e-6 - 1.0
    values[4, ::15] = values[4, ::15] * 1e14 + 1e20
    values[5] = 2.0 ** (values[5] * 40).round()
    values[6] *= 1e-40
    return values


def zeros_of_both_signs(columns, device):
    """[4, columns]: 0.0 and -0.0 in turn; -0.0 only; both and -1.0; both in parts of a row of -1.0."""
    values = torch.zeros(4, columns, device=device)
    values[0, ::2], values[1] = -0.0, -0.0
    values[2, ::3], values[2, 1::3] = -1.0, -0.0
    values[3] = -1.0
    values[3, 100:110], values[3, 300:320] = -0.0, 0.0
    return values


def scores_and_maxima(values, visible, group: int):
    """Scores of ``values`` and the maxima of their groups as the scores kernel leaves them; past the windows 1e30."""
    from compiled_dsa.custom_ops.kernels import select

    rows, columns = values.shape
    scores = values.masked_fill(torch.arange(columns, device=values.device) >= visible[:, None], 1e30)
    maxima = torch.full((rows, select.maxima_of(columns, group)), 1e30, device=values.device)
    if group:
        numbers = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = numbers.view(rows, -1, group).amax(-1)
        maxima[:, : columns // group] = best.masked_fill(scores.isnan().view(rows, -1, group).all(-1), torch.nan)
    return scores, maxima


def narrow_rows_of(columns, monkeypatch):
    """Longer ones are narrowed down, in tiles that suit tests."""
    from compiled_dsa.custom_ops.kernels import select

    for name in ("DIRECT_SCORES", "DIRECT_SCORES_PREFILL", "NARROWED_MAXIMA"):
        monkeypatch.setattr(select, name, columns)
    monkeypatch.setattr(select, "SMALLEST_TILE", 64)

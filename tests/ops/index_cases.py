"""Rows, pools and calls on which index_topk is tested."""

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


def narrow_rows_of(columns, monkeypatch):
    """Longer ones are narrowed down, in tiles that suit tests."""
    from compiled_dsa.custom_ops.kernels import select

    for name in ("DIRECT_SCORES", "DIRECT_SCORES_PREFILL", "NARROWED_MAXIMA"):
        monkeypatch.setattr(select, name, columns)
    monkeypatch.setattr(select, "SMALLEST_TILE", 64)

"""index_topk: which keys are chosen. Decode and prefill are one reference and one kernel, and both are driven here."""

import pytest
import torch

from compiled_dsa.custom_ops import INDEX_TOPK_PREFILL
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import (
    check_topk,
    index_scores_oracle,
    live_bytes,
    poisoned,
    random_index_pool,
    random_page_table,
)
from tests.ops.index_cases import (
    BUDGET,
    batch,
    lanes_of,
    narrow_rows_of,
    one_hot,
    positions,
    prefill_batch,
    queries,
    run,
    scored_pool,
)


@pytest.mark.parametrize("name", ["index_topk_decode", "index_topk_prefill"])
def test_page_tables_without_columns(backend, name):
    """No key to see, whatever the windows say."""
    integers = {"dtype": torch.int32, "device": backend.device}
    rows = (torch.empty(2, 0, **integers), torch.tensor([0, 1], **integers), torch.tensor([5, 0], **integers))
    q, weights = queries(2, 16, 64, torch.float32, backend.device)
    pool = random_index_pool(2, 64, torch.float32, backend.device)
    assert (run(backend, q, weights, pool, rows, 8, name=name) == -1).all()


@pytest.mark.parametrize("name", ["index_topk_decode", "index_topk_prefill"])
@pytest.mark.parametrize(
    ("HI", "D", "dtype", "K"),
    [
        (8, 32, torch.float32, 64),
        (16, 64, torch.float16, 33),
        (64, 128, FP8, 64),
        (32, 128, FP8, 1),
        (24, 96, FP8, 100),
    ],
)
def test_decode_rows(backend, name, HI, D, dtype, K):
    rows, pages = batch([200, 65, 64, 10, 0, 1, 256], 4, backend.device)
    pool = random_index_pool(pages, D, dtype, backend.device)
    q, weights = queries(7, HI, D, dtype, backend.device)
    chosen = run(backend, q, weights, pool, rows, K, name=name)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


@pytest.mark.parametrize(
    ("HI", "D", "dtype"), [(8, 32, torch.float16), (64, 128, FP8), (16, 128, FP8), (64, 64, torch.bfloat16)]
)
def test_prefill_rows(backend, HI, D, dtype):
    """Requests end inside the tiles of rows that share loads of keys, and one row sees exactly K keys."""
    rows, pages = prefill_batch([3, 2, 9], [150, 63, 100], backend.device)
    pool = random_index_pool(pages, D, dtype, backend.device)
    q, weights = queries(14, HI, D, dtype, backend.device)
    chosen = run(backend, q, weights, pool, rows, 65)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_fault_a1_rows_see_their_own_request(backend):
    """Two requests of 40 and 37 tokens without prefix: row 40 sees key 0 of its own request and nothing else."""
    rows, pages = prefill_batch([40, 37], [0, 0], backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(77, 8, 32, FP8, backend.device)
    chosen = run(backend, q, weights, pool, rows, 32)
    assert chosen[40].tolist() == [int(rows[0][1, 0]) * PAGE] + [-1] * 31
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


@pytest.mark.parametrize("T", [32, 33, 128])
def test_fault_b1_all_lengths_zero(backend, T):
    rows, _ = batch([0] * T, 1, backend.device)
    rows[0].fill_(2**31 - 1)  # nothing of the page table is used
    pool = random_index_pool(2, 32, FP8, backend.device)
    q, weights = queries(T, 8, 32, FP8, backend.device)
    assert (run(backend, q, weights, pool, rows, 16, name="index_topk_decode") == -1).all()


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fault_b1_tokens_per_request(backend, tokens):
    """One request of length 64; its length and request tensors end where their memory ends."""
    rows, pages = prefill_batch([tokens], [64 - tokens], backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(tokens, 8, 32, FP8, backend.device)
    chosen = run(backend, q, weights, pool, rows, 16, name="index_topk_decode")
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_fault_b2_more_rows_than_keys(backend):
    """Padding rows before a real one (visible 0), beside a row of a long request."""
    table = random_page_table(2, 8, 16, backend.device)
    visible = torch.tensor([-4, 0, 0, 0, 0, 1, 500], dtype=torch.int32, device=backend.device)
    requests = torch.tensor([0] * 6 + [1], dtype=torch.int32, device=backend.device)
    pool = random_index_pool(16, 32, FP8, backend.device)
    q, weights = queries(7, 8, 32, FP8, backend.device)
    q.view(torch.uint8)[:5] = 0x7F  # NaN
    chosen = run(backend, q, weights, pool, (table, requests, visible), 16)
    assert (chosen[:5] == -1).all()
    check_topk(chosen, visible, *index_scores_oracle(q, weights, pool, table, requests, visible))


@pytest.mark.parametrize("HI", [8, 16, 32, 64])
def test_fault_d3_index_heads(backend, HI):
    rows, pages = prefill_batch([5, 4], [70, 200], backend.device)
    pool = random_index_pool(pages, 64, FP8, backend.device)
    q, weights = queries(9, HI, 64, FP8, backend.device)
    chosen = run(backend, q, weights, pool, rows, 32)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_fault_d3_padded_heads_change_nothing(backend):
    """One head in a tile of 16: an infinite key times the zeros of a padded head would be NaN."""
    values = torch.ones(1, 128, device=backend.device)
    values[0, 77] = torch.inf
    pool, table = scored_pool(values, 1, 2)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    chosen = run(backend, *one_hot(1, backend.device), pool, (table, one * 0, one * 128), 1)
    assert positions(chosen[0], table[0]).tolist() == [77]


@pytest.mark.parametrize(("K", "n"), [(256, 1024), pytest.param(2048, 8192, marks=pytest.mark.gpu)])
def test_fault_i1_close_scores(backend, K, n):
    """More scores that differ only in their last bits than a coarse bin's candidate buffer would hold."""
    if n == 8192 and backend.device == "cpu":
        pytest.skip("this size runs on a GPU")
    values = torch.full((1, n), 0.5, device=backend.device)
    many = n * 5 // 8
    values[0, torch.randperm(n, device=backend.device)[:many]] = (
        1.0 + torch.arange(many, device=backend.device) * 1.2e-7
    )
    assert values.unique().numel() == many + 1
    pool, table = scored_pool(values, 1, n // PAGE)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    chosen = run(backend, *one_hot(1, backend.device), pool, (table, one * 0, one * n), K)
    where = positions(chosen[0], table[0])
    assert where.numel() == K
    assert torch.equal(values[0, where].sort(descending=True).values, values[0].topk(K).values)


@pytest.mark.parametrize("name", ["index_topk_decode", "index_topk_prefill"])
def test_fault_i2_not_numbers_and_infinities(backend, name):
    """Rows whose scores are all NaN, NaN once, all -inf, all +inf: NaN is never chosen, nothing outside the window."""
    values = torch.rand(4, 192, device=backend.device)
    values[0], values[1, 60], values[2], values[3] = torch.nan, torch.nan, torch.inf, torch.inf
    values[:, 168:] = torch.nan  # beyond the windows
    pool, table = scored_pool(values, 4, 3)
    q, weights = one_hot(4, backend.device)
    weights[2] = -1.0
    requests = torch.arange(4, dtype=torch.int32, device=backend.device)
    chosen = run(backend, q, weights, pool, (table, requests, torch.full_like(requests, 168)), 100, name=name)
    assert (chosen[0] == -1).all()
    for t in (1, 2, 3):
        where = positions(chosen[t], table[t])
        assert where.numel() == 100 and where.max() < 168
    assert 60 not in positions(chosen[1], table[1])


def test_fewer_numbers_than_k(backend):
    """Keys on a page outside the pool do not exist, whether or not scores are computed."""
    rows, pages = batch([250, 250, 90], 4, backend.device)
    rows[0][0, 1], rows[0][1, 0], rows[0][2, 0] = -1, 2**31 - 1, pages
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(3, 8, 32, FP8, backend.device)
    chosen = run(backend, q, weights, pool, rows, 200)
    assert [(row >= 0).sum().item() for row in chosen] == [186, 186, 26]
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_visible_past_the_page_table(backend):
    rows, pages = batch([128, 2**31 - 1], 2, backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(2, 8, 32, FP8, backend.device)
    chosen = run(backend, q, weights, pool, rows, 16)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_fault_i4_scratch_holds_anything(backend, monkeypatch):
    """Fresh scratch full of +1e30 beyond the windows: never chosen."""
    empty, filled = torch.empty, []

    def full_of_huge_scores(*size, **kwargs):
        out = empty(*size, **kwargs)
        if out.dtype == torch.float32:
            filled.append(out.fill_(1e30))
        return out

    rows, pages = batch([100, 70, 129], 4, backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(3, 8, 32, FP8, backend.device)
    monkeypatch.setattr(torch, "empty", full_of_huge_scores)
    chosen = run(backend, q, weights, pool, rows, 64)
    monkeypatch.undo()
    assert filled or backend.provider == "reference"  # which keeps no scratch
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_deterministic_ties_take_the_lowest_positions(backend):
    """ReLU makes most scores zero: the best 3 are taken, then zeros from the left."""
    values = -torch.rand(1, 256, device=backend.device)
    values[0, [30, 199, 255]] = torch.tensor([1.0, 3.0, 2.0], device=backend.device)
    pool, table = scored_pool(values, 1, 4)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    chosen = run(backend, *one_hot(1, backend.device), pool, (table, one * 0, one * 256), 40, deterministic=True)
    assert lanes_of(chosen[0], table[0]).tolist() == [*range(38), 199, 255]


def test_deterministic_ties_of_negative_weights(backend):
    """Scores of -0.0 (or 0.0, as the sum is made) on the left, -1 on the right."""
    values = -torch.ones(1, 128, device=backend.device)
    values[0, 64:] = 1.0
    pool, table = scored_pool(values, 1, 2)
    q, weights = one_hot(1, backend.device, HI=16)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    chosen = run(backend, q, -weights, pool, (table, one * 0, one * 128), 32, deterministic=True)
    assert lanes_of(chosen[0], table[0]).tolist() == list(range(32))


def test_fault_f1_the_result_does_not_depend_on_the_budget(backend):
    """5 requests of lengths that are no multiples of 64; the cuts fall inside requests."""
    rows, pages = prefill_batch([2, 1, 3, 1, 2], [100, 150, 33, 129, 91], backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(9, 16, 32, FP8, backend.device)
    row_bytes = 4 * PAGE * rows[0].shape[1]
    large = run(backend, q, weights, pool, rows, 32, deterministic=True)
    for budget in (row_bytes, 4 * row_bytes + 5):
        small = run(backend, q, weights, pool, rows, 32, deterministic=True, budget=budget)
        assert torch.equal(small, large)


@pytest.mark.parametrize("K", [16, 33, 100])
def test_long_rows_are_narrowed_down(backend, K, monkeypatch):
    """Scores, maxima and selection together: rows of 512 keys, half of the scores equal, one with many NaN."""
    if backend.provider == "triton":
        narrow_rows_of(128, monkeypatch)
    values = torch.randn(4, 512, device=backend.device).relu()
    values[1, 100:500] = torch.nan
    pool, table = scored_pool(values, 4, 8)
    requests = torch.arange(4, dtype=torch.int32, device=backend.device)
    visible = torch.tensor([512, 510, 130, 12], dtype=torch.int32, device=backend.device)
    chosen = run(backend, *one_hot(4, backend.device), pool, (table, requests, visible), K, deterministic=True)
    for t, n in enumerate(visible.tolist()):
        row = values[t, :n]
        order = row.nan_to_num(-1.0).sort(descending=True, stable=True).indices[: min(K, n)]
        want = order[~row[order].isnan()] if n > K else torch.arange(n, device=row.device)
        assert torch.equal(lanes_of(chosen[t, : want.numel()], table[t]), want.sort().values.int())
        assert (chosen[t, want.numel() :] == -1).all()


@pytest.mark.parametrize("extend", [[2, 1], [9, 8]])
def test_prefill_of_long_rows(backend, extend, monkeypatch):
    """Few and many rows a request take different loops over the keys; both leave maxima."""
    if backend.provider == "triton":
        narrow_rows_of(128, monkeypatch)
    rows, pages = prefill_batch(extend, [300, 201], backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(sum(extend), 16, 32, FP8, backend.device)
    chosen = run(backend, q, weights, pool, rows, 24)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def test_budget_of_scores_alone(backend, monkeypatch):
    """A budget that holds no maxima beside the scores of a row: the row is not narrowed down."""
    if backend.provider == "triton":
        narrow_rows_of(128, monkeypatch)
    rows, pages = prefill_batch([2, 1], [300, 201], backend.device)
    pool = random_index_pool(pages, 32, FP8, backend.device)
    q, weights = queries(3, 16, 32, FP8, backend.device)
    row_bytes = 4 * PAGE * rows[0].shape[1]
    large = run(backend, q, weights, pool, rows, 24, deterministic=True)
    small = run(backend, q, weights, pool, rows, 24, deterministic=True, budget=row_bytes)
    assert torch.equal(small, large)


@pytest.mark.gpu
def test_long_rows_in_a_graph():
    """Replays with other lengths equal direct calls, bit for bit and in the same order; scratch is reused."""
    rows, pages = batch([1, 1, 1], 1024, "cuda")
    pool = random_index_pool(pages, 128, FP8, "cuda")
    q, weights = queries(3, 64, 128, FP8, "cuda")
    out = poisoned(3, 2048, dtype=torch.int32, device="cuda")

    def step():
        torch.ops.compiled_dsa.index_topk_decode(q, weights, pool, *rows, out, True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([65536, 5000, 2048], [2049, 40000, 0], [64001, 16385, 65535]):
        rows[2].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(123456789)
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)
        check_topk(out, rows[2], *index_scores_oracle(q, weights, pool, *rows))


@pytest.mark.gpu
def test_fault_f1_peak_scratch_on_a_gpu():
    """64 rows x 8192 keys of one request (2 MiB of scores) within 1 MiB."""
    rows, pages = prefill_batch([64], [8192 - 64], "cuda")
    pool = random_index_pool(pages, 128, FP8, "cuda")
    q, weights = queries(64, 64, 128, FP8, "cuda")
    small, large = (poisoned(64, 2048, dtype=torch.int32, device="cuda") for _ in range(2))
    torch.ops.compiled_dsa.index_topk_prefill(q, weights, pool, *rows, large, True, 1 << 30)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.ops.compiled_dsa.index_topk_prefill(q, weights, pool, *rows, small, True, BUDGET)
    assert torch.cuda.max_memory_allocated() - before <= BUDGET
    assert torch.equal(small, large)


def test_budget_below_one_row_is_refused():
    rows, pages = batch([100], 2, "cpu")
    pool = random_index_pool(pages, 32, FP8)
    q, weights = queries(1, 8, 32, FP8, "cpu")
    out = torch.empty(1, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match="scratch_bytes=511; one row's scores over 2 pages need 512 bytes"):
        torch.ops.compiled_dsa.index_topk_prefill(q, weights, pool, *rows, out, False, 511)


def test_fault_f2_memory_of_the_reference():
    """64 heads, 256 rows, 8192 keys: below twice the scores plus the inputs, never heads x scores."""
    rows, pages = prefill_batch([256], [8192 - 256], "cpu")
    pool = random_index_pool(pages, 32, FP8)
    q, weights = queries(256, 64, 32, FP8, "cpu")
    out = torch.empty(256, 2048, dtype=torch.int32)
    inputs = [q, weights, pool, *rows, out]
    with live_bytes() as live:
        INDEX_TOPK_PREFILL.reference(*inputs, False)
    assert live.peak < 2 * (256 * 8192 * 4) + sum(x.nbytes for x in inputs)


def test_strided_query_and_output(backend):
    rows, pages = batch([100, 200], 4, backend.device)
    pool = random_index_pool(pages, 32, torch.float32, backend.device)
    q, weights = torch.randn(2, 20, 50, device=backend.device)[:, 4:12, 10:42], torch.randn(2, 9, device=backend.device)
    out = poisoned(2, 80, dtype=torch.int32, device=backend.device)
    backend("index_topk_decode", q, weights[:, :8], pool, *rows, out[:, 8:40], False)
    check_topk(out[:, 8:40], rows[2], *index_scores_oracle(q, weights[:, :8], pool, *rows))
    assert (out[:, :8] == 123456789).all() and (out[:, 40:] == 123456789).all()

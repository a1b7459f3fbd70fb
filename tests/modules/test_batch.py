"""Batch against plain loops over requests and tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_dsa import Batch
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.custom_ops.layout import PAGE

TENSORS = ("positions", "slots", "req_of_row", "visible", "q_start", "kv_len")


def pages(B: int, width: int) -> torch.Tensor:
    """int32 [B, W] without order or repetition."""
    return (torch.arange(B * width).flip(0) * 3 + 1).view(B, width).int()


def rows_of(batch: Batch) -> list[tuple]:
    """(position, slot, request, visible) of each row that is not padding, None for those that are."""
    rows = zip(*(getattr(batch, name).tolist() for name in ("positions", "slots", "req_of_row", "visible")))
    return [None if slot == -1 else row for row in rows for slot in [row[1]]]


def row(page_table: torch.Tensor, request: int, position: int) -> tuple:
    page = int(page_table[request, position // PAGE])
    return (position, page * PAGE + position % PAGE, request, position + 1)


def from_lengths(q_len, kv_len, page_table, num_rows, **kwargs) -> Batch:
    return Batch.from_lengths(torch.tensor(q_len).long(), torch.tensor(kv_len).long(), page_table, num_rows, **kwargs)


def check_dtypes(batch: Batch, T: int, B: int) -> None:
    for name in ("positions", "req_of_row", "visible"):
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int32 and tensor.shape == (T,), name
    assert batch.slots.dtype == torch.int64 and batch.slots.shape == (T,)
    assert batch.kv_len.dtype == batch.q_start.dtype == batch.page_table.dtype == torch.int32
    assert batch.q_start.shape == (B + 1,) and batch.kv_len.shape == (B,)
    padding = batch.slots == -1
    assert not batch.visible[padding].any() and (batch.visible >= 0).all() and (batch.positions >= 0).all()
    assert ((batch.req_of_row >= 0) & (batch.req_of_row < B)).all()


def test_fault_a1_extend_3_and_2_after_7_and_2():
    page_table = pages(2, 1)
    batch = from_lengths([3, 2], [10, 4], page_table, 5)
    assert batch.visible.tolist() == [8, 9, 10, 3, 4]
    assert batch.positions.tolist() == [7, 8, 9, 2, 3]
    assert batch.req_of_row.tolist() == [0, 0, 0, 1, 1]
    assert batch.q_start.tolist() == [0, 3, 5]
    starts = torch.cat([torch.zeros(1), batch.kv_len.cumsum(0)])[batch.req_of_row].int()  # keys laid end to end
    assert starts.tolist() == [0, 0, 0, 10, 10]
    assert (starts + batch.visible).tolist() == [8, 9, 10, 13, 14]
    assert rows_of(batch) == [row(page_table, r, p) for r, p in ((0, 7), (0, 8), (0, 9), (1, 2), (1, 3))]


def test_fault_a1_40_and_37_without_prefix():
    batch = from_lengths([40, 37], [40, 37], pages(2, 1), 77)
    assert (batch.req_of_row[40], batch.positions[40], batch.visible[40]) == (1, 0, 1)
    assert batch.slots[40] == int(batch.page_table[1, 0]) * PAGE


def test_fault_a1_a_prefill_of_one_token_is_its_decode():
    prefill = from_lengths([1], [1], pages(1, 1), 1)
    decode = Batch.decode(torch.tensor([1]), pages(1, 1))
    assert rows_of(prefill) == rows_of(decode) == [row(pages(1, 1), 0, 0)]
    assert (prefill.kind, decode.kind) == (PREFILL, DECODE)


def test_fault_b2_more_rows_than_keys():
    """A padded verify step: one request of 1 key and 6 rows beside a real one of 5000 keys."""
    page_table = pages(2, 79)
    batch = from_lengths([6, 2], [1, 5000], page_table, 8)
    assert batch.visible.tolist() == [0, 0, 0, 0, 0, 1, 4999, 5000]
    assert batch.slots[:5].tolist() == [-1] * 5
    assert rows_of(batch)[5:] == [row(page_table, 0, 0), row(page_table, 1, 4998), row(page_table, 1, 4999)]
    check_dtypes(batch, 8, 2)


def test_fault_b5_rows_past_the_last_request_are_padding():
    page_table = pages(5, 1)
    batch = from_lengths([1] * 5, [3, 1, 9, 2, 7], page_table, 8, kind=DECODE)
    assert rows_of(batch) == [row(page_table, r, n - 1) for r, n in enumerate([3, 1, 9, 2, 7])] + [None] * 3
    check_dtypes(batch, 8, 5)


@pytest.mark.parametrize("num_rows", [0, 1, 32, 33, 128])
def test_fault_b1_all_lengths_zero(num_rows):
    batch = from_lengths([0, 0], [0, 0], pages(2, 1), num_rows)
    assert rows_of(batch) == [None] * num_rows
    check_dtypes(batch, num_rows, 2)


@pytest.mark.parametrize("num_rows", [0, 4])
def test_fault_b5_no_requests(num_rows):
    batch = from_lengths([], [], torch.zeros(0, 3, dtype=torch.int32), num_rows, accepted=torch.zeros(0).long())
    assert rows_of(batch) == [None] * num_rows
    check_dtypes(batch, num_rows, min(num_rows, 1))  # rows need a request to belong to


def test_negative_lengths_count_as_0():
    page_table = pages(3, 1)
    batch = from_lengths([2, -3, 1], [5, 9, 4], page_table, 4)
    assert rows_of(batch) == [row(page_table, 0, 3), row(page_table, 0, 4), row(page_table, 2, 3), None]
    assert (batch.q_start.tolist(), batch.kv_len.tolist()) == ([0, 2, 2, 3], [5, 9, 4])


@pytest.mark.parametrize(("tokens", "kind"), [(1, DECODE), (3, DECODE), (8, DECODE), (9, PREFILL)])
def test_equal_tokens_a_request(tokens, kind):
    """Decode and verify; a request without keys is padding, one with fewer than rows has padding first."""
    page_table = pages(3, 2)
    batch = Batch.decode(torch.tensor([70, 0, 2]).int(), page_table, tokens, skip_scores=True)
    rows = [row(page_table, 0, 70 - tokens + i) for i in range(tokens)] + [None] * tokens
    rows += [row(page_table, 2, p) if p >= 0 else None for p in range(2 - tokens, 2)]
    assert rows_of(batch) == rows
    assert (batch.kind, batch.skip_scores, batch.kv_len.tolist()) == (kind, True, [70, 0, 2])
    check_dtypes(batch, 3 * tokens, 3)


def test_draft_extend():
    """Of 4 verified tokens each 3, all, none and (for a padding request) some were accepted."""
    page_table = pages(4, 2)
    verify = torch.tensor([10, 66, 8, 0])
    batch = Batch.decode(verify, page_table, 4, accepted=torch.tensor([3, 4, 0, 2]))
    assert batch.kv_len.tolist() == [9, 66, 4, 0]
    assert batch.visible.tolist() == [7, 8, 9, 0, 63, 64, 65, 66] + [0] * 8
    assert rows_of(batch)[:3] == [row(page_table, 0, p) for p in (6, 7, 8)]
    assert batch.kind == DECODE
    check_dtypes(batch, 16, 4)


def test_draft_extend_example():
    batch = from_lengths([3, 2], [10, 4], pages(2, 1), 5, accepted=torch.tensor([1, 2]))
    assert (batch.visible.tolist(), batch.kv_len.tolist()) == ([8, 0, 0, 3, 4], [8, 4])


def test_rows_beyond_the_page_table_have_no_slot():
    batch = from_lengths([3], [66], pages(1, 1), 3)
    assert batch.slots[1:].tolist() == [-1, -1] and batch.slots[0] >= 0


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), max_size=6), st.integers(0, 7), st.booleans())
def test_ragged_lengths(requests, padding, decode):
    q_len, _past = [q for q, _ in requests], [p for _, p in requests]
    page_table = pages(len(requests), 4)
    want = [row(page_table, r, p + i) for r, (q, p) in enumerate(requests) for i in range(q)] + [None] * padding
    kv_len = [q + p for q, p in requests]
    batch = from_lengths(q_len, kv_len, page_table, sum(q_len) + padding, kind=DECODE if decode else PREFILL)
    assert rows_of(batch) == want
    check_dtypes(batch, len(want), len(requests) or min(padding, 1))
    if requests:
        assert batch.kv_len.tolist() == kv_len
        assert batch.q_start.tolist() == [sum(q_len[:i]) for i in range(len(q_len) + 1)]


requests_drawn = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(requests_drawn, requests_drawn, st.booleans())
def test_two_batches_in_one_are_the_two_side_by_side(first, second, with_accepted):
    tables = pages(len(first) + len(second), 4).split([len(first), len(second)])

    def make(requests, page_table) -> Batch:
        accepted = torch.tensor([(q * 3 + p) % (q + 1) for q, p in requests]) if with_accepted else None
        q_len = [q for q, _ in requests]
        return from_lengths(q_len, [sum(r) for r in requests], page_table, sum(q_len), accepted=accepted)

    a, b, both = make(first, tables[0]), make(second, tables[1]), make(first + second, torch.cat(tables))
    for name in ("positions", "slots", "visible", "kv_len"):
        assert torch.equal(getattr(both, name), torch.cat([getattr(a, name), getattr(b, name)])), name
    assert torch.equal(both.req_of_row, torch.cat([a.req_of_row, b.req_of_row + len(first)]))
    assert torch.equal(both.q_start, torch.cat([a.q_start, b.q_start[1:] + a.q_start[-1]]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8))
def test_chunks_of_a_prefill_are_the_prefill(chunks):
    """Three requests, cut at any places, in any portions of any of them at a time."""
    page_table = pages(3, 8)
    total = [sum(part) for part in zip(*chunks)]
    whole = rows_of(from_lengths(total, total, page_table, sum(total)))
    held, seen = [0, 0, 0], [[], [], []]
    for chunk in chunks:
        held = [h + c for h, c in zip(held, chunk)]
        batch = from_lengths(list(chunk), held, page_table, sum(chunk))
        for entry in rows_of(batch):
            seen[entry[2]].append(entry)
    assert sum(seen, []) == whole


def grid_oracle(real: list[list[bool]], past: list[int], page_table) -> list:
    want = []
    for request, columns in enumerate(real):
        position = past[request]
        for column in columns:
            want.append(row(page_table, request, position) if column else None)
            position += column
    return want


@pytest.mark.parametrize(
    "mask",
    [[[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 0, 1, 0], [0, 1, 1, 0]], [[0] * 4, [1] * 4]],
    ids=["left", "right", "holes", "empty row"],
)
@pytest.mark.parametrize("past", [(0, 0), (62, 3)])
def test_grid(mask, past):
    page_table = pages(2, 2)
    batch = Batch.from_grid(torch.tensor(mask).bool(), torch.tensor(past), page_table, 4)
    assert rows_of(batch) == grid_oracle(mask, past, page_table)
    assert batch.kv_len.tolist() == [p + sum(m) for p, m in zip(past, mask)]
    check_dtypes(batch, 8, 2)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_random_grids(data):
    B, S = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    mask = data.draw(st.lists(st.lists(st.booleans(), min_size=S, max_size=S), min_size=B, max_size=B))
    past = data.draw(st.lists(st.integers(0, 140), min_size=B, max_size=B))
    page_table = pages(B, 3)
    batch = Batch.from_grid(torch.tensor(mask), torch.tensor(past), page_table, S)
    assert rows_of(batch) == grid_oracle(mask, past, page_table)
    assert batch.kv_len.tolist() == [p + sum(m) for p, m in zip(past, mask)]
    if all(map(all, mask)):
        assert rows_of(Batch.from_grid(None, torch.tensor(past), page_table, S)) == rows_of(batch)


def test_a_grid_without_padding_is_the_batch_of_its_lengths():
    page_table = pages(3, 2)
    past = torch.tensor([5, 0, 70])
    grid = Batch.from_grid(None, past, page_table, 4)
    lengths = Batch.from_lengths(torch.full((3,), 4), past + 4, page_table, 12, kind=DECODE)
    for name in TENSORS:
        assert torch.equal(getattr(grid, name), getattr(lengths, name)), name
    assert grid.kind == DECODE
    assert Batch.from_grid(None, past, page_table, 9).kind == PREFILL


@pytest.mark.usefixtures("fresh_dynamo")
def test_fault_g2_lengths_never_reach_the_host():
    """Traced as a whole with an unknown number of rows: reading a value would break the graph. kv up to 110."""
    compiles = []

    def tensors(T, q_len, kv_len, page_table, past, real):
        a = Batch.from_lengths(q_len, kv_len, page_table, T)
        b = Batch.from_grid(real, past, page_table, 4)
        c = Batch.from_lengths(q_len, kv_len, page_table, T, accepted=q_len - 1)
        batches = [a, b, c, *a.steps(3), a.advance(q_len - 1)]
        return [getattr(batch, name) for batch in batches for name in TENSORS] + [a.last_rows(q_len)]

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def make(rows, q_len, kv_len, page_table, past, real):
        return tensors(rows.shape[0], q_len, kv_len, page_table, past, real)

    page_table = pages(2, 3)
    for T, longest in [*zip((2, 1, 0, 17, 16, 15), [20] * 6), *zip([1] * 11, range(100, 111))]:
        rows, real = torch.zeros(T), torch.arange(8).view(2, 4) != T
        torch._dynamo.decorators.mark_unbacked(rows, 0)
        lengths = (
            torch.tensor([min(3, T), max(0, T - 3)]),
            torch.tensor([10, longest]),
            page_table,
            torch.tensor([4, 60]),
        )
        got = make(rows, *lengths, real)
        want = tensors(T, *lengths, real)
        assert all(map(torch.equal, got, want))
    assert len(compiles) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], [1], pages(1, 1), 1), r"q_len \(1, 1\) and kv_len \(1,\); both must be \[B\]"),
        (([1, 1], [1], pages(2, 1), 1), r"q_len \(2,\) and kv_len \(1,\)"),
        (([1], [1], pages(2, 1), 1), r"page_table is torch.int32 \(2, 1\); it must be int32 \[1, maxP\]"),
        (([1], [1], pages(1, 1).long(), 1), "page_table is torch.int64"),
        (([1], [1], pages(1, 1), -1), "num_rows=-1; it must be at least 0"),
    ],
)
def test_bad_lengths(arguments, message):
    with pytest.raises(ValueError, match=message):
        from_lengths(*arguments)


def test_bad_tokens():
    with pytest.raises(ValueError, match="tokens=0; every request has at least one row"):
        Batch.decode(torch.tensor([1]), pages(1, 1), 0)


def test_bad_kind():
    with pytest.raises(ValueError, match="kind='extend'; it must be 'decode' or 'prefill'"):
        from_lengths([1], [1], pages(1, 1), 1, kind="extend")


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ((-1, 2, 1), DECODE, "num_rows=-1; it must be at least 0"),
        ((0, -2, 1), DECODE, "num_requests=-2; it must be at least 0"),
        ((4, 2, -1), PREFILL, "pages=-1; it must be at least 0"),
        ((4, 0, 1), PREFILL, "num_requests=0; it must be at least 1, for 4 rows to belong to"),
        ((4, 2, 1), "x", "kind='x'; it must be 'decode' or 'prefill'"),
    ],
)
def test_bad_idle_batches(sizes, kind, message):
    with pytest.raises(ValueError, match=message):
        Batch.idle(*sizes, "cpu", kind=kind, skip_scores=False)

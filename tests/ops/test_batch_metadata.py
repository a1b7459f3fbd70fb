"""batch_metadata against plain loops over requests and rows; outputs start as what no op writes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_dsa.custom_ops import BATCH_METADATA
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.testing import poisoned

NAMES = ("positions", "slots", "req_of_row", "visible", "q_start", "kv_out")


def outputs(T: int, B: int, device) -> list[torch.Tensor]:
    sizes = {"positions": T, "slots": T, "req_of_row": T, "visible": T, "q_start": B + 1, "kv_out": B}
    return [poisoned(n, dtype=torch.int64 if name == "slots" else torch.int32, device=device)
            for name, n in sizes.items()]  # fmt: skip


def oracle(q_len: list[int], kv_len: list[int], table: list[list[int]], T: int, accepted=None) -> list[list[int]]:
    """The outputs in the order of the schema."""
    B = len(q_len)
    q_len = [max(0, q) for q in q_len]
    kept = q_len if accepted is None else [min(max(a, 0), q) for a, q in zip(accepted, q_len)]
    rows = []
    for request, (q, kv, count) in enumerate(zip(q_len, kv_len, kept)):
        for i in range(q):
            position = kv - q + i
            if i >= count or position < 0:
                rows.append((0, -1, request, 0))
                continue
            column = position // PAGE
            page = table[request][column] if column < len(table[request]) else -1
            rows.append((position, page * PAGE + position % PAGE if page >= 0 else -1, request, position + 1))
    rows = rows[:T] + [(0, -1, B - 1, 0)] * (T - len(rows))
    columns = [list(column) for column in zip(*rows)] if rows else [[], [], [], []]
    starts = [sum(q_len[:i]) for i in range(B + 1)]
    return [*columns, starts, [max(0, kv - q + count) for q, kv, count in zip(q_len, kv_len, kept)]]


def check(backend, q_len, kv_len, table, T, accepted=None, dtypes=(torch.int32, torch.int64, torch.int32)) -> None:
    lengths = [
        None if values is None else torch.tensor(values, dtype=dtype, device=backend.device)
        for values, dtype in zip((q_len, kv_len, accepted), dtypes)
    ]
    page_table = torch.tensor(table, dtype=torch.int32, device=backend.device).view(len(q_len), -1)
    got = outputs(T, len(q_len), backend.device)
    backend("batch_metadata", *lengths[:2], page_table, lengths[2], *got)
    for name, tensor, want in zip(NAMES, got, oracle(q_len, kv_len, table, T, accepted)):
        assert tensor.tolist() == want, name


def pages(B: int, width: int) -> list[list[int]]:
    """No order, no repetition."""
    return [[(B * width - request * width - column) * 3 for column in range(width)] for request in range(B)]


def test_fault_a1_extend_3_and_2_after_7_and_2(backend):
    got = outputs(5, 2, backend.device)
    lengths = [torch.tensor(values, device=backend.device) for values in ([3, 2], [10, 4])]
    table = torch.tensor([[4], [9]], dtype=torch.int32, device=backend.device)
    backend("batch_metadata", *lengths, table, None, *got)
    positions, slots, req_of_row, visible, q_start, kv_out = (tensor.tolist() for tensor in got)
    assert visible == [8, 9, 10, 3, 4] and positions == [7, 8, 9, 2, 3] and req_of_row == [0, 0, 0, 1, 1]
    assert slots == [263, 264, 265, 578, 579] and q_start == [0, 3, 5] and kv_out == [10, 4]


@pytest.mark.parametrize("T", [32, 33, 128])
def test_fault_b1_all_lengths_zero(backend, T):
    check(backend, [0] * 5, [0] * 5, pages(5, 2), T)


def test_fault_b2_more_rows_than_keys(backend):
    check(backend, [6, 2], [1, 5000], pages(2, 79), 8)


def test_fault_b5_rows_for_8_and_lengths_for_5(backend):
    check(backend, [1] * 5, [3, 1, 9, 2, 7], pages(5, 1), 8)


@pytest.mark.parametrize("T", [0, 1, 7])
def test_few_rows(backend, T):
    """Without rows the requests are still described; with fewer than the requests have, the last are left out."""
    check(backend, [3, 0, 4], [70, 5, 4], pages(3, 2), T)


@pytest.mark.parametrize("dtypes", [(torch.int32,) * 3, (torch.int64,) * 3, (torch.int64, torch.int32, torch.int64)])
def test_dtypes_of_lengths(backend, dtypes):
    check(backend, [3, 2, 4], [70, 5, 4], pages(3, 2), 12, [2, 2, 0], dtypes)


def test_accepted_is_taken_into_the_rows_that_there_are(backend):
    check(backend, [4, 4, 4, 4, 4, 0], [70, 9, 4, 2, 0, 8], pages(6, 2), 24, [2, 9, -3, 3, 4, 1])


def test_negative_lengths_count_as_0(backend):
    """Requests beside them keep their rows: q_start stays in ascending order."""
    check(backend, [3, -4, 2, -1], [10, 7, 4, -3], pages(4, 1), 7)
    check(backend, [3, -4, 2, -1], [10, 7, 4, -3], pages(4, 1), 7, [2, -1, 1, 4])


def test_pages_that_are_absent(backend):
    """-1 in the table, positions after its last column, and a table without columns."""
    check(backend, [3, 66, 2], [66, 66, 300], [[7, -1], [-1, 8], [1, 2]], 71)
    check(backend, [3], [3], [[]], 4)


def test_slots_past_int32(backend):
    check(backend, [2], [66], [[2**31 - 1, 2**31 - 2]], 2)


@pytest.mark.parametrize("B", [255, 256, 257, 600])
def test_many_requests(backend, B):
    """Lengths around the size of a block of requests, some without rows, T a little more than their sum."""
    q_len = [(7 * i) % 4 for i in range(B)]
    check(backend, q_len, [q + 5 * i % 90 for i, q in enumerate(q_len)], pages(B, 2), sum(q_len) + 3)


def test_strides_of_the_page_table(backend):
    wide = torch.tensor(pages(2, 5), dtype=torch.int32, device=backend.device)
    lengths = torch.tensor([2, 3], device=backend.device), torch.tensor([65, 66], device=backend.device)
    got, want = outputs(5, 2, backend.device), outputs(5, 2, backend.device)
    backend("batch_metadata", *lengths, wide[:, 1:3], None, *got)
    backend("batch_metadata", *lengths, wide[:, 1:3].contiguous(), None, *want)
    assert all(map(torch.equal, got, want))


requests = st.lists(
    st.tuples(st.integers(-4, 40), st.integers(-4, 200), st.integers(-1, 42), st.integers(-1, 50)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, st.integers(-9, 9), st.booleans())
def test_ragged_lengths(backend, drawn, more_rows, with_accepted):
    """Any lengths, negative ones and keys fewer than rows included; T smaller and larger than the sum."""
    q_len, kv_len, accepted, page = (list(values) for values in zip(*drawn))
    table = [[p, -1 if p % 5 == 0 else p + 1, p + 2] for p in page]
    check(backend, q_len, kv_len, table, max(0, sum(q_len) + more_rows), accepted if with_accepted else None)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "T"), [(1, 16384), (64, 16384), (512, 512), (4096, 16384), (9000, 9000)])
def test_kernel_equals_the_reference(B, T):
    q_len = torch.randint(0, 2 * T // B + 1, (B,), device="cuda")
    kv_len = torch.randint(0, 40000, (B,), device="cuda")
    table = torch.randint(-1, 2**31 - 1, (B, 500), dtype=torch.int32, device="cuda")
    for accepted in (None, torch.randint(-1, 2 * T // B + 2, (B,), device="cuda")):
        got, want = outputs(T, B, "cuda"), outputs(T, B, "cuda")
        torch.ops.compiled_dsa.batch_metadata(q_len, kv_len, table, accepted, *got, provider="triton")
        BATCH_METADATA.reference(q_len, kv_len, table, accepted, *want)
        for name, a, b in zip(NAMES, got, want):
            assert torch.equal(a, b), name


def arguments(B: int = 2, T: int = 3) -> dict[str, torch.Tensor]:
    lengths = {"q_len": torch.ones(B).long(), "kv_len": torch.ones(B).long()}
    table = torch.zeros(B, 1, dtype=torch.int32)
    return {**lengths, "page_table": table, "accepted": None, **dict(zip(NAMES, outputs(T, B, "cpu")))}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q_len": torch.ones(2)}, "q_len has dtype torch.float32; it must be torch.int32 or torch.int64"),
        ({"kv_len": torch.ones(3).long()}, r"kv_len has shape \(3,\); it must be \[2\]"),
        ({"accepted": torch.ones(3).long()}, r"accepted has shape \(3,\); it must be \[2\]"),
        ({"accepted": torch.ones(2)}, "accepted has dtype torch.float32"),
        ({"page_table": torch.zeros(2, 1).long()}, "page_table has dtype torch.int64; it must be torch.int32"),
        ({"visible": torch.zeros(4).int()}, r"visible has shape \(4,\); it must be \[3\]"),
        ({"slots": torch.zeros(3).int()}, "slots has dtype torch.int32; it must be torch.int64"),
        ({"q_start": torch.zeros(2).int()}, r"q_start has shape \(2,\); it must be \[3\]"),
        ({"kv_out": torch.zeros(2).long()}, "kv_out has dtype torch.int64; it must be torch.int32"),
    ],
)
def test_bad_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.batch_metadata(*(arguments() | wrong).values())


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match=r"q_len has shape \(0,\); rows of padding need a request"):
        torch.ops.compiled_dsa.batch_metadata(*arguments(B=0).values())

"""mla_prefill with the Gluon kernels of Hopper: which calls they serve, over which pages, in which slices.

What is around them runs on a CPU too, with the reference in the kernel's place.
"""

import sys

import pytest
import torch

from compiled_dsa.custom_ops.kernels.common import multiprocessors
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.custom_ops.mla_prefill import row_scratch_bytes
from compiled_dsa.custom_ops.sparse_mla import attend, selected_slots
from compiled_dsa.testing import (
    attention_oracle,
    attention_tolerance,
    poisoned,
    random_latent_pool,
    random_page_table,
)
from tests.ops.mla_prefill_cases import check, setup


def gluon_arguments(**changes):
    """(q_rope, pool, L, scale) that the Gluon kernel takes on its device, with changes."""
    H, L, R, dtype = (
        changes.get(k, default) for k, default in zip(("H", "L", "R", "dtype"), (128, 512, 64, "bfloat16"))
    )
    dtype = getattr(torch, dtype)
    pool = torch.zeros(2, PAGE, L + R, dtype=dtype)
    if "offset" in changes:
        pool = torch.zeros(pool.numel() + changes["offset"], dtype=dtype)[changes["offset"] :].view(pool.shape)
    return torch.zeros(3, H, R, dtype=dtype), pool, L, changes.get("scale", 0.1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "capability (9, 0)"),
        ({"dtype": "float16"}, "not bfloat16"),
        ({"H": 96}, "96 heads of 512+64"),
        ({"L": 128, "R": 32}, "128 heads of 128+32"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"offset": 4}, "aligned"),
    ],
)
def test_what_the_gluon_kernel_refuses(changes, reason):
    from compiled_dsa.custom_ops.kernels.mla_prefill import refuses_gluon

    loaded = "compiled_dsa.custom_ops.kernels.sparse_mla_gluon" in sys.modules
    assert reason in refuses_gluon(*gluon_arguments(**changes))
    # nothing imports triton's gluon where it does not run
    assert loaded or "compiled_dsa.custom_ops.kernels.sparse_mla_gluon" not in sys.modules


def test_when_fp8_pages_are_dequantised():
    from compiled_dsa.custom_ops.kernels.mla_prefill import LANES_PER_TOKEN, worth_dequantising

    size, lanes = 5 * PAGE * 576 * 2, LANES_PER_TOKEN * 5 * PAGE
    row = 1024
    assert worth_dequantising(5, 512, 64, lanes, row, 2 * size)
    assert not worth_dequantising(5, 512, 64, lanes - 1, row, 2 * size)
    assert not worth_dequantising(5, 512, 64, lanes, row, 2 * size - 1)
    assert not worth_dequantising(5, 512, 64, lanes, size + 1, 2 * size)  # no room for a row


@pytest.fixture
def gluon_calls(hopper, monkeypatch):
    """The number of rows, the shape of the pool and its dtype of every launch of the Gluon kernel."""
    from compiled_dsa.custom_ops.kernels import sparse_mla_gluon

    calls: list[tuple[int, torch.Size, torch.dtype]] = []
    launch = sparse_mla_gluon.launch

    def spy(q_latent, q_rope, pool, *args, **keywords):
        calls.append((q_latent.shape[0], pool.shape, pool.dtype))
        launch(q_latent, q_rope, pool, *args, **keywords)

    monkeypatch.setattr(sparse_mla_gluon, "launch", spy)
    return calls


@pytest.fixture
def calls_anywhere(device, request, monkeypatch):
    """As ``gluon_calls``. On a CPU the reference takes the place of the Gluon kernel, and what is around it runs."""
    if device == "cuda":
        return request.getfixturevalue("gluon_calls")
    from compiled_dsa.custom_ops.kernels import mla_prefill, sparse_mla_gluon

    calls: list[tuple[int, torch.Size, torch.dtype]] = []

    def launch(q_latent, q_rope, pool, topk, count, table, requests, scale, sinks, out, lse, width):
        calls.append((q_latent.shape[0], pool.shape, pool.dtype))
        slots = selected_slots(topk, count.clamp(max=width), table, requests, pool.shape[0])
        out.copy_(attend(q_latent, q_rope, pool, slots, scale, sinks)[0])

    monkeypatch.setattr(sparse_mla_gluon, "launch", launch)
    monkeypatch.setattr(mla_prefill, "refuses_gluon", lambda *args: None)
    return calls


def by_triton(*args):
    """The op by its kernels, which Triton's interpreter runs on a CPU; there it may be asked for no product of bf16."""
    if args[0].is_cuda:
        torch.ops.compiled_dsa.mla_prefill(*args)
    else:
        from compiled_dsa.custom_ops.kernels import mla_prefill

        mla_prefill.run(*args)


def rows_of(calls):
    return [rows for rows, _, _ in calls]


def ragged(args, pages=9):
    """Counts from nothing to more than all lanes, bad ids between good ones, and NaN in all tokens not selected."""
    pool, topk, count = args[2:5]
    T, K = topk.shape
    count[:] = torch.randint(0, K + 1, (T,), device=count.device)
    edges = [0, -3, 1, 64, 65, 128, 129, K, K + 5, K]
    count[: len(edges)] = torch.tensor(edges, device=count.device)[:T]
    kind = torch.rand(T, K, device=topk.device)
    for i, bad in enumerate((-1, pages * PAGE, 2**31 - 1, -(2**31))):
        topk[(kind > 0.05 * i) & (kind < 0.05 * (i + 1))] = bad
    topk[7, :64] = -1  # a whole block
    topk[8] = -1
    topk[topk == 0] = -1  # slot 0 is where lanes without token would point
    lane = torch.arange(K, device=topk.device)
    chosen = topk[(lane < count[:, None]) & (topk >= 0) & (topk < pages * PAGE)].long()
    unused = torch.ones(pages * PAGE, dtype=torch.bool, device=topk.device)
    unused[chosen] = False
    pool.flatten(0, 1)[unused] = 0x7F if pool.dtype == torch.uint8 else torch.nan
    return args


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 192])
@pytest.mark.parametrize("K", [40, 64, 192, 576])
def test_gluon_ragged_rows(gluon_calls, H, K):
    """300 rows: more than one tile a program."""
    args = ragged(setup(300, H, 128, 128, 512, 64, torch.bfloat16, torch.bfloat16, "cuda", K, sinks=H != 128))
    empty = args[4] <= 0
    args[0][empty] = torch.nan  # a padding row may hold anything
    args[1][empty] = torch.nan
    out = poisoned(300, H, 128, dtype=torch.bfloat16, device="cuda")
    torch.ops.compiled_dsa.mla_prefill(*args, out, 1 << 27)
    assert rows_of(gluon_calls) == [300]
    assert (out[empty] == 0).all() and (out[8] == 0).all()
    args[0][empty] = 0
    args[1][empty] = 0
    check(out, args)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8])
def test_gluon_paged(gluon_calls, pool_dtype):
    args = setup(40, 64, 128, 128, 512, 64, pool_dtype, torch.bfloat16, "cuda", sinks=True)
    args[3] = None
    args[4][:] = torch.arange(40) * 4 - 8  # up to more than the 128 tokens of the page table
    args[5][1, 0], args[5][2, 1] = -1, 9  # no page, no page of the pool
    out = poisoned(40, 64, 128, dtype=torch.bfloat16, device="cuda")
    torch.ops.compiled_dsa.mla_prefill(*args, out, 1 << 27)
    assert rows_of(gluon_calls) == [40]
    check(out, args)


@pytest.mark.gpu
def test_gluon_log_sum_exp(gluon_calls):
    from compiled_dsa.custom_ops.kernels import sparse_mla_gluon

    args = setup(20, 128, 128, 128, 512, 64, torch.bfloat16, torch.bfloat16, "cuda", 200, sinks=True)
    ragged(args)
    q_latent = torch.randn(128, 20, 512, device="cuda").bfloat16().transpose(0, 1)
    selection = (args[1], *args[2:7], 0.05, args[9])
    out, lse = torch.full_like(q_latent, torch.nan), poisoned(20, 128, dtype=torch.float32, device="cuda")
    sparse_mla_gluon.launch(q_latent, *selection, out, lse)
    want, want_lse = attention_oracle(q_latent, *selection)
    atol, lse_atol = attention_tolerance(q_latent, args[1], args[2], 0.05)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_atol)
    in_place = q_latent.clone(memory_format=torch.preserve_format)
    sparse_mla_gluon.launch(in_place, *selection, in_place, None)
    assert torch.equal(in_place, out)


@pytest.mark.gpu
def test_gluon_reads_fp8_pools_through_scratch_or_in_place(gluon_calls):
    args = setup(40, 64, 128, 128, 512, 64, FP8, torch.bfloat16, "cuda")
    size = 9 * PAGE * 576 * 2
    args[3] = args[3].repeat(1, 2)  # 5,600 lanes, where 3,456 repay it
    args = ragged(args)  # after that: else lanes of the second half might name tokens that it has taken for unused
    for budget, slices, dtype in ((2 * size, 4, torch.bfloat16), (2 * size - 1, 2, torch.uint8)):
        gluon_calls.clear()
        out = poisoned(40, 64, 128, dtype=torch.bfloat16, device="cuda")
        torch.ops.compiled_dsa.mla_prefill(*args, out, budget)
        assert sum(rows_of(gluon_calls)) == 40 and [pool for _, _, pool in gluon_calls] == [dtype] * slices
        check(out, args)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [16, 96])
def test_other_head_counts_read_fp8_pools_in_place(hopper, monkeypatch, H):
    """And not by the plain kernel."""
    from compiled_dsa.custom_ops.kernels import sparse_mla

    monkeypatch.setattr(sparse_mla, "launch", None)
    args = ragged(setup(40, H, 128, 128, 512, 64, FP8, torch.bfloat16, "cuda", sinks=True))
    out = poisoned(40, H, 128, dtype=torch.bfloat16, device="cuda")
    torch.ops.compiled_dsa.mla_prefill(*args, out, 1 << 24)
    check(out, args)


@pytest.mark.parametrize("paged", [False, True])
def test_the_pages_of_a_batch_are_dequantised_alone(device, calls_anywhere, paged):
    """6 of 30 pages: one that two requests share, entries outside the pool, lanes without a token. The rows of two
    waves fill the budget."""
    wave = multiprocessors(torch.device(device)) // 2
    T = 4 * wave + wave // 2
    args = setup(T, 128, 128, 128, 512, 64, FP8, torch.bfloat16, device, sinks=True)
    args[2] = random_latent_pool(30, 512, 64, FP8, device)
    args[5] = random_page_table(3, 2, 30, device)
    table, requests = args[5:7]
    table[1, 0] = table[0, 0]
    if paged:
        table[2] = torch.tensor([-1, 30], device=device)
        args[3], args[4] = None, args[4] * 2
    else:
        offset = torch.arange(2 * PAGE, device=device).int() % PAGE
        slots = table[requests.long()].repeat_interleave(PAGE, 1) * PAGE + offset
        args[3] = torch.stack([row[torch.randperm(2 * PAGE, device=device)[:70]] for row in slots])
        args[3][:, ::7] = -1
        args[3] = torch.nn.functional.pad(args[3], (0, 2048 - 70), value=-1)
    out = poisoned(T, 128, 128, dtype=torch.bfloat16, device=device)
    row = 128 * 1024 + (0 if paged else 4 * 2048)
    budget = 2 * wave * row + 6 * PAGE * 576 * 2 + 4096
    if device == "cpu":  # so few rows that half of the scratch would not hold the pages
        budget += 6 * PAGE * 576 * 2
    rest = (out, budget, None, False, True)
    by_triton(*args, *rest)
    assert {(pool, dtype) for _, pool, dtype in calls_anywhere} == {((6, PAGE, 576), torch.bfloat16)}
    assert sum(rows_of(calls_anywhere)) == T
    check(out, args)
    if device == "cuda":
        assert rows_of(calls_anywhere) == [2 * wave, 2 * wave, wave // 2]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        by_triton(*args, *rest)
        assert torch.cuda.max_memory_allocated() - before <= budget


def test_a_table_wider_than_the_bound(device, calls_anywhere):
    """Without a selection, of 100 columns only those of ``max_count`` tokens are dequantised."""
    args = setup(40, 64, 128, 128, 512, 64, FP8, torch.bfloat16, device, sinks=True)
    args[2], args[3] = random_latent_pool(400, 512, 64, FP8, device), None
    args[5] = random_page_table(3, 100, 400, device)
    args[4][:] = torch.arange(40) * 4
    out = poisoned(40, 64, 128, dtype=torch.bfloat16, device=device)
    by_triton(*args, out, 1 << 24, 150, False, True)
    assert calls_anywhere == [(40, (9, PAGE, 576), torch.bfloat16)]
    args[4].clamp_(max=150)
    check(out, args)


def test_a_small_pool_is_dequantised_whole(device, calls_anywhere):
    args = setup(40, 64, 128, 128, 512, 64, FP8, torch.bfloat16, device)
    args[3], args[4] = args[3].repeat(1, 2), args[4] * 2
    out = poisoned(40, 64, 128, dtype=torch.bfloat16, device=device)
    by_triton(*args, out, 1 << 24)
    assert calls_anywhere == [(40, (9, PAGE, 576), torch.bfloat16)]
    check(out, args)


@pytest.mark.gpu
def test_gluon_rows_are_cut_by_the_budget_in_whole_waves(gluon_calls):
    args = setup(400, 128, 128, 128, 512, 64, torch.bfloat16, torch.bfloat16, "cuda")
    wave = torch.cuda.get_device_properties("cuda").multi_processor_count // 2
    outs = []
    for budget, slices in (
        (1 << 27, [400]),
        (150 * 128 * 1024, [2 * wave] * 3 + [400 - 6 * wave]),
        (row_scratch_bytes(args[0], args[7]), [1] * 400),
    ):
        gluon_calls.clear()
        out = poisoned(400, 128, 128, dtype=torch.bfloat16, device="cuda")
        torch.ops.compiled_dsa.mla_prefill(*args, out, budget)
        assert rows_of(gluon_calls) == slices
        outs.append(out)
        check(out, args)
    # a slice changes how the GEMMs round, not what is attended
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=2.0**-6 * float(outs[0].abs().amax()))


@pytest.mark.gpu
def test_gluon_peak_scratch(gluon_calls):
    args = setup(400, 128, 128, 128, 512, 64, FP8, torch.bfloat16, "cuda")
    for budget in (9 * PAGE * 576 * 2 * 2, 1 << 27):
        out = poisoned(400, 128, 128, dtype=torch.bfloat16, device="cuda")
        torch.ops.compiled_dsa.mla_prefill(*args, out, budget)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.ops.compiled_dsa.mla_prefill(*args, out, budget)
        assert torch.cuda.max_memory_allocated() - before <= budget
    assert gluon_calls

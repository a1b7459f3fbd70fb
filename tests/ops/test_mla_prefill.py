"""mla_prefill: absorbed attention of many rows within a scratch budget, against the reference in fp64."""

import pytest
import torch

from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.custom_ops.mla_prefill import row_scratch_bytes
from compiled_dsa.testing import poisoned
from tests.ops.mla_prefill_cases import check, setup

BUDGET = 1 << 24


def run(backend, args, budget=BUDGET):
    q_nope, kv_b = args[0], args[7]
    out = poisoned(*q_nope.shape[:2], kv_b.shape[1] - q_nope.shape[2], dtype=q_nope.dtype, device=backend.device)
    backend("mla_prefill", *args, out, budget)
    return out


SIZES = {
    "fp32": (8, 32, 48, 128, 32, torch.float32, torch.float32),
    "fp16": (8, 64, 64, 160, 32, torch.float16, torch.float16),
    "bf16": (16, 128, 128, 512, 64, torch.bfloat16, torch.bfloat16),
    "fp8-fp16": (24, 96, 128, 128, 0, FP8, torch.float16),
    "fp8-bf16": (16, 192, 256, 512, 64, FP8, torch.bfloat16),
}


FORMS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
EVERY_FORM = [(size, *form) for size in SIZES for form in FORMS]
# Triton's interpreter takes seconds each: there each size once with one of the absorbed forms, once expanded
FEWER = [(size, *form) for i, size in enumerate(SIZES) for form in (FORMS[i % 3], FORMS[3])]


@pytest.mark.parametrize(("size", "sinks", "paged", "expanded"), EVERY_FORM if torch.cuda.is_available() else FEWER)
def test_against_fp64(backend, size, sinks, paged, expanded, monkeypatch):
    args = setup(6, *SIZES[size], backend.device, sinks=sinks)
    if expanded:
        from compiled_dsa.custom_ops.kernels import mla_prefill_plan

        for name in ("ATTENTION_COST", "EXPANSION_COST", "WAVES"):
            monkeypatch.setattr(mla_prefill_plan, name, 0.0)
    if paged:
        args[3] = None
        args[4] = torch.tensor([128, 0, 65, 64, 1, 300], dtype=torch.int32, device=backend.device)
    check(run(backend, args), args)


@pytest.mark.parametrize("H", [1, 8, 64, 128])
def test_fault_d3_query_heads(backend, H):
    args = setup(3, H, 32, 32, 128, 32, FP8, torch.float16, backend.device)
    check(run(backend, args), args)


def test_rows_are_cut_by_the_budget(backend):
    args = setup(7, *SIZES["fp32"], backend.device, sinks=True)
    row = row_scratch_bytes(args[0], args[7])
    whole = run(backend, args)
    for budget in (row, 3 * row + 1):
        torch.testing.assert_close(run(backend, args, budget), whole)
    check(whole, args)


def test_counts_beyond_the_lanes(backend):
    args = setup(9, *SIZES["fp32"], backend.device, K=40)
    args[4] = torch.arange(40, 940, 100, dtype=torch.int32, device=backend.device)
    got = run(backend, args)
    args[4] = args[4].clamp(max=40)
    assert torch.equal(got, run(backend, args))


def test_no_key_gives_zero(backend):
    args = setup(5, *SIZES["fp32"], backend.device, sinks=True)
    args[3].fill_(2**31 - 1)
    assert (run(backend, args) == 0).all()


def test_no_rows(backend):
    args = setup(2, *SIZES["fp32"], backend.device)
    for i in (0, 1, 3, 4, 6):
        args[i] = args[i][:0]
    pool = args[2].clone()
    assert run(backend, args).shape[0] == 0
    assert torch.equal(args[2], pool)


def test_strided_queries_and_output(backend):
    args = setup(5, *SIZES["fp32"], backend.device)
    both = torch.cat([args[0], args[1]], dim=-1)
    args[0], args[1] = both.split([32, 32], dim=-1)
    buffer = poisoned(5, 8, 64, dtype=torch.float32, device=backend.device)
    backend("mla_prefill", *args, buffer[..., 8:56], BUDGET)
    assert buffer[..., :8].isnan().all() and buffer[..., 56:].isnan().all()
    check(buffer[..., 8:56], args)


def test_budget_below_one_row_is_refused():
    args = setup(2, *SIZES["fp32"], "cpu")
    row = row_scratch_bytes(args[0], args[7])
    with pytest.raises(ValueError, match=f"scratch_bytes={row - 1}; one row needs {row} bytes"):
        torch.ops.compiled_dsa.mla_prefill(*args, torch.empty(2, 8, 48), row - 1)


@pytest.mark.gpu
def test_peak_scratch_on_a_gpu():
    """Temporary memory, apart from a workspace that cuBLAS keeps, stays within the budget."""
    args = setup(500, *SIZES["bf16"], "cuda")
    budget = 40 * row_scratch_bytes(args[0], args[7])
    out = poisoned(500, 16, 128, dtype=torch.bfloat16, device="cuda")
    torch.ops.compiled_dsa.mla_prefill(*args, out, budget)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.ops.compiled_dsa.mla_prefill(*args, out, budget)
    assert torch.cuda.max_memory_allocated() - before <= budget
    check(out, args)


def test_slots_off_the_table_are_left_out():
    """With ``own_pages``, in the reference, so that tests on a CPU notice a caller that does not keep its promise."""
    args = setup(4, *SIZES["fp32"], "cpu")
    args[5] = args[2].new_tensor([[3, -1], [5, 9], [3, 2**31 - 1]], dtype=torch.int32)
    outs = [torch.empty(4, 8, 48) for _ in range(2)]
    torch.ops.compiled_dsa.mla_prefill(*args, outs[0], BUDGET, None, False, True)
    args[3] = torch.where((args[3] // PAGE == 3) | (args[3] // PAGE == 5), args[3], -1)
    torch.ops.compiled_dsa.mla_prefill(*args, outs[1], BUDGET)
    assert torch.equal(*outs) and outs[0].any()

"""mla_prefill: absorbed attention of many rows within a scratch budget, against the reference in fp64."""

import pytest
import torch

from compiled_dsa.custom_ops import MLA_PREFILL
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.custom_ops.mla_prefill import row_scratch_bytes
from compiled_dsa.testing import (
    attention_tolerance,
    dequantised_latents,
    poisoned,
    random_latent_pool,
    random_page_table,
)

BUDGET = 1 << 24


def setup(T, H, N, V, L, R, pool_dtype, dtype, device, K=70, sinks=False):
    """Arguments up to ``out``: kv lengths of a prefill over three requests of 2 pages."""
    pool = random_latent_pool(9, L, R, pool_dtype, device)
    q_nope = torch.randn(T, H, N, device=device).to(dtype)
    q_rope = torch.randn(T, H, R, device=device).to(dtype)
    kv_b = (torch.randn(H, N + V, L, device=device) * L**-0.5).to(dtype)
    topk = torch.stack([torch.randperm(9 * PAGE, device=device)[:K] for _ in range(T)]).int()
    count = torch.randint(1, K + 1, (T,), dtype=torch.int32, device=device)
    count[0] = 0
    table = random_page_table(3, 2, 9, device)
    requests = torch.randint(0, 3, (T,), dtype=torch.int32, device=device)
    sinks = torch.randn(H, device=device) if sinks else None
    return [q_nope, q_rope, pool, topk, count, table, requests, kv_b, (N + R) ** -0.5, sinks]


def run(backend, args, budget=BUDGET):
    q_nope, kv_b = args[0], args[7]
    out = poisoned(*q_nope.shape[:2], kv_b.shape[1] - q_nope.shape[2], dtype=q_nope.dtype, device=backend.device)
    backend("mla_prefill", *args, out, budget)
    return out


def check(out, args):
    q_nope, q_rope, pool, topk, count, table, requests, kv_b, scale, sinks = args
    N, L, R = q_nope.shape[2], kv_b.shape[2], q_rope.shape[2]
    want = torch.empty(out.shape, dtype=torch.float64, device=out.device)
    MLA_PREFILL.reference(
        q_nope.double(),
        q_rope.double(),
        dequantised_latents(pool, L, R),
        topk,
        count,
        table,
        requests,
        kv_b.double(),
        scale,
        sinks,
        want,
        1 << 30,
    )
    # the absorbed query is rounded, then attention runs, then rows of W_UV weigh the errors of its output
    eps = torch.finfo(q_nope.dtype).eps
    absorbed = torch.einsum("thn,hnl->thl", q_nope.double(), kv_b[:, :N].double()).to(q_nope.dtype)
    of_latent, _ = attention_tolerance(absorbed, q_rope, pool, scale, rounded_query=True)
    atol = float(kv_b[:, N:].double().norm(dim=-1).amax()) * of_latent + eps * float(want.abs().amax())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)


SIZES = {
    "fp32": (8, 32, 48, 128, 32, torch.float32, torch.float32),
    "fp16": (8, 64, 64, 160, 32, torch.float16, torch.float16),
    "bf16": (16, 128, 128, 512, 64, torch.bfloat16, torch.bfloat16),
    "fp8-fp16": (24, 96, 128, 128, 0, FP8, torch.float16),
    "fp8-bf16": (16, 192, 256, 512, 64, FP8, torch.bfloat16),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sinks", "paged"), [(False, False), (True, False), (True, True)])
def test_against_fp64(backend, size, sinks, paged):
    args = setup(6, *SIZES[size], backend.device, sinks=sinks)
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

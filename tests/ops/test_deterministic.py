"""Attention ops with ``deterministic``: a row has the same bits alone, among others, in another order and padded."""

import pytest
import torch

from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.custom_ops.mla_prefill import row_scratch_bytes
from compiled_dsa.testing import attention_oracle, attention_tolerance, poisoned, random_latent_pool

T, H, K, PAGES, N, V = 5, 3, 100, 15, 24, 40
OF_A_ROW = (0, 1, 3, 4, 6)  # arguments of both ops with one entry a row, None of topk apart
BUDGET = 1 << 24
SIZES = {  # L, R, pool dtype, query dtype
    "fp32": (128, 32, torch.float32, torch.float32),
    "fp8-fp16": (160, 16, FP8, torch.float16),
    "fp8-bf16": (512, 64, FP8, torch.bfloat16),
    "no-rope": (96, 0, torch.float32, torch.float32),
}


def selection(rows, keys, pages, device, paged):
    """topk or None, count, page table and requests; counts from nothing to more than all lanes."""
    topk = torch.stack([torch.randperm(pages * PAGE, device=device)[:keys] for _ in range(rows)]).int()
    topk[:, ::7] = -1
    count = torch.randint(1, keys + 1, (rows,), dtype=torch.int32, device=device)
    special = [keys, 65, keys + 9, 0, 1][:rows]
    count[: len(special)] = torch.tensor(special, dtype=torch.int32, device=device)
    width = -(-keys // PAGE)
    table = torch.stack([torch.randperm(pages, device=device)[:width] for _ in range(3)]).int()
    requests = torch.randint(0, 3, (rows,), dtype=torch.int32, device=device)
    return None if paged else topk, count, table, requests


def decode_arguments(rows, heads, keys, size, device, paged=False, pages=PAGES):
    L, R, pool_dtype, dtype = size
    pool = random_latent_pool(pages, L, R, pool_dtype, device)
    q_latent, q_rope = (torch.randn(rows, heads, n, device=device).to(dtype) for n in (L, R))
    sinks = torch.randn(heads, device=device)
    return [q_latent, q_rope, pool, *selection(rows, keys, pages, device, paged), (L + R) ** -0.5, sinks]


def prefill_arguments(rows, heads, keys, size, device, paged=False, pages=PAGES, n=N, v=V):
    args = decode_arguments(rows, heads, keys, size, device, paged, pages)
    L, dtype = size[0], size[3]
    args[0] = torch.randn(rows, heads, n, device=device).to(dtype)
    kv_b = (torch.randn(heads, n + v, L, device=device) * L**-0.5).to(dtype)
    return [*args[:7], kv_b, *args[7:]]


def with_exact_products(args):
    """The arguments of a prefill whose absorption and un-absorption round nothing.

    Triton's interpreter multiplies by numpy's BLAS, which rounds a row by its place in a tile; no GPU does.
    """
    args = list(args)
    args[0] = torch.randint(-4, 5, args[0].shape).to(args[0].dtype)
    kv_b = torch.randint(-4, 5, args[7].shape) / 16
    kv_b[:, N:] = torch.nn.functional.one_hot(torch.randint(args[7].shape[2], (H, V)), args[7].shape[2])
    args[7] = kv_b.to(args[7].dtype)
    return args


def decode(call, args, deterministic=True):
    """(out, lse) of ``call``, which runs an op by name; queries and outputs head by head in memory, as layers do."""
    q_latent = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    out = poisoned(*q_latent.transpose(0, 1).shape, dtype=q_latent.dtype, device=q_latent.device).transpose(0, 1)
    lse = poisoned(*out.shape[:2], dtype=torch.float32, device=out.device)
    call("sparse_mla_decode", q_latent, *args[1:], out, lse, deterministic)
    return out, lse


def prefill(call, args, budget=BUDGET, max_count=None, deterministic=True):
    q_nope, kv_b = args[0], args[7]
    out = poisoned(*q_nope.shape[:2], kv_b.shape[1] - q_nope.shape[2], dtype=q_nope.dtype, device=q_nope.device)
    call("mla_prefill", *args, out, budget, max_count, deterministic)
    return (out,)


def at_rows(args, rows):
    """The arguments of a call of these rows, in this order; -1 is a padding row, which attends nothing."""
    rows = torch.tensor(rows, device=args[0].device)
    args = [a[rows] if i in OF_A_ROW and a is not None else a for i, a in enumerate(args)]
    args[4][rows < 0] = 0
    return args


def assert_rows(got, whole, rows):
    for a, b in zip(got, whole):
        for i, row in enumerate(rows):
            assert row < 0 or torch.equal(a[i], b[row]), f"row {row} at place {i} of {len(rows)}"


OTHER_CALLS = [[1], [4, 3, 2, 1, 0], [1, -1, 4, -1, -1, 0, -1]]
if torch.cuda.is_available():  # the interpreter takes seconds each
    OTHER_CALLS += [[0], [4]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_a_decode(backend, size, paged):
    args = decode_arguments(T, H, K, SIZES[size], backend.device, paged)
    whole = decode(backend, args)
    for rows in OTHER_CALLS:
        assert_rows(decode(backend, at_rows(args, rows)), whole, rows)
    want, want_lse = attention_oracle(*args)
    atol, lse_atol = attention_tolerance(args[0], args[1], args[2], args[7])
    torch.testing.assert_close(whole[0].double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(whole[1].double(), want_lse, rtol=0, atol=lse_atol)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_a_prefill(backend, size, paged):
    args = prefill_arguments(T, H, K, SIZES[size], backend.device, paged)
    args = with_exact_products(args) if backend.interpreted else args
    whole = prefill(backend, args)
    row = row_scratch_bytes(args[0], args[7])
    for rows in OTHER_CALLS:
        assert_rows(prefill(backend, at_rows(args, rows)), whole, rows)
    for budget in (2 * row,) if backend.interpreted and size != "fp32" else (row, 3 * row + 1):
        assert_rows(prefill(backend, args, budget), whole, range(T))
    assert (whole[0][3] == 0).all()


def test_values_of_a_prefill(backend):
    args = prefill_arguments(T, H, K, SIZES["fp32"], backend.device)
    want = poisoned(T, H, V, dtype=torch.float64, device=backend.device)
    double = [
        a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.float32 and i != 9 else a
        for i, a in enumerate(args)
    ]
    OPS["mla_prefill"].reference(*double, want, 1 << 30)
    torch.testing.assert_close(prefill(backend, args)[0].double(), want, rtol=0, atol=2e-5)


def test_lanes_past_the_counts(backend):
    """A selection, or a page table, that is wider than any row needs."""
    for paged in (False, True):
        args = decode_arguments(T, H, K, SIZES["fp32"], backend.device, paged)
        args[4] = args[4].clamp(max=50)
        whole = decode(backend, args)
        at = 5 if paged else 3
        args[at] = args[at][:, : 1 if paged else 50].contiguous()
        assert_rows(decode(backend, args), whole, range(T))


def test_a_bound_of_counts(backend):
    args = prefill_arguments(T, H, K, SIZES["fp32"], backend.device, paged=True)
    bounded = prefill(backend, args, max_count=70)
    args[4] = args[4].clamp(max=70)
    assert_rows(prefill(backend, args), bounded, range(T))


@pytest.mark.parametrize("paged", [False, True])
def test_a_prefill_goes_one_way(monkeypatch, paged):
    """Not those whose slices, kernels or tiles follow from the number of rows or the budget."""
    from compiled_dsa.custom_ops.kernels import mla_prefill, mla_prefill_plan

    for module, name in ((mla_prefill_plan, "plan"), (mla_prefill, "attend_absorbed")):
        monkeypatch.setattr(module, name, lambda *args, name=name: pytest.fail(f"{name} is asked"))
    args = prefill_arguments(T, H, K, SIZES["fp32"], "cuda" if torch.cuda.is_available() else "cpu", paged)
    prefill(lambda name, *args: OPS[name].overload(*args, provider="triton"), args)


# ---- at the sizes of models ------------------------------------------------------------------------------------------

ROWS = (1, 3, 16, 70)


def call(name, *args):
    OPS[name].overload(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_rows_at_real_sizes(op, pool_dtype, heads, paged):
    """In batches of other sizes each row has the bits that it has alone; 2048 keys of 38,400, 128 values a head."""
    make, run = (decode_arguments, decode) if op == "decode" else (prefill_arguments, prefill)
    more = {} if op == "decode" else {"n": 128, "v": 128}
    size = (512, 64, pool_dtype, torch.bfloat16)
    args = make(max(ROWS), heads, 2048, size, "cuda", paged, pages=600, **more)
    alone = [torch.cat(parts) for parts in zip(*(run(call, at_rows(args, [t])) for t in range(max(ROWS))))]
    for n in ROWS:
        for rows in (list(range(n)), list(range(max(ROWS)))[::-1][:n]):
            assert_rows(run(call, at_rows(args, rows)), alone, rows)
    default = run(call, args, deterministic=False)
    for got, want in zip(alone, default):
        keys = want.isfinite()  # the log-sum-exp of the row without a key is -inf
        error = (got[keys].double() - want[keys].double()).norm() / want[keys].double().norm()
        assert torch.equal(got.isfinite(), keys) and error < 8 * 2.0**-8
    if op == "prefill":
        for slices in (1, 5, 32):
            budget = slices * row_scratch_bytes(args[0], args[7])
            assert_rows(run(call, args, budget), alone, range(max(ROWS)))

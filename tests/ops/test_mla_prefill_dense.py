"""Expanded keys in mla_prefill: when rows attend them, and that they give what the absorbed form gives."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_dsa.custom_ops import MLA_PREFILL, OPS
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import dequantised_latents, poisoned, random_latent_pool, random_page_table

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BUDGET = 1 << 24
PAGES = 12

SIZES = {  # H, N, V, L, R, dtype of the pool, of queries
    "fp32": (3, 32, 48, 128, 32, torch.float32, torch.float32),
    "fp16": (2, 48, 64, 160, 32, torch.float16, torch.float16),
    "fp8-fp16": (2, 64, 32, 128, 16, FP8, torch.float16),
    "no-rope": (3, 20, 40, 96, 0, torch.float32, torch.float32),
    "fp8-no-rope": (1, 96, 16, 256, 0, FP8, torch.float16),
}


@pytest.fixture
def planning():
    return importlib.import_module("compiled_dsa.custom_ops.kernels.mla_prefill_plan")


@pytest.fixture
def forced(planning, monkeypatch):
    """Expanding costs nothing."""
    for name in ("ATTENTION_COST", "EXPANSION_COST", "WAVES"):
        monkeypatch.setattr(planning, name, 0.0)


@pytest.fixture
def plans(planning, monkeypatch):
    """The plan, or None, of every call without a selection."""
    made: list = []
    plan = planning.plan

    def spy(*args):
        made.append(plan(*args))
        return made[-1]

    monkeypatch.setattr(planning, "plan", spy)
    return made


def setup(extend, prefix, size, K=None, sinks=False, width=3):
    """Arguments up to ``out`` of a prefill; with K, of a selection: the first lanes in order where all are selected."""
    H, N, V, L, R, pool_dtype, dtype = SIZES[size] if isinstance(size, str) else size
    rows = [(b, p + i + 1) for b, (e, p) in enumerate(zip(extend, prefix)) for i in range(e)]
    requests, visible = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in zip(*rows))
    T, B = len(rows), len(extend)
    table = random_page_table(B, width, max(PAGES, B * width), DEVICE)
    pool = random_latent_pool(max(PAGES, B * width), L, R, pool_dtype, DEVICE)
    topk, count = None, visible
    if K is not None:
        position = torch.arange(K, device=DEVICE).expand(T, K).clone()
        for t in (visible > K).nonzero().flatten().tolist():
            position[t] = torch.randperm(int(visible[t]), device=DEVICE)[:K]
        topk = (table[requests.long()[:, None], position // PAGE] * PAGE + position % PAGE).int()
        count = visible.clamp(max=K)
        topk[torch.arange(K, device=DEVICE) >= count[:, None]] = 2**31 - 1
    q_nope, q_rope = (torch.randn(T, H, n, device=DEVICE).to(dtype) for n in (N, R))
    kv_b = (torch.randn(H, N + V, L, device=DEVICE) * L**-0.5).to(dtype)
    sink = torch.randn(H, device=DEVICE) if sinks else None
    return [q_nope, q_rope, pool, topk, count, table, requests, kv_b, (N + R) ** -0.5, sink]


def run(args, budget=BUDGET, max_count=None):
    q_nope, kv_b = args[0], args[7]
    out = poisoned(*q_nope.shape[:2], kv_b.shape[1] - q_nope.shape[2], dtype=q_nope.dtype, device=q_nope.device)
    OPS["mla_prefill"].overload(*args, out, budget, max_count, provider="triton")
    return out


def wanted(args, max_count=None):
    q_nope, q_rope, pool, topk, count, table, requests, kv_b, scale, sinks = args
    N, L, R = q_nope.shape[2], kv_b.shape[2], q_rope.shape[2]
    want = torch.empty(*q_nope.shape[:2], kv_b.shape[1] - N, dtype=torch.float64, device=q_nope.device)
    double = (q_nope.double(), q_rope.double(), dequantised_latents(pool, L, R), topk, count, table, requests)
    MLA_PREFILL.reference(*double, kv_b.double(), scale, sinks, want, 1 << 30, max_count)
    return want


def tolerance(args):
    """Of either way: W_UK times a key, or times a query, is rounded, and so are weights, values and outputs."""
    q_nope, q_rope, pool, kv_b, scale = args[0], args[1], args[2], args[7], args[8]
    N, L, R = q_nope.shape[2], kv_b.shape[2], q_rope.shape[2]
    eps = torch.finfo(q_nope.dtype).eps
    tokens = dequantised_latents(pool, L, R).nan_to_num(0.0)
    largest_latent, largest_rope = (
        float(x.norm(dim=-1).amax()) if x.numel() else 0.0 for x in tokens.split([L, R], -1)
    )
    w = kv_b.double()
    q, qr = (float(x.double().nan_to_num(0.0).norm(dim=-1).amax()) if x.numel() else 0.0 for x in (q_nope, q_rope))
    w_uk = float(torch.linalg.matrix_norm(w[:, :N], ord=2).amax())
    score = scale * (q * w_uk * largest_latent + qr * largest_rope)
    rounding = eps * (1 + (pool.dtype == torch.uint8)) + 4 * (L + N + R) ** 0.5 * 2.0**-24
    value = float(w[:, N:].norm(dim=-1).amax()) * largest_latent
    return value * (2 * score * rounding + 4 * eps)


def check(out, args, max_count=None):
    torch.testing.assert_close(out.double(), wanted(args, max_count), rtol=0, atol=tolerance(args))


# ---- results ---------------------------------------------------------------------------------------------------------


SIZES_AND_SINKS = [(size, sinks) for size in SIZES for sinks in (False, True)]
FEWER = [  # in the interpreter, which takes seconds each
    ("fp32", False),
    ("fp32", True),
    ("fp16", True),
    ("fp8-fp16", False),
    ("no-rope", True),
    ("fp8-no-rope", False),
]


@pytest.mark.parametrize(("size", "sinks"), SIZES_AND_SINKS if CUDA else FEWER)
def test_ragged_prefill_with_prefixes(forced, plans, size, sinks):
    """Requests of one to many blocks of keys; blocks of rows that several requests share."""
    args = setup([5, 40, 3, 1], [66, 0, 130, 0], size, sinks=sinks)
    check(run(args), args)
    assert [plan.heads for plan in plans] == [SIZES[size][0]]


@settings(max_examples=15 if CUDA else 8, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 37), st.integers(0, 80)), min_size=1, max_size=5),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_ragged_shape(lengths, sinks, seed):
    planning = importlib.import_module("compiled_dsa.custom_ops.kernels.mla_prefill_plan")
    torch.manual_seed(seed)
    heads = 3 if CUDA else 1  # the interpreter runs one after the other
    args = setup(*zip(*lengths), (heads, *SIZES["fp32"][1:]), sinks=sinks, width=2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ATTENTION_COST", "EXPANSION_COST", "WAVES"):
            patch.setattr(planning, name, 0.0)
        check(run(args), args)
        order = torch.randperm(args[0].shape[0], device=DEVICE)  # rows of requests may lie anywhere
        shuffled = [a[order] if i in (0, 1, 4, 6) else a for i, a in enumerate(args)]
        check(run(shuffled), shuffled)


def budget_of_one_head(args, plan):
    """(the least budget, the bytes of a head's keys in it): beside them spans, rope, and what rounds all three up."""
    tokens, itemsize = args[5].shape[0] * plan.tokens, args[0].element_size()
    head = tokens * args[7].shape[1] * itemsize
    return 512 + tokens * args[1].shape[2] * itemsize + 512 + head, head


def test_bit_for_bit_whatever_the_budget_and_the_neighbours(forced, plans):
    args = setup([20, 17], [0, 50], "fp32")
    whole = run(args)
    one_head, head = budget_of_one_head(args, plans[0])
    for budget in (one_head, one_head + head, one_head + head - 1):
        assert torch.equal(run(args, budget), whole)
    assert [plan.heads for plan in plans] == [3, 1, 2, 1]
    others = [a.clone() if i in (0, 1, 4) else a for i, a in enumerate(args)]  # where they stand, a CPU's GEMM can tell
    others[0][:20], others[1][:20], others[4][:20] = 3.0, -3.0, 1
    assert torch.equal(run(others)[20:], whole[20:])
    check(run(args, one_head - 1), args)  # no room: absorbed
    assert plans[-1] is None


@pytest.mark.parametrize("size", ["fp32", "fp8-fp16"])
def test_pages_that_are_none(forced, plans, size):
    """Bad page ids act as missing keys; a row whose keys are all missing gives zero."""
    args = setup([70, 20], [0, 100], size)
    args[5][0, 0], args[5][1, 1] = -1, 2**31 - 1
    out = run(args)
    check(out, args)
    assert (out[:64] == 0).all()
    one_head, _ = budget_of_one_head(args, plans[0])
    assert torch.equal(run(args, one_head), out)
    assert [plan.heads for plan in plans] == [SIZES[size][0], 1]


def test_memory_that_nobody_attends_is_never_read_into_results(forced, plans):
    args = setup([9, 50], [30, 20], "fp32", sinks=True)
    pool, _, count, table, requests = args[2:7]
    unused = torch.ones(PAGES * PAGE, dtype=torch.bool, device=DEVICE)
    for t, n in enumerate(count.tolist()):
        position = torch.arange(n, device=DEVICE)
        unused[(table[requests[t].long(), position // PAGE] * PAGE + position % PAGE).long()] = False
    pool.flatten(0, 1)[unused] = torch.nan
    padding = torch.tensor([0, 8, 20], device=DEVICE)
    count[padding] = torch.tensor([0, -3, 0], dtype=torch.int32, device=DEVICE)
    args[0][padding] = torch.nan
    out = run(args)
    assert (out[padding] == 0).all() and plans[0] is not None
    args[0][padding] = 0
    check(out, args)


def test_scratch_that_holds_nan(forced, monkeypatch):
    """What no program has written is not read into results."""
    args = setup([3, 45, 1], [0, 20, 100], "fp32")
    args[4][0] = 0
    whole = run(args)
    new_empty = torch.Tensor.new_empty

    def poisonous(*args, **more):
        new = new_empty(*args, **more)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisonous)
        out = run(args)
    assert torch.equal(out, whole)


def test_idle_rows_of_a_graph(forced, plans):
    """8 rows and 8 requests of which one is real, the others without keys and pages."""
    args = setup([8] + [1] * 7, [29] + [0] * 7, "fp32", width=1)
    args = [a[:8] if i in (0, 1, 4, 6) else a for i, a in enumerate(args)]
    args[4][1:], args[6][1:], args[5][1:] = 0, 0, -1
    out = run(args)
    check(out, args)
    assert (out[1:] == 0).all() and plans[0] is not None


@pytest.mark.parametrize("empty", ["pool", "table"])
def test_empty_arguments(forced, empty):
    args = setup([20], [0], "fp32")
    if empty == "pool":
        args[2] = args[2][:0]
    else:
        args[5] = args[5][:, :0]
    assert (run(args) == 0).all()


# ---- the host's choice -----------------------------------------------------------------------------------------------


def test_max_count(forced, plans):
    """It bounds what rows attend, and so what may have to be expanded."""
    args = setup([10, 5], [0, 100], "fp32")
    for most in (105, 64, 3, 0):
        check(run(args, max_count=most), args, most)
    assert [plan.tokens for plan in plans[:3]] == [128, 64, 32] and plans[3] is None
    one_page = [*args[:5], args[5][:, :1].contiguous(), *args[6:]]
    check(run(one_page, max_count=105), one_page, 105)
    assert plans[-1].tokens == 64


def test_rows_longer_than_what_is_expanded(forced, planning, plans, monkeypatch):
    monkeypatch.setattr(planning, "LONGEST", 32)
    args = setup([40], [10], "fp32")
    check(run(args), args)
    check(run(args, max_count=32), args, 32)
    assert [plan is not None for plan in plans] == [False, True]


def test_what_is_asked_of_max_count():
    args = setup([3], [0], "fp32", 16)
    with pytest.raises(ValueError, match="max_count=5 is given along with topk"):
        run(args, max_count=5)
    args[3] = None
    with pytest.raises(ValueError, match="max_count=-1 is given below 0"):
        run(args, max_count=-1)


def test_a_selection_is_never_expanded(forced, plans):
    """Nor are page table and requests then read, though its rows attend the first tokens of their requests."""
    args = setup([30], [0], "fp32", 24)
    want = run(args)
    check(want, args)
    args[5], args[6] = torch.full_like(args[5], 2**31 - 1), torch.full_like(args[6], 2**31 - 1)
    assert torch.equal(run(args), want) and not plans


V32, GLM5 = (128, 128, 64, 128, 512), (64, 192, 64, 256, 512)  # H, N, R, V, L


def plan_of(planning, T, B, width=2048, dims=V32, budget=512 << 20):
    return planning.plan(T, B, dims, width, torch.bfloat16, torch.device("cpu"), budget)


@pytest.mark.parametrize(("dims", "repaid"), [(V32, 273), (GLM5, 1024)])
def test_plans_at_real_sizes(planning, dims, repaid):
    of = lambda *args, **more: plan_of(planning, *args, dims=dims, **more)  # noqa: E731
    assert of(2048, 1)[1:] == (2048, dims[0])
    assert (of(8 * 512, 8) is None) == (dims == GLM5)
    assert of(repaid + 1, 1) and of(repaid - 1, 1) is None and of(3 * repaid - 1, 3) is None
    assert of(8 * 1200, 8) and of(8 * 1200 + 64, 80) is None  # decoding requests beside them
    assert of(8192, 1, width=4096) and of(8192, 1, width=4097) is None
    assert of(2048, 1, budget=1 << 20) is None  # no head fits
    assert 0 < of(2048, 1, budget=8 << 20).heads < dims[0]


def test_switched_off(planning, monkeypatch):
    monkeypatch.setattr(planning, "EXPANSION_COST", math.inf)
    assert plan_of(planning, 2048, 1) is None


def test_dims_that_are_not_worth_it_or_do_not_fit(planning):
    assert plan_of(planning, 10**5, 1, dims=(8, 256, 64, 512, 256)) is None
    assert planning.tiling(2048, 64, 2048, torch.bfloat16) is None
    assert planning.tiling(128, 64, 128, torch.bfloat16)[:4] == (128, 128, 8, 2)
    assert [planning.chunks(n) for n in (0, 20, 64, 192)] == [(16, 0), (16, 16), (64, 0), (128, 64)]


@pytest.mark.parametrize(("scale", "strided", "reason"), [(0.0, False, "above 0"), (0.1, True, "strides")])
def test_what_only_the_sparse_path_takes(forced, plans, planning, scale, strided, reason):
    args = setup([20], [0], "fp32")
    args[8] = scale
    if strided:
        args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert reason in planning.refuses(args[0], args[7], args[0], scale)
    check(run(args), args)
    assert not plans


# ---- real sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [V32, GLM5])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8])
def test_real_sizes(plans, dims, pool_dtype):
    """Rows of a prefill from 0 and of one after a prefix, against fp64 in a few of them; heads in one group or two."""
    H, N, R, V, L = dims
    args = setup([1400, 800], [0, 1100], (H, N, V, L, R, pool_dtype, torch.bfloat16), sinks=True, width=40)
    out = run(args, 512 << 20, 2048)
    some = torch.tensor([0, 1, 63, 64, 127, 128, 1000, 1399, 1400, out.shape[0] - 1], device="cuda")
    few = [a[some] if i in (0, 1, 4, 6) else a for i, a in enumerate(args)]
    want = wanted(few)
    assert (out[some].double() - want).norm() / want.norm() < 4 * 2.0**-8
    assert out.isfinite().all() and torch.equal(run(args, 160 << 20, 2048), out)
    assert plans[0].heads == H > plans[1].heads >= H / 2


@pytest.mark.gpu
def test_peak_scratch(plans):
    """Of bytes that were asked for: the allocator may hand out up to 1 MiB more with each large tensor."""
    H, N, R, V, L = V32
    args = setup([2000], [0], (H, N, V, L, R, torch.bfloat16, torch.bfloat16), width=32)
    for budget in (40 << 20, 100 << 20, 512 << 20):
        out = run(args, budget)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        OPS["mla_prefill"].overload(*args, out, budget, None, provider="triton")
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= budget
    assert [plan.heads for plan in plans] == [39, 39, 99, 99, 128, 128]

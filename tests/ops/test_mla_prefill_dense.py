"""Expanded keys in mla_prefill: which rows attend them, and that they give what the absorbed form gives."""

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
def short():
    pytest.importorskip("triton")
    return importlib.import_module("compiled_dsa.custom_ops.kernels.mla_prefill_short")


@pytest.fixture
def kernels():
    return importlib.import_module("compiled_dsa.custom_ops.kernels.mla_prefill_dense")


@pytest.fixture
def forced(short, monkeypatch):
    """Expanding costs nothing: every short row is dense."""
    for name in ("ATTENTION_COST", "EXPANSION_COST", "WAVES"):
        monkeypatch.setattr(short, name, 0.0)


@pytest.fixture
def found(short, monkeypatch):
    """(plan, dense rows) of every call that had a plan."""
    calls: list = []
    find = short.find

    def spy(*args):
        rows = find(*args)
        calls.append((args[-1], rows.place >= 0))
        return rows

    monkeypatch.setattr(short, "find", spy)
    return calls


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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("K", [None, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_ragged_prefill_with_prefixes(forced, found, size, K, sinks):
    """Rows that are short, long, and of a request that has both; blocks of rows that several requests share."""
    args = setup([5, 40, 3, 1], [66, 0, 130, 0], size, K, sinks)
    check(run(args), args)
    ((plan, dense),) = found
    assert plan.everything == (K is None)
    assert dense.tolist() == (args[4] == (args[4] if K is None else _visible([5, 40, 3, 1], [66, 0, 130, 0]))).tolist()


def _visible(extend, prefix):
    return torch.tensor([p + i + 1 for e, p in zip(extend, prefix) for i in range(e)], device=DEVICE)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 37), st.integers(0, 80)), min_size=1, max_size=5),
    K=st.sampled_from([None, 16, 64, 100]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_ragged_shape(lengths, K, sinks, seed):
    short = importlib.import_module("compiled_dsa.custom_ops.kernels.mla_prefill_short")
    torch.manual_seed(seed)
    args = setup(*zip(*lengths), "fp32", K, sinks, width=2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ATTENTION_COST", "EXPANSION_COST", "WAVES"):
            patch.setattr(short, name, 0.0)
        check(run(args), args)
        order = torch.randperm(args[0].shape[0], device=DEVICE)  # rows of requests may lie anywhere
        shuffled = [a if a is None or i not in (0, 1, 3, 4, 6) else a[order] for i, a in enumerate(args)]
        check(run(shuffled), shuffled)


@pytest.mark.parametrize("K", [None, 100])
def test_bit_for_bit_whatever_the_budget_and_the_neighbours(forced, found, K):
    args = setup([40, 33], [0, 50], "fp32", K)
    whole = run(args)
    one_head = _budget_of_one_head(args, found[0][0])
    head = found[0][0].places * found[0][0].tokens * args[7].shape[1] * 4
    for budget in (one_head, one_head + head, one_head + head - 1):
        assert torch.equal(run(args, budget), whole)
    assert [plan.heads for plan, _ in found[1:]] == [1, 2, 1]
    others = [a.clone() if i in (0, 1, 4) else a for i, a in enumerate(args)]  # where they stand, a CPU's GEMM can tell
    others[0][:40], others[1][:40], others[4][:40] = 3.0, -3.0, 1
    assert torch.equal(run(others)[40:], whole[40:])
    check(run(args, one_head // 2), args)  # no room: the sparse path
    assert len(found) == 5


def _budget_of_one_head(args, plan):
    itemsize, width = args[0].element_size(), args[7].shape[1]
    tokens = plan.places * plan.tokens
    rope = -(-tokens * args[1].shape[2] * itemsize // 512) * 512
    return plan.index_bytes + rope + 512 + tokens * width * itemsize


@pytest.mark.parametrize("size", ["fp32", "fp8-fp16"])
@pytest.mark.parametrize("K", [None, 150])
def test_pages_that_are_none(forced, found, size, K):
    """Bad page ids act as missing keys; a row whose keys are all missing gives zero."""
    args = setup([70, 20], [0, 100], size, K)
    table, topk = args[5], args[3]
    table[0, 0], table[1, 1] = -1, 2**31 - 1
    if K is not None:  # as index_topk selects then
        position = torch.arange(K, device=DEVICE)
        slots = table.long()[args[6].long()[:, None], position // PAGE] * PAGE + position % PAGE
        slots = torch.where((slots >= 0) & (slots < PAGES * PAGE), slots, -1).int()
        topk.copy_(torch.where(position < args[4][:, None], slots, topk))
    out = run(args)
    check(out, args)
    assert (out[:64] == 0).all() and found[0][1].all()


@pytest.mark.parametrize("K", [None, 60])
def test_memory_that_nobody_attends_is_never_read_into_results(forced, found, K):
    args = setup([9, 50], [30, 20], "fp32", K, sinks=True)
    pool, topk, count, table, requests = args[2:7]
    unused = torch.ones(PAGES * PAGE, dtype=torch.bool, device=DEVICE)
    for t, n in enumerate(count.tolist()):
        position = torch.arange(n, device=DEVICE)
        slots = table[requests[t].long(), position // PAGE] * PAGE + position % PAGE if topk is None else topk[t, :n]
        unused[slots.long()] = False
    pool.flatten(0, 1)[unused] = torch.nan
    padding = torch.tensor([0, 8, 20], device=DEVICE)
    count[padding] = torch.tensor([0, -3, 0], dtype=torch.int32, device=DEVICE)
    args[0][padding] = torch.nan
    out = run(args)
    assert (out[padding] == 0).all() and not found[0][1][padding].any()
    args[0][padding] = 0
    check(out, args)


def test_idle_rows_of_a_graph(forced):
    """8 rows and 8 requests of which one is real, the others without keys and pages."""
    args = setup([8] + [1] * 7, [29] + [0] * 7, "fp32", width=1)
    args = [a[:8] if i in (0, 1, 4, 6) else a for i, a in enumerate(args)]
    args[4][1:], args[6][1:], args[5][1:] = 0, 0, -1
    out = run(args)
    check(out, args)
    assert (out[1:] == 0).all()


# ---- which rows ------------------------------------------------------------------------------------------------------


def test_what_index_topk_selects_is_recognised(forced, found):
    """Rows that see at most K keys get them in order, so they are dense; a row of K + 1 is not."""
    args = setup([30], [0], "fp32", 24)
    visible, topk = torch.arange(1, 31, dtype=torch.int32, device=DEVICE), args[3]
    topk.fill_(123456789)
    index_pool = torch.randn(PAGES, PAGE, 32, device=DEVICE)
    q, weights = torch.randn(30, 8, 32, device=DEVICE), torch.randn(30, 8, device=DEVICE)
    rows = (args[5], args[6], visible)
    OPS["index_topk_prefill"].overload(q, weights, index_pool, *rows, topk, False, 1 << 20, provider="triton")
    check(run(args), args)
    assert found[0][1].tolist() == [True] * 24 + [False] * 6


def test_other_selections_are_left_alone(forced, found):
    """A selection that has fewer lanes than K, but not the first tokens in order, is the sparse path's."""
    args = setup([12], [20], "fp32", 40)
    topk, count = args[3], args[4]
    topk[0, [3, 4]] = topk[0, [4, 3]]  # another order
    count[1] = 5  # a window of the first
    topk[2, :9] = topk[2, :9].flip(0)
    topk[3, 7] = -1  # a token left out
    topk[4, 7] = args[5][0, 1] * PAGE  # another token
    topk[5, 7] += PAGE * PAGES * 8  # outside the pool
    topk[6, 24] = 0  # its last lane is 26
    check(run(args), args)
    assert found[0][1].tolist() == [False, True, *[False] * 5, *[True] * 5]


def test_requests_that_do_not_repay_stay_sparse(short, found, monkeypatch):
    """30 tokens that one row attends are not worth expanding, 60 that 50 rows attend are."""
    monkeypatch.setattr(short, "ATTENTION_COST", 0.0)
    monkeypatch.setattr(short, "EXPANSION_COST", 0.25)  # about 9 rows repay a token
    monkeypatch.setattr(short, "WAVES", 0.0)
    args = setup([1, 50], [29, 10], "fp32", 70)
    check(run(args), args)
    plan, dense = found[0]
    assert math.ceil(plan.spent / plan.saved) == 9 and plan.places == 2
    assert dense.tolist() == [False] + [True] * 50


def test_max_count(forced, found):
    """It bounds what rows attend, and a close bound lets all of them be dense."""
    args = setup([10, 5], [0, 100], "fp32")
    for most in (105, 64, 3, 0):
        check(run(args, max_count=most), args, most)
    assert [plan.limit for plan, _ in found] == [105, 64, 3]
    short_table = [*args[:5], args[5][:, :1].contiguous(), *args[6:]]
    check(run(short_table, max_count=105), short_table, 105)
    assert found[-1][0].limit == 64


def test_rows_longer_than_what_is_expanded(forced, short, found, monkeypatch):
    monkeypatch.setattr(short, "LONGEST", 32)
    args = setup([40], [10], "fp32")
    check(run(args), args)
    assert not found[0][0].everything and found[0][1].tolist() == [True] * 22 + [False] * 18


def test_what_is_asked_of_max_count():
    args = setup([3], [0], "fp32", 16)
    with pytest.raises(ValueError, match="max_count=5 is given along with topk"):
        run(args, max_count=5)
    args[3] = None
    with pytest.raises(ValueError, match="max_count=-1 is given below 0"):
        run(args, max_count=-1)


# ---- the host's choice -----------------------------------------------------------------------------------------------

V32, GLM5 = (128, 128, 64, 128, 512), (64, 192, 64, 256, 512)  # H, N, R, V, L


def plan_of(short, kernels, T, B, W, width, paged, dims=V32, budget=512 << 20):
    H, N, R, V, L = dims
    tile = kernels.tiling(N, R, V, torch.bfloat16)
    row = H * (2 * L + 4)
    return short.plan(T, (B, W), dims, width, paged, torch.bfloat16, torch.device("cpu"), tile, budget, row)


@pytest.mark.parametrize("dims", [V32, GLM5])
def test_plans_at_real_sizes(short, kernels, dims):
    of = lambda *args, **more: plan_of(short, kernels, *args, dims, **more)  # noqa: E731
    whole = of(2048, 1, 1024, 2048, True)
    assert whole.everything and (whole.heads, whole.tokens) == (dims[0], 2048)
    mixed = of(4096, 1, 1024, 2048, False)
    assert not mixed.everything and mixed.places == 1
    assert of(8 * 600, 8, 32, 2048, True).everything
    assert not of(8 * 600 + 64, 80, 32, 2048, True).everything  # decoding requests beside them
    assert of(64, 1, 32, 2048, True) is None  # few rows
    assert of(2048, 1, 1024, 2048, True, budget=1 << 20) is None  # no head fits
    assert of(4096, 1, 1024, 2048, False, budget=8 << 20).heads < dims[0]


def test_switched_off(short, kernels, monkeypatch):
    monkeypatch.setattr(short, "EXPANSION_COST", math.inf)
    assert plan_of(short, kernels, 2048, 1, 32, 2048, True) is None


def test_dims_that_are_not_worth_it_or_do_not_fit(short, kernels):
    assert plan_of(short, kernels, 10**5, 1, 32, 2048, True, dims=(8, 256, 64, 512, 256)) is None
    assert kernels.tiling(2048, 64, 2048, torch.bfloat16) is None
    assert kernels.tiling(128, 64, 128, torch.bfloat16)[:4] == (128, 128, 8, 2)
    assert [kernels.chunks(n) for n in (0, 20, 64, 192)] == [(16, 0), (16, 16), (64, 0), (128, 64)]


@pytest.mark.parametrize(("scale", "strided", "reason"), [(0.0, False, "above 0"), (0.1, True, "strides")])
def test_what_only_the_sparse_path_takes(forced, found, kernels, scale, strided, reason):
    args = setup([20], [0], "fp32")
    args[8] = scale
    if strided:
        args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert reason in kernels.refuses(args[0], args[7], args[0], scale)
    check(run(args), args)
    assert not found


# ---- real sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [V32, GLM5])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("K", [None, 2048])
def test_real_sizes(found, dims, pool_dtype, K):
    """Rows of a prefill from 0 past K, and of one after a prefix, against fp64 in a few rows of each."""
    H, N, R, V, L = dims
    extend, prefix = ([1200, 700], [0, 900]) if K is None else ([2300, 800], [0, 1200])
    args = setup(extend, prefix, (H, N, V, L, R, pool_dtype, torch.bfloat16), K, sinks=K is None, width=40)
    out = run(args, 512 << 20, 2048 if K is None else None)
    assert found[0][0].everything == (K is None) and found[0][1].sum() > 1500
    T = out.shape[0]
    some = torch.tensor([0, 1, 63, 64, 127, 128, 1000, 1199, 1200, T - 1, T // 2], device="cuda")
    few = [a[some] if i in (0, 1, 3, 4, 6) and a is not None else a for i, a in enumerate(args)]
    want = wanted(few)
    assert (out[some].double() - want).norm() / want.norm() < 4 * 2.0**-8
    assert out.isfinite().all() and torch.equal(run(args, 160 << 20, 2048 if K is None else None), out) == (K is None)


@pytest.mark.gpu
def test_peak_scratch(found):
    H, N, R, V, L = V32
    args = setup([2300], [0], (H, N, V, L, R, torch.bfloat16, torch.bfloat16), 2048, width=40)
    for budget in (40 << 20, 200 << 20, 512 << 20):
        run(args, budget)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run(args, budget)
        assert torch.cuda.max_memory_allocated() - before <= budget + out.nbytes
    assert len(found) == 6

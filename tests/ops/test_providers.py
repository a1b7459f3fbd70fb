"""Providers around libraries: what they refuse, what they do around a library, and their first calls.

On a CPU the libraries are stand-ins (fake_libraries.py); over the libraries themselves run the tests of the ops.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from compiled_dsa.custom_ops import INDEX_TOPK_DECODE, INDEX_TOPK_PREFILL, MLA_PREFILL, OPS, SPARSE_MLA_DECODE, Op
from compiled_dsa.custom_ops.layout import FP8, PAGE, latent_pool_shape, split_latent_pool
from compiled_dsa.custom_ops.providers import common
from compiled_dsa.testing import (
    attention_oracle,
    attention_tolerance,
    check_topk,
    index_scores_oracle,
    poisoned,
    random_index_pool,
    random_latent_pool,
    random_page_table,
)
from tests.ops.provider_cases import cpu_only, fakes, index_arguments, run_index

__all__ = ["fakes"]  # a fixture


@cpu_only
@pytest.mark.parametrize("provider", ["deep_gemm", "flashinfer", "torch"])
@pytest.mark.parametrize("shape", ["decode", "prefill", "prefill in slices"])
def test_choices_are_right(fakes, provider, shape):
    deterministic = provider != "torch"
    budget = {"decode": None, "prefill": 1 << 20, "prefill in slices": 44_100 if provider == "deep_gemm" else 3000}
    args = index_arguments(deterministic=deterministic, budget=budget[shape])
    chosen = run_index(INDEX_TOPK_DECODE if shape == "decode" else INDEX_TOPK_PREFILL, provider, args)
    if deterministic:
        want = torch.empty_like(chosen)
        INDEX_TOPK_DECODE.reference(*args[:6], want, True)
        assert torch.equal(chosen, want)


@cpu_only
@pytest.mark.parametrize("provider", ["deep_gemm", "flashinfer", "torch"])
@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_positions_and_tokens_that_are_always_chosen(fakes, provider, budget):
    op = INDEX_TOPK_DECODE if budget is None else INDEX_TOPK_PREFILL
    args = index_arguments(deterministic=provider != "torch", budget=budget)
    forced = (0, 0) if provider == "deep_gemm" else (6, 3)
    chosen, where = args[6], torch.empty_like(args[6])
    op.overload(*args, where, *forced, provider=provider)
    want, want_where = torch.empty_like(chosen), torch.empty_like(chosen)
    INDEX_TOPK_DECODE.reference(*args[:6], want, True, 0, want_where, *forced)
    if provider == "torch":  # which of several equal scores is open
        pages = args[3][args[4].long()[:, None], where.clamp(min=0).long() // PAGE]
        assert torch.equal(torch.where(where < 0, -1, pages * PAGE + where % PAGE), chosen)
        assert {*range(6), 187, 188, 189} <= set(where[0].tolist())
    else:
        assert torch.equal(where, want_where) and torch.equal(chosen, want)
    if provider == "deep_gemm":
        assert "its scores know no tokens always chosen" in op.refusal(provider, *args, None, 1, 0)


@cpu_only
@pytest.mark.parametrize("provider", ["flashinfer", "torch"])
def test_infinities_and_nan(fakes, provider):
    """-inf is chosen where there is nothing better, NaN never: fp32 scores 0 but for a few."""
    pool = torch.zeros(3, PAGE, 32)
    values = torch.full((192,), torch.inf)
    values[20:150] = torch.nan
    pool[:, :, 0] = values.view(3, PAGE)
    q = torch.zeros(1, 1, 32)
    q[..., 0] = 1.0
    one = torch.ones(1, dtype=torch.int32)
    for sign in (1.0, -1.0):
        out = poisoned(1, 100, dtype=torch.int32, device="cpu")
        table = torch.arange(3, dtype=torch.int32)[None]
        args = (q, torch.full((1, 1), sign), pool, table, one * 0, one * 192, out, False)
        INDEX_TOPK_DECODE.overload(*args, provider=provider)
        assert sorted(out[0, :62].tolist()) == [*range(20), *range(150, 192)] and (out[0, 62:] == -1).all()


@cpu_only
@pytest.mark.parametrize("K", [1, 192, 250])
def test_rows_of_few_keys_need_no_scores(fakes, K):
    for provider in ("deep_gemm", "flashinfer", "torch"):
        run_index(INDEX_TOPK_DECODE, provider, index_arguments(K=K))


def attention_arguments(H, dtype, K=70, sinks=True, R=64, device="cpu"):
    """Lanes past the counts and some within them are no slots; one row has no key, one a count above K."""
    pool = random_latent_pool(5, 512, R, dtype, device)
    if dtype == FP8:
        split_latent_pool(pool, 512, R)[0].view(torch.uint8)[0, 0] = 0x7F  # NaN, in a slot that nothing attends
    q_latent, q_rope = (torch.randn(4, H, n, device=device).bfloat16() for n in (512, R))
    topk = (torch.stack([torch.randperm(5 * PAGE - 1, device=device)[:K] for _ in range(4)]) + 1).int()
    topk[:, 3], topk[0, 5], topk[1, 9:] = -9, 5 * PAGE, 2**31 - 1
    count = torch.tensor([K, 9, -1, K + 30], dtype=torch.int32, device=device)
    table = random_page_table(2, 2, 5, device)
    requests = torch.zeros(4, dtype=torch.int32, device=device)
    sink = torch.randn(H, device=device) if sinks else None
    return [q_latent, q_rope, pool, topk, count, table, requests, (512 + R) ** -0.5, sink]


@cpu_only
@pytest.mark.parametrize(("H", "dtype", "R"), [(16, FP8, 64), (64, torch.bfloat16, 64), (3, torch.bfloat16, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_sparse_mla_decode_of_flash_mla(fakes, H, dtype, R, sinks):
    args = attention_arguments(H, dtype, sinks=sinks, R=R)
    buffer = poisoned(H + 2, 4, 512, dtype=torch.bfloat16, device="cpu")
    out, lse = buffer[:H].transpose(0, 1), poisoned(4, H, dtype=torch.float32, device="cpu")
    SPARSE_MLA_DECODE.overload(*args, out, lse, provider="flash_mla")
    want, want_lse = attention_oracle(*args)
    atol, lse_atol = attention_tolerance(*args[:3], args[7])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_atol)
    assert (lse[2] == -torch.inf).all() and (out[2] == 0).all() and buffer[H:].isnan().all()


@cpu_only
@pytest.mark.parametrize(("H", "dtype"), [(8, torch.bfloat16), (64, FP8)])
def test_mla_prefill_of_flash_mla(fakes, H, dtype):
    """Rows in slices, at the smallest budget that is not refused."""
    _, q_rope, pool, topk, count, table, requests, _, sinks = attention_arguments(H, dtype)
    q_nope, kv_b = torch.randn(4, H, 32).bfloat16(), (torch.randn(H, 72, 512) * 512**-0.5).bfloat16()
    args = (q_nope, q_rope, pool, topk, count, table, requests, kv_b, 0.1, sinks)
    out = poisoned(4, H, 40, dtype=torch.bfloat16, device="cpu")
    needed = int(MLA_PREFILL.refusal("flash_mla", *args, out, 1 << 17).split()[-2])
    with pytest.raises(ValueError, match=f"needs {needed} bytes"):
        MLA_PREFILL.overload(*args, out, needed - 1, provider="flash_mla")
    MLA_PREFILL.overload(*args, out, needed, provider="flash_mla")
    want = torch.empty_like(out)
    MLA_PREFILL.reference(*args, want, 1 << 30)
    assert (out.double() - want.double()).norm() / want.double().norm() < 0.02
    assert (out[2] == 0).all()


@cpu_only
def test_empty_pools(fakes):
    args = attention_arguments(64, torch.bfloat16)
    args[2] = torch.empty(latent_pool_shape(0, 512, 64, torch.bfloat16)[0], dtype=torch.bfloat16)
    out, lse = poisoned(4, 64, 512, dtype=torch.bfloat16, device="cpu"), torch.empty(4, 64)
    SPARSE_MLA_DECODE.overload(*args, out, lse, provider="flash_mla")
    assert (out == 0).all() and (lse == -torch.inf).all()
    for provider in ("deep_gemm", "flashinfer", "torch"):
        index = list(index_arguments())
        index[2] = index[2][:0]
        INDEX_TOPK_DECODE.overload(*index, provider=provider)
        assert (index[6] == -1).all()


@pytest.mark.parametrize(
    ("provider", "changes", "reason"),
    [
        ("deep_gemm", {"dtype": torch.bfloat16}, "the pool has dtype torch.bfloat16; it takes fp8 pools"),
        ("deep_gemm", {"HI": 16}, r"16 index heads of 64; it takes \(32, 64\) of \(64, 128\)"),
        ("deep_gemm", {"D": 32}, "32 index heads of 32"),
        ("deep_gemm", {"budget": 20_000}, "scratch_bytes=20000; the keys laid end to end and scores of one tile need"),
        ("flashinfer", {"K": 2049}, "topk_out has 2049 columns; its graph-safe .* at most 2048"),
        ("flashinfer", {"budget": 800}, "scratch_bytes=800; scores and chosen positions of one row need 1088 bytes"),
        ("torch", {"deterministic": True}, "torch.topk takes any of several equal scores"),
    ],
)
def test_what_providers_of_index_topk_refuse(fakes, provider, changes, reason):
    op = INDEX_TOPK_PREFILL if "budget" in changes else INDEX_TOPK_DECODE
    with pytest.raises(ValueError, match=f"{op.name}: no provider takes these arguments .{provider}: {reason}"):
        op.overload(*index_arguments(**changes), provider=provider)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((7, -0.1), "scale=-0.1 is not above 0"),
        ((3, None), "topk is None; it attends selected tokens only"),
        ((slice(0, 2), [torch.zeros(4, 8, n) for n in (512, 64)]), "dtype torch.float32; it takes bfloat16"),
        (
            (slice(0, 3), [torch.zeros(4, 8, n).bfloat16() for n in (128, 32)] + [torch.zeros(5, 64, 160).bfloat16()]),
            r"latents of 128\+32; it takes 512\+64",
        ),
        ((slice(0, 2), [torch.zeros(4, 144, n).bfloat16() for n in (512, 64)]), "144 heads; it takes 1 to 128"),
    ],
)
def test_what_flash_mla_refuses(fakes, change, reason):
    args = attention_arguments(8, FP8, sinks=False)
    args[change[0]] = change[1]
    out, lse = torch.empty_like(args[0]), torch.empty(args[0].shape[:2])
    with pytest.raises(ValueError, match=f"flash_mla: .*{reason}"):
        SPARSE_MLA_DECODE.overload(*args, out, lse, provider="flash_mla")


def test_flash_mla_promises_nothing_about_the_other_rows(fakes):
    args = attention_arguments(8, torch.bfloat16)
    reason = "deterministic=True; how it splits"
    out, lse = torch.empty_like(args[0]), torch.empty(4, 8)
    assert SPARSE_MLA_DECODE.refusal("flash_mla", *args, out, lse) is None
    assert reason in SPARSE_MLA_DECODE.refusal("flash_mla", *args, out, lse, True)
    q_nope, kv_b, values = (torch.zeros(*n).bfloat16() for n in ((4, 8, 32), (8, 72, 512), (4, 8, 40)))
    args = (q_nope, *args[1:7], kv_b, 0.1, args[8], values, 1 << 24, None)
    assert MLA_PREFILL.refusal("flash_mla", *args) is None
    assert reason in MLA_PREFILL.refusal("flash_mla", *args, True)


def test_flash_mla_refuses_what_was_seen_to_fault(fakes):
    args = [torch.cat([x] * 17) if i in (0, 1, 3, 4, 6) else x for i, x in enumerate(attention_arguments(8, FP8))]
    args[8] = None
    out, lse = torch.empty_like(args[0]), torch.empty(68, 8)
    assert "68 rows of 8 heads" in SPARSE_MLA_DECODE.refusal("flash_mla", *args, out, lse)


def test_versions(fakes, monkeypatch):
    monkeypatch.setattr(sys.modules["deep_gemm"], "__version__", "2.1.0")
    monkeypatch.setattr(sys.modules["flash_mla"], "has_legacy", lambda: False)
    monkeypatch.setattr(sys.modules["flashinfer"], "top_k_ragged_transform", lambda input, offsets, lengths, k: None)
    index = index_arguments()
    assert "version 2.1.0" in INDEX_TOPK_DECODE.refusal("deep_gemm", *index)
    assert "0.7.4 has no graph-safe" in INDEX_TOPK_DECODE.refusal("flashinfer", *index)
    args = attention_arguments(8, FP8, sinks=False)
    reason = SPARSE_MLA_DECODE.refusal("flash_mla", *args, torch.empty_like(args[0]), torch.empty(4, 8))
    assert "no kernels for Hopper behind use_legacy" in reason


def test_devices(monkeypatch):
    assert common.refuses_device(torch.empty(1)) == "needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    on_a_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    assert common.refuses_device(on_a_gpu) == "needs compute capability (9, 0), this device has (10, 0)"


def test_libraries_that_do_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ImportError, match="deep_gemm is in sgl-deep-gemm"):
        common.load("deep_gemm")

    def fails(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match="flash_mla is installed and does not load: undefined symbol"):
        common.load("flash_mla")


@cpu_only
@pytest.mark.parametrize("provider", ["deep_gemm", "flashinfer", "flash_mla"])
def test_first_calls_and_captures(fakes, provider, monkeypatch):
    """A first call inside a capture is an error that says what to do; after ``warmup`` the same call is captured."""
    if provider == "flash_mla":
        args = attention_arguments(64, FP8, sinks=False)
        op, args = SPARSE_MLA_DECODE, (*args, torch.empty_like(args[0]), torch.empty(4, 64))
    else:
        op, args = INDEX_TOPK_DECODE, index_arguments()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=rf"{provider} has work to do .*warmup\('{provider}', \*args\)"):
        op.overload(*args, provider=provider)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    op.warmup(provider, *args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    op.overload(*args, provider=provider)


def test_warmup_refuses_like_a_call_and_is_nothing_for_others():
    args = index_arguments()
    with pytest.raises(ValueError, match="torch: torch.topk takes any"):
        INDEX_TOPK_DECODE.warmup("torch", *args[:7], True)
    with pytest.raises(ValueError, match="no such provider"):
        INDEX_TOPK_DECODE.warmup("none", *args)
    INDEX_TOPK_DECODE.warmup(None, *args)
    assert (args[6] == 123456789).all()


def captured(op: Op, provider: str, args) -> torch.cuda.CUDAGraph:
    reason = op.refusal(provider, *args)
    if reason:
        pytest.skip(f"{provider}: {reason}")
    op.warmup(provider, *args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.overload(*args, provider=provider)
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["deep_gemm", "flashinfer", "torch"])
def test_replays_of_choices(provider):
    """Captured with lengths of 1, replayed with others: schedules and lengths are those of the replay."""
    table = random_page_table(4, 100, 401, "cuda")
    pool = random_index_pool(401, 128, FP8, "cuda")
    q, weights = torch.randn(4, 64, 128, device="cuda").to(FP8), torch.randn(4, 64, device="cuda")
    requests = torch.arange(4, dtype=torch.int32, device="cuda")
    visible, chosen = torch.ones_like(requests), poisoned(4, 2048, dtype=torch.int32, device="cuda")
    args = (q, weights, pool, table, requests, visible, chosen, False)
    graph = captured(INDEX_TOPK_DECODE, provider, args)
    for lengths in ([6400, 1, 70, 0], [2049, 6000, 2048, 5000], [0, 0, 0, 0]):
        visible.copy_(torch.tensor(lengths, dtype=torch.int32))
        chosen.fill_(123456789)
        graph.replay()
        check_topk(chosen, visible, *index_scores_oracle(q, weights, pool, table, requests, visible))


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "dtype"), [(16, FP8), (128, FP8), (64, torch.bfloat16)])
def test_replays_of_attention(H, dtype):
    args = attention_arguments(H, dtype, K=300, device="cuda")
    out = poisoned(4, H, 512, dtype=torch.bfloat16, device="cuda")
    lse = poisoned(4, H, dtype=torch.float32, device="cuda")
    graph = captured(SPARSE_MLA_DECODE, "flash_mla", (*args, out, lse))
    atol, lse_atol = attention_tolerance(*args[:3], args[7])
    for counts in ([1, 0, 70, 200], [300, 300, 300, 300], [0, 0, 0, 0]):
        args[4].copy_(torch.tensor(counts, dtype=torch.int32))
        for tensor in (out, lse):
            tensor.fill_(torch.nan)
        graph.replay()
        want, want_lse = attention_oracle(*args)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_atol)


def check_peak(op: Op, provider: str, args) -> None:
    """Temporary memory of a call within its budget, the last argument; blocks of it are rounded up a little."""
    reason = op.refusal(provider, *args)
    if reason:
        pytest.skip(f"{provider}: {reason}")
    op.warmup(provider, *args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op.overload(*args, provider=provider)
    assert torch.cuda.max_memory_allocated() - before <= args[-1] + (1 << 16)


@pytest.mark.gpu
def test_peak_scratch_of_deep_gemm():
    """2 MiB hold the keys of 8192 tokens and scores of 28 rows."""
    table = random_page_table(1, 128, 130, "cuda")
    pool = random_index_pool(130, 128, FP8, "cuda")
    q, weights = torch.randn(64, 64, 128, device="cuda").to(FP8), torch.randn(64, 64, device="cuda")
    visible = torch.arange(8129, 8193, dtype=torch.int32, device="cuda")
    chosen = poisoned(64, 2048, dtype=torch.int32, device="cuda")
    rows = (table, torch.zeros_like(visible), visible)
    check_peak(INDEX_TOPK_PREFILL, "deep_gemm", (q, weights, pool, *rows, chosen, False, 2 << 20))
    check_topk(chosen, visible, *index_scores_oracle(q, weights, pool, *rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_peak_scratch_of_flash_mla(dtype):
    """8 MiB hold a pool of 40 pages dequantised and 36 of 100 rows of 16 heads padded to 64."""
    T, H = 100, 16
    pool = random_latent_pool(40, 512, 64, dtype, "cuda")
    q_nope, q_rope = (torch.randn(T, H, n, device="cuda").bfloat16() for n in (128, 64))
    kv_b, out = (torch.randn(H, 256, 512, device="cuda") / 20).bfloat16(), torch.empty_like(q_nope)
    topk = torch.stack([torch.randperm(40 * PAGE, device="cuda")[:2048] for _ in range(T)]).int()
    count, requests = (torch.full((T,), n, dtype=torch.int32, device="cuda") for n in (2000, 0))
    args = (q_nope, q_rope, pool, topk, count, topk[:1, :1], requests, kv_b, 0.07, None)
    check_peak(MLA_PREFILL, "flash_mla", (*args, out, 8 << 20))
    want = torch.empty_like(out)
    MLA_PREFILL.reference(*args, want, 1 << 30)
    assert (out.double() - want.double()).norm() / want.double().norm() < 8 * 2.0**-8


def test_libraries_come_after_triton():
    for op in OPS.values():
        assert list(op.providers)[0] == "triton"

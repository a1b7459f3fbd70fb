"""examples/bench_ops.py without a GPU: its cases, the arguments that it makes, its records, table and plot."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.layout import PAGE, split_index_pool

ORIGIN = {"versions": {"torch": "2.11.0"}, "commit": "abc", "date": "2026-11-30"}
V32 = {"model": "deepseek_v32"}
BF16 = {"atol": 0.04, "rtol": 0.02}  # a sum of two products, of values up to about 4, each rounded


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    return importlib.import_module("bench_ops")


@pytest.fixture
def small(bench, monkeypatch):
    """The cases' module with sizes for a CPU."""
    cases = importlib.import_module("bench_cases")
    for name, value in {"DEVICE": "cpu", "K": 16, "rotations": lambda moved: 2, "SCRATCH_BYTES": 1 << 22}.items():
        monkeypatch.setattr(cases, name, value)
    monkeypatch.setattr(cases, "MODELS", {"deepseek_v32": (4, 8, 32, 32)})
    monkeypatch.setattr(cases, "HIDDEN", {"deepseek_v32": 64})
    return cases


def test_cases_cover_every_op_and_can_be_selected(bench):
    cases = bench.selected(None, quick=False)
    assert len({case.name for case in cases}) == len(cases)
    assert OPS.keys() <= {case.op for case in cases}
    assert OPS.keys() - {"mla_prefill"} <= {case.op for case in bench.selected(None, quick=True)}
    some = bench.selected("store_latents,heads=16", quick=False)
    assert {case.op for case in some} == {"store_latents", "sparse_mla_decode"} and len(some) == 7
    assert bench.selected("nothing", quick=False) == []


@pytest.mark.parametrize("number", [1, 4])
@torch.inference_mode()
def test_what_inductor_fuses_is_the_same_work(bench, monkeypatch, number):
    """But for ropes in bf16, which the composition rounds three times and our reference once."""
    torch.manual_seed(0)  # slots that differ
    cases, rows = importlib.import_module("bench_cases"), importlib.import_module("bench_rows")
    for module, name, value in ((cases, "DEVICE", "cpu"), (cases, "rotations", lambda moved: 1), (rows, "TOKENS", 512)):
        monkeypatch.setattr(module, name, value)
    work = rows.store_tokens(["reference"], rows=number, compiled=False)
    args, runs = work.inputs[0], work.runs
    runs["reference"](args)
    (latents, keys, q_lora), slots = (args[i].clone() for i in range(3)), args[12]
    for pool in args[:2]:
        pool.zero_()
    assert torch.equal(runs["inductor alone"](args)[0], q_lora)
    before_rope = cases.L + 4 * (cases.L // 128)
    ours, theirs = (pool.flatten(0, 1)[slots] for pool in (latents, args[0]))
    assert torch.equal(ours[:, :before_rope], theirs[:, :before_rope])
    torch.testing.assert_close(*(row[:, before_rope:].view(torch.bfloat16) for row in (ours, theirs)), **BF16)
    for kept, written in zip(split_index_pool(keys), split_index_pool(args[1]), strict=True):  # codes, scales
        where = slots // PAGE, slots % PAGE
        assert torch.equal(kept[where].view(torch.uint8), written[where].view(torch.uint8))
    work = rows.encode_queries(["reference"], "deepseek_v32", rows=number, compiled=False)
    args, runs = work.inputs[0], work.runs
    runs["reference"](args)
    q_rope = args[0].clone()
    codes, weights = runs["inductor alone"](args)
    torch.testing.assert_close(args[0], q_rope, **BF16)
    assert torch.equal(codes.view(torch.uint8), args[1].view(torch.uint8))
    assert torch.allclose(weights, args[2] * (64 * 128) ** -0.5)


@pytest.mark.parametrize(
    ("op", "make", "sizes"),
    [
        ("index_topk_decode", "bench_cases.index_decode", {**V32, "batch": 2, "context": 128}),
        ("index_topk_prefill", "bench_cases.index_prefill", {**V32, "rows": 8, "context": 128}),
        ("sparse_mla_decode", "bench_cases.attention_decode", {"pool": "fp8", "heads": 4, "batch": 2, "tokens": 128}),
        ("sparse_mla_decode", "bench_cases.attention_decode", {"pool": "bf16", "heads": 4, "batch": 2, "tokens": 128}),
        (
            "sparse_mla_decode",
            "bench_cases.attention_decode",
            {"pool": "fp8", "heads": 4, "batch": 2, "tokens": 128, "deterministic": True},
        ),
        ("mla_prefill", "bench_cases.mla_prefill", {**V32, "pool": "fp8", "rows": 8, "context": 128}),
        ("mla_prefill", "bench_cases.mla_prefill", {**V32, "pool": "fp8", "rows": 8, "context": 128, "tokens": 256}),
        ("mla_prefill", "bench_prefill.first_prefill", {**V32, "rows": 16, "start": 0}),
        ("mla_prefill", "bench_prefill.first_prefill", {**V32, "rows": 40, "start": 0}),
        ("store_latents", "bench_rows.store_latents", {"rows": 4}),
        ("store_index_keys", "bench_rows.store_index_keys", {"rows": 4}),
        ("store_tokens", "bench_rows.store_tokens", {"rows": 4}),
        ("encode_queries", "bench_rows.encode_queries", {**V32, "rows": 4}),
        ("select_and_absorb", "bench_rows.select_and_absorb", {**V32, "rows": 1}),
        ("skinny_linear", "bench_rows.skinny_linear", {**V32, "rows": 4}),
        ("unabsorb", "bench_rows.unabsorb", {**V32, "rows": 4}),
        ("batch_metadata", "bench_rows.batch_metadata", {}),
    ],
)
def test_arguments_are_valid(small, op, make, sizes):
    """And the reference runs on them; who does not take them is recorded with a reason."""
    module, name = make.split(".")
    work = getattr(importlib.import_module(module), name)([], **sizes)
    assert len(work.inputs) == 2 and work.limit_us > 0
    assert work.runs.keys() | work.not_run.keys() >= OPS[op].providers.keys()
    assert all(name.endswith("alone") for name in work.not_run.keys() - OPS[op].providers.keys())
    for args in work.inputs:
        OPS[op].overload(*args, provider="reference")


def test_rows_select_distinct_tokens(small):
    ids = small.random_ids(20, 64)
    assert ((ids >= 0) & (ids < 64)).all() and all(row.unique().numel() == small.K for row in ids)


@pytest.mark.parametrize("providers", [["triton"], ["triton", "torch"]])
def test_providers_can_be_chosen(small, providers):
    work = small.index_decode(providers, "deepseek_v32", 2, 128)
    assert work.runs.keys() | work.not_run.keys() == {*providers, "deep_gemm + flashinfer alone"}
    assert "is not among --providers" in work.not_run["deep_gemm + flashinfer alone"]


def test_records_are_kept_and_shown(bench, tmp_path):
    case = bench.selected("store_latents", quick=True)[0]
    work = bench.Work({}, [()], 4.22e6, (750e6, 0.0), True, {"flash_mla": "needs a CUDA device"})
    path = tmp_path / "ops.json"
    path.write_text(json.dumps([{"case": "older"}]))
    first = bench.record(case, work, {"triton": 2.0, "torch": 5.0}, ORIGIN)
    bench.keep(path, bench.record(case, work, {"triton": 9.0}, ORIGIN))
    records = bench.keep(path, first)
    assert json.loads(path.read_text()) == records == [{"case": "older"}, first]
    assert first["limit_us"] == 1.0 and first["ours_us"] == 2.0 and first["peers_us"] == {"torch": 5.0}
    assert first["not_run"] and first["commit"] == "abc" and first["sizes"] == {"op": "store_latents", "rows": 16}
    failed = bench.record(case, work, {"torch": 5.0}, ORIGIN)
    shown = bench.table([first, failed])
    cells = [list(column.cells) for column in shown.columns]
    assert cells[1:] == [["2.0", "-"], ["50%", "-"], ["2,110", "-"], ["375", "-"], ["torch 5.0 (2.50x)", "torch 5.0"]]


def test_plot(bench, tmp_path):
    case = bench.selected("store_latents", quick=True)[0]
    work = bench.Work({}, [()], 4.22e6)
    bench.plot([bench.record(case, work, {"triton": 2.0, "torch": 5.0}, ORIGIN)], str(tmp_path / "ops.png"))
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")


def test_needs_a_gpu(bench, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_ops.py", "--only", "nothing"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--only=nothing is part of no case" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["bench_ops.py", "--quick"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main()
    assert "torch sees no GPU" in capsys.readouterr().err

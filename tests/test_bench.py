"""``python -m compiled_dsa bench`` without a GPU: arguments, records, table and plot of stand-in measurements."""

import io
import json
import sys

import pytest
import torch
from rich.console import Console

from compiled_dsa.__main__ import main
from compiled_dsa.benchmark.cases import COMPOSITION, case_limits, selected
from compiled_dsa.benchmark.plots import plot
from compiled_dsa.benchmark.records import Measured, record, table
from compiled_dsa.benchmark.reference import Accuracy
from compiled_dsa.benchmark.timing import Launch
from compiled_dsa.cli import bench

ORIGIN = {"versions": {"torch": "2.11.0"}, "commit": "abc", "date": "2026-11-30"}


class StandIn:
    """Measures nothing: ours takes 150 us, of the composition 200; the second case fails."""

    def __init__(self, *args, **kwargs):
        self.measured = 0

    def measure(self, case) -> Measured:
        self.measured += 1
        if self.measured == 2:
            return Measured(not_run={case.modes[0]: "RuntimeError: misaligned address"})
        return Measured(
            modes_us={case.modes[0]: 150.0},
            peers_us={COMPOSITION: 200.0},
            accuracy={case.modes[0]: Accuracy(0.025, 0.978), COMPOSITION: Accuracy(0.026, 0.977)},
            host_us={case.modes[0]: 40.0},
            launches={case.modes[0]: [Launch("gemm", 5.0), Launch("gemm", 6.0), Launch("norm", 1.0)]},
            not_run={"hf_sdpa": "out of memory"},
            notes={"tokens_per_s": 1000.0} if case.level == "model" else {},
        )


def records(model: str = "deepseek_v32") -> list[dict]:
    stand_in = StandIn()
    return [record(case, case_limits(case), stand_in.measure(case), ORIGIN) for case in selected(model)]


def test_record():
    first = records()[0]
    assert first["ours_us"] == 150.0 and first["peers_us"] == {COMPOSITION: 200.0} and first["ours_mode"] == "full"
    assert first["kernels"] == {"full": 3} and first["launches"] == {
        "full": {"gemm": {"launches": 2, "us": 11.0}, "norm": {"launches": 1, "us": 1.0}}
    }
    assert first["accuracy"]["full"] == {"error": 0.025, "overlap": 0.978}
    assert first["byte_floor_us"] == pytest.approx(95.9, abs=0.1) and first["limit_us"] <= first["stage_floor_us"]
    assert first["sizes"]["context"] == 8192 and first["commit"] == "abc"
    assert json.loads(json.dumps(first)) == first


def test_table():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(records()))
    text = console.export_text()
    for part in (
        "full 150.0; 3 launches; error 2.5e-02, keys 0.978",
        "composition 200.0 (1.33x); error 2.6e-02, keys 0.977",
        "hf_sdpa not run: out of memory",
        "misaligned address",
        "1,000 tokens/s",
        "64%",
    ):
        assert part in text


def test_plot(tmp_path):
    plot([*records(), {"case": "of another program", "ours_us": 1.0}], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    plot([], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


def test_list(capsys):
    main(["bench", "--list", "--model", "glm_moe_dsa", "--only", "B=128,rows=8192"])
    assert capsys.readouterr().out.splitlines() == [
        "glm_moe_dsa layer prefill rows=8192 ctx=8192",
        "glm_moe_dsa layer decode B=128 ctx=32768",
        "glm_moe_dsa layer decode B=128 ctx=8192",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: torch sees no GPU"),
        (["--only", "nothing"], "--only=nothing is part of no case; --list prints them"),
        (["--model", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_refusals(options, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and message in errors
    if not options:
        assert len(errors.splitlines()) == 1


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "Bench", StandIn)
    monkeypatch.setattr(bench, "provenance", lambda commit: {**ORIGIN, "commit": commit})


def test_needs_matplotlib_before_anything_is_measured(on_gpu, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--plot", "x.png"])
    assert ended.value.code == 2 and "--plot needs matplotlib" in capsys.readouterr().err


def test_run(on_gpu, tmp_path, capsys):
    """Records are kept beside those of other cases; a failure of ours is the exit status."""
    file, picture = tmp_path / "layer.json", tmp_path / "layer.png"
    file.write_text(json.dumps([{"case": "older"}]))
    only = ["--only", "layer decode B=1 ctx=8192"]
    main(["bench", "--model", "glm_moe_dsa", "--json", str(file), *only])
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--quick", "--json", str(file), "--plot", str(picture), "--commit", "def"])
    assert ended.value.code == 1 and picture.exists()
    kept = json.loads(file.read_text())
    names = [r["case"].split()[0] for r in kept]
    assert names == ["older", "glm_moe_dsa", "deepseek_v32", "deepseek_v32"]
    assert kept[-2]["ours_us"] == 150.0 and kept[-2]["commit"] == "def" and kept[-1]["ours_us"] is None
    out = capsys.readouterr()
    assert "layer decode B=1 ctx=8192: full 150.0 us, composition 200.0 us" in out.out
    assert "hf_sdpa not run: out of memory" in out.out
    assert "failed: deepseek_v32 layer prefill rows=4096 ctx=4096, breakable" in out.err

"""``python -m compiled_dsa``."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from compiled_dsa.__main__ import main
from compiled_dsa.cli import overview
from compiled_dsa.custom_ops import OPS, Op

CPU = torch.device("cpu")


@pytest.mark.parametrize("pool", overview.POOL_DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_sample_arguments_are_valid(name, pool):
    OPS[name].overload(*overview.sample_arguments(name, overview.POOL_DTYPES[pool], CPU))


def test_first_provider_that_does_not_refuse_serves(monkeypatch):
    for module, reason in (("p_old", "needs capability 9.0"), ("p_new", None), ("p_last", None)):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(refuses=lambda *args, reason=reason: reason))
    providers = {"old": "p_old", "new": "p_new", "last": "p_last", "absent": "p_absent"}
    op = Op("fake", check=lambda *args: None, reference=lambda *args: None, providers=providers)
    absent = "cannot be imported: No module named 'p_absent'"
    others = {"reference": None, "old": "needs capability 9.0", "last": None, "absent": absent}
    assert overview.serving(op, (), torch.device("cuda")) == ("new", others)
    assert overview.serving(op, (), CPU)[0] == "reference"


def test_json(capsys):
    main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert {"deepseek_v32", "hy_v4"} <= set(report["models"])
    on_cpu = [row for row in report["ops"] if row["device"] == "cpu"]
    assert {(row["op"], row["pool"]) for row in on_cpu} == {(op, pool) for op in OPS for pool in overview.POOL_DTYPES}
    for row in on_cpu:
        assert row["provider"] == "reference"
        assert row["others"].keys() == OPS[row["op"]].providers.keys()
        assert row["graph"] == ("split" if OPS[row["op"]].split else "captured")


def test_text_names_every_op_version_and_reason(capsys):
    report = {
        "versions": {"torch": "2.13.0", "triton": None},
        "models": ["deepseek_v32"],
        "devices": [{"type": "cpu", "name": "x86_64"}, {"type": "cuda", "name": "H200", "capability": "9.0"}],
        "ops": [
            {
                "op": op,
                "graph": "split",
                "pool": "fp8",
                "device": "cuda",
                "provider": None,
                "others": {"lib": "too old"},
            }
            for op in OPS
        ],
        "elsewhere": {"fa3": "pages of one token"},
    }
    overview.show(report, overview.Console())
    text = capsys.readouterr().out
    for expected in (
        *OPS,
        "deepseek_v32",
        "2.13.0",
        "not installed",
        "H200, capability 9.0",
        "none",
        "lib",
        "too old",
        "fa3",
        "pages of one token",
    ):
        assert expected in text


@pytest.mark.gpu
def test_every_op_is_served_on_a_gpu(capsys):
    main(["--json"])
    rows = [row for row in json.loads(capsys.readouterr().out)["ops"] if row["device"] == "cuda"]
    assert rows
    assert [row for row in rows if row["provider"] is None] == []


def test_dump(tmp_path, capsys, fresh_dynamo):
    folder = tmp_path / "made" / "here"
    options = ["--model", "deepseek_v32", "--layers", "1", "--tokens", "1", "--device", "cpu"]  # the prefill alone
    main(["dump", "-o", str(folder), *options])
    text = capsys.readouterr().out
    assert f"report: {folder / 'index.html'}" in text and "graph breaks: 0" in text and "not seen" not in text
    page, markdown = (folder / "index.html").read_text(), (folder / "index.md").read_text()
    for op in ("index_topk_prefill", "mla_prefill", "store_latents", "store_index_keys"):
        assert op in page and op in markdown
    assert "3 pieces, 2 cuts" in text and "model.layers.0" in text
    assert "works through its rows within a scratch budget" in page  # why the first one cuts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "0"], "--layers=0; it must be at least 1"),
        (["--graphs", "none"], "invalid choice: 'none'"),
        (["-o", __file__], "nothing can be written there"),
    ],
)
def test_dump_refuses_before_anything_is_compiled(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["dump", "-o", str(tmp_path), "--device", "cpu", *options])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

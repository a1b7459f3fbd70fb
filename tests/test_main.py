"""``python -m compiled_dsa``."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from compiled_dsa import __main__ as cli
from compiled_dsa.custom_ops import OPS, Op

CPU = torch.device("cpu")


@pytest.mark.parametrize("pool", cli.POOL_DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_sample_arguments_are_valid(name, pool):
    OPS[name].overload(*cli.sample_arguments(name, cli.POOL_DTYPES[pool], CPU))


def test_first_provider_that_does_not_refuse_serves(monkeypatch):
    for module, reason in (("p_old", "needs capability 9.0"), ("p_new", None), ("p_last", None)):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(refuses=lambda *args, reason=reason: reason))
    providers = {"old": "p_old", "new": "p_new", "last": "p_last", "absent": "p_absent"}
    op = Op("fake", check=lambda *args: None, reference=lambda *args: None, providers=providers)
    absent = "cannot be imported: No module named 'p_absent'"
    others = {"reference": None, "old": "needs capability 9.0", "last": None, "absent": absent}
    assert cli.serving(op, (), "cuda") == ("new", others)
    assert cli.serving(op, (), "cpu")[0] == "reference"


def test_json(capsys):
    cli.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    on_cpu = [row for row in report["ops"] if row["device"] == "cpu"]
    assert {(row["op"], row["pool"]) for row in on_cpu} == {(op, pool) for op in OPS for pool in cli.POOL_DTYPES}
    for row in on_cpu:
        assert row["provider"] == "reference"
        assert row["others"].keys() == OPS[row["op"]].providers.keys()
        assert row["graph"] == ("split" if OPS[row["op"]].split else "captured")


def test_text_names_every_op_version_and_reason(capsys):
    report = {
        "versions": {"torch": "2.13.0", "triton": None},
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
    }
    cli.show(report, cli.Console())
    text = capsys.readouterr().out
    for expected in (*OPS, "2.13.0", "not installed", "H200, capability 9.0", "none", "lib", "too old"):
        assert expected in text


@pytest.mark.gpu
def test_every_op_is_served_on_a_gpu(capsys):
    cli.main(["--json"])
    rows = [row for row in json.loads(capsys.readouterr().out)["ops"] if row["device"] == "cuda"]
    assert rows
    assert [row for row in rows if row["provider"] is None] == []

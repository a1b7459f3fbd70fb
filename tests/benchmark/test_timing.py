"""Limits, provenance, records and, with stand-ins for CUDA's events, the clocks."""

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from compiled_dsa.benchmark import timing


def test_limit_is_the_larger_of_bytes_and_flop():
    assert timing.limit_us(4.22e6) == 1.0
    assert timing.limit_us(4.22e6, 750e6, 1275e6) == 2.0
    assert timing.limit_us(8.44e6, 750e6, 0.0) == 2.0


def test_rotations_read_more_than_a_cache_holds():
    assert timing.rotations(1e6) == 128
    assert timing.rotations(40e6) * 40e6 >= timing.ROTATED_BYTES
    assert timing.rotations(1e9) == 2 and timing.rotations(1e9, least=1) == 1


@pytest.fixture
def events(monkeypatch):
    """CUDA events of 1, 2, 3.. milliseconds, one after another."""
    durations = count(1)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, end):
            return float(next(durations))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_device_time_is_a_median_of_a_call(events):
    runs = []
    # 2 warm-ups are not looked at, then 1 to 5 ms, of 10 calls each
    assert timing.device_us(lambda: runs.append(1), calls=10, rounds=5) == 300.0
    assert len(runs) == 7


def test_device_time_ends_early(events):
    runs = []
    assert timing.device_us(lambda: runs.append(1), rounds=20, seconds=0.005, warm_ups=1) == 2000.0  # 1, 2, 3 ms
    assert len(runs) == 4


def test_host_time(events):
    assert 0 < timing.host_us(lambda: None, repeats=3) < 1e5


def test_timed_returns_what_was_made():
    result, seconds = timing.timed(lambda: 7)
    assert result == 7 and 0 <= seconds < 10


def test_launches_are_those_of_the_device_in_order():
    def event(name, start, device="CUDA", annotation=False):
        kind = getattr(torch.autograd.DeviceType, device)
        time_range = SimpleNamespace(start=start, elapsed_us=lambda: 1.5)
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation, time_range=time_range)

    events = [event("gemm", 2), event("cudaLaunchKernel", 0, "CPU"), event("norm", 1), event("step", 0, "CUDA", True)]
    assert timing.launched(events) == [("norm", 1.5), ("gemm", 1.5)]


def test_provenance(monkeypatch, tmp_path):
    found = timing.provenance()
    assert found["versions"]["torch"] == torch.__version__ and len(found["date"]) == 10
    monkeypatch.chdir(tmp_path)  # no checkout
    assert timing.provenance()["commit"] == "unknown" and timing.provenance("abc")["commit"] == "abc"
    monkeypatch.setattr(timing.shutil, "which", lambda name: None)  # no git
    assert timing.provenance()["commit"] == "unknown"


def test_a_record_takes_the_place_of_its_case(tmp_path):
    path = tmp_path / "results.json"
    for value in (1, 2):
        timing.keep(path, {"case": "a", "value": value})
        records = timing.keep(path, {"case": "b", "value": value})
    assert records == json.loads(path.read_text())
    assert [(r["case"], r["value"]) for r in records] == [("a", 2), ("b", 2)]
    assert timing.keep(None, {"case": "c"}) == [{"case": "c"}]


def test_all_records_have_the_same_fields(tmp_path):
    (record,) = timing.keep(tmp_path / "results.json", {"case": "a", "ours_us": 2.0})
    assert record == {"case": "a", "sizes": {}, "ours_us": 2.0, "peers_us": {}, "limit_us": None}


def test_records_of_other_commits_stay(tmp_path):
    path = tmp_path / "results.json"
    for commit, value in (("x", 1), ("y", 2), ("x", 3)):
        records = timing.keep(path, {"case": "a", "commit": commit, "value": value}, same=("case", "commit"))
    assert [(r["commit"], r["value"]) for r in records] == [("y", 2), ("x", 3)]

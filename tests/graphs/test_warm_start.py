"""A second process finds what the first one compiled; folders that do not fit are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_dsa.graphs import warm_start
from compiled_dsa.graphs.warm_start import ARTIFACTS, MADE_WITH, load_compiled, save_compiled

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, torch, compiled_dsa
folder, action = sys.argv[1:]
if action == "load":
    assert compiled_dsa.load_compiled(folder)["inductor"] == 1

def store(pool, latents, weight, rope, slots):  # no pointwise work: a C++ compiler would take most of the time
    torch.ops.compiled_dsa.store_latents(pool, latents @ weight, rope, slots)

pool = torch.zeros(2, 64, 6)
rows = torch.ones(3, 4), 2 * torch.eye(4), torch.ones(3, 2), torch.tensor([1, -1, 64])
torch.compile(store, fullgraph=True)(pool, *rows)
assert pool.sum() == 2 * (4 * 2 + 2)
hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
assert hits == (action == "load"), hits
if action == "save":
    assert compiled_dsa.save_compiled(folder)["inductor"] == 1
"""


def test_a_second_process_finds_the_code(tmp_path):
    for action in ("save", "load"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / action)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved"), action]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == [ARTIFACTS, MADE_WITH]


class Info:
    artifacts = {"inductor": ["a", "b"]}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder whose artifacts torch takes as they are."""
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", Info))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: content == b"artifacts" and Info)
    assert save_compiled(tmp_path / "new" / "folder") == {"inductor": 2}
    return tmp_path / "new" / "folder"


def test_counts_are_returned_and_a_save_replaces_the_one_before(saved, monkeypatch):
    assert load_compiled(str(saved)) == {"inductor": 2}
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"other", Info))
    save_compiled(saved)
    assert (saved / ARTIFACTS).read_bytes() == b"other"
    assert len(list(saved.iterdir())) == 2


def test_nothing_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    with pytest.raises(ValueError, match="nothing to save"):
        save_compiled(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("missing", [None, ARTIFACTS, MADE_WITH])
def test_missing_files(saved, missing):
    if missing is None:
        saved = saved / "elsewhere"
    else:
        (saved / missing).unlink()
    with pytest.raises(ValueError, match=r"save_compiled wrote nothing there \(.*" + (missing or MADE_WITH)):
        load_compiled(saved)


@pytest.mark.parametrize("what", ["torch", "triton", "python", "machine", "device capability"])
def test_other_versions_are_named(saved, what):
    about = json.loads((saved / MADE_WITH).read_text())
    about["made_with"][what] = "0.1"
    (saved / MADE_WITH).write_text(json.dumps(about))
    with pytest.raises(ValueError, match=rf"saved with {what} 0\.1 \(here .*\): compile"):
        load_compiled(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"xx", "Expecting value"),
        (b"", "Expecting value"),
        (b"\xff\xfe\xff", "decode"),
        (b"[]", "a list"),
        (b"{}", "made_with=None, sha256=None"),
        (b'{"made_with": [], "sha256": ""}', r"made_with=\[\]"),
        (b'{"made_with": {}, "sha256": 5}', "sha256=5"),
    ],
)
def test_damaged_description(saved, content, message):
    (saved / MADE_WITH).write_bytes(content)
    with pytest.raises(ValueError, match=rf"folder='.*'; {MADE_WITH} is not what save_compiled wrote \(.*{message}"):
        load_compiled(saved)


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_in_place_of_the_folder(saved, below):
    file = saved / ARTIFACTS
    with pytest.raises(ValueError, match=f"folder='.*'; it must be a folder, .*{ARTIFACTS}.* is a file"):
        save_compiled(file / below)
    with pytest.raises(ValueError, match="save_compiled wrote nothing there"):
        load_compiled(file / below)
    assert file.read_bytes() == b"artifacts"


def test_damaged_artifacts(saved, monkeypatch):
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: None)
    with pytest.raises(ValueError, match="torch cannot read"):
        load_compiled(saved)
    (saved / ARTIFACTS).write_bytes(b"artif")
    with pytest.raises(ValueError, match="is not the file that was saved"):
        load_compiled(saved)


def test_a_write_that_fails_leaves_the_file_before_it(saved, monkeypatch):
    def fails(*args):
        raise OSError("disk full")

    monkeypatch.setattr(warm_start.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        save_compiled(saved)
    monkeypatch.undo()
    assert (saved / ARTIFACTS).read_bytes() == b"artifacts"
    assert len(list(saved.iterdir())) == 2

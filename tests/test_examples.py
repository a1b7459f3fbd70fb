"""The shorter examples run; examples/generate.py, which takes minutes, runs in CI."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # where the package is not installed
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_inspect_graph():
    text = run("examples/inspect_graph.py", "--backend", "eager", "--device", "cpu")
    for part in ("piece_0", "cut_1", "piece_2", "cut_3", "piece_4", "cut_5", "piece_6"):
        assert part in text
    assert "cuts: compiled_dsa::index_topk_prefill, compiled_dsa::mla_prefill, mine::fetch_rows" in text
    assert "compiles: 1," in text and "from eager code: 0.0e+00" in text

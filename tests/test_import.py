"""``import compiled_dsa`` is light, registers the ops, and the arrows between the folders hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LIGHT = """
import sys, torch
before = set(sys.modules)
import compiled_dsa
brought = set(sys.modules) - before
lazy = {name for name in brought if name.startswith(("compiled_dsa.huggingface", "compiled_dsa.custom_ops.kernels"))}
foreign = {name.split(".")[0] for name in brought} - {"compiled_dsa", "torch", *sys.stdlib_module_names}
sys.exit(f"import compiled_dsa brings {sorted(lazy | foreign)}" if lazy | foreign else 0)
"""

COMPILE_FIRST = """
import torch, compiled_dsa

@torch.compile(fullgraph=True)
def store(pool, latents, rope, slots):
    torch.ops.compiled_dsa.store_latents(pool, latents * 2, rope, slots)

pool = torch.zeros(2, 64, 6)
latents, rope = torch.ones(3, 4), torch.full((3, 2), 5.0)
store(pool, latents, rope, torch.tensor([1, -1, 64]))
written = torch.tensor([2.0, 2, 2, 2, 5, 5])
assert torch.equal(pool[0, 1], written) and torch.equal(pool[1, 0], written) and pool.sum() == 2 * written.sum()
"""


@pytest.mark.parametrize("program", [LIGHT, COMPILE_FIRST], ids=["light", "compile_first"])
def test_fresh_interpreter(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imports(folder: Path) -> set[tuple[str, str]]:
    """(file, imported module) of every import statement below a folder."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {(str(file.relative_to(ROOT)), alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((str(file.relative_to(ROOT)), node.module or ""))
    return found


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("custom_ops", ("compiled_dsa.custom_ops",)),
        ("graphs", ("compiled_dsa.graphs", "compiled_dsa.custom_ops")),
    ],
)
def test_arrows(folder, allowed):
    ours = {(file, name) for file, name in imports(ROOT / folder) if name.startswith("compiled_dsa")}
    assert {(file, name) for file, name in ours if not name.startswith(allowed)} == set()


def test_only_the_adapter_imports_transformers():
    everywhere = set().union(*(imports(ROOT / folder) for folder in ("compiled_dsa", "custom_ops", "graphs")))
    files = {file for file, name in everywhere if name.split(".")[0] == "transformers"}
    assert {file for file in files if not file.startswith("compiled_dsa/huggingface/")} == set()

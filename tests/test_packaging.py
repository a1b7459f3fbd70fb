"""The tree, the installed packages and the documented commands say the same."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]
LINKS = ("custom_ops", "graphs")
SHIPPED = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "compiled_dsa", *LINKS)


def python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=cwd, env=os.environ | env, capture_output=True, text=True)


def python_folders(folder: Path) -> set[str]:
    """Dotted names of ``folder`` and all below it that hold Python files, links followed."""
    names = {".".join(folder.relative_to(ROOT).parts)} if any(folder.glob("*.py")) else set()
    return names.union(*(python_folders(f) for f in folder.iterdir() if f.is_dir()))


def copy_tree(to: Path, with_links: bool = True) -> Path:
    """The files that a distribution is made of; without links, as archives of some hosts and systems have them."""
    to.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    if not with_links:
        for name in LINKS:
            (to / "compiled_dsa" / name).unlink()
    return to


def build(tree: Path, out: Path, *what: str) -> list[Path]:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", out, tree], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(out.iterdir())


def python_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel made from an sdist, which ``build`` does when told nothing."""
    folder = tmp_path_factory.mktemp("build")
    wheel, sdist = build(copy_tree(folder / "tree"), folder / "dist")
    assert wheel.suffix == ".whl" and sdist.name.endswith(".tar.gz")
    return wheel


def test_package_list_is_what_is_on_disk():
    assert sorted(PACKAGES) == sorted(python_folders(ROOT / "compiled_dsa"))
    for package in PACKAGES:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package


@pytest.mark.parametrize("name", LINKS)
def test_link_is_relative_and_mapped(name):
    assert (ROOT / "compiled_dsa" / name).readlink() == Path("..", name)
    assert PYPROJECT["tool"]["setuptools"]["package-dir"][f"compiled_dsa.{name}"] == name


@pytest.mark.parametrize("name", LINKS)
def test_bare_name_is_refused(name):
    done = python("-c", f"import {name}", cwd=ROOT)
    assert f"ImportError: import compiled_dsa.{name}, not '{name}'" in done.stderr


def test_wheel_holds_the_tree_under_one_name(wheel):
    tree = {
        f"{package.replace('.', '/')}/{file.name}"
        for package in PACKAGES
        for file in (ROOT / package.replace(".", "/")).glob("*.py")
    }
    assert python_files(wheel) == tree | {"compiled_dsa/py.typed"}


@pytest.mark.parametrize("with_links", [True, False])
def test_wheel_from_a_checkout_is_the_same(wheel, tmp_path, with_links):
    (other,) = build(copy_tree(tmp_path / "tree", with_links), tmp_path / "dist", "--wheel")
    assert python_files(other) == python_files(wheel)


def test_wheel_works_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    done = python("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code = """import json, compiled_dsa.custom_ops, compiled_dsa.graphs, torch
torch.ops.compiled_dsa.store_latents
print(json.dumps([m.__file__ for m in (compiled_dsa, compiled_dsa.custom_ops, compiled_dsa.graphs)]))"""
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(site) for file in json.loads(done.stdout))


def test_ci_ends_with_the_test_command_of_the_readme():
    command = (ROOT / ".ci" / "run").read_text().rstrip().splitlines()[-1]
    assert command.endswith("pytest -n auto")
    assert command in (ROOT / "README.md").read_text().splitlines()

"""Compiled code kept between processes: torch's cache artifacts in a folder, beside what they were made with."""

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

ARTIFACTS, MADE_WITH = "artifacts.bin", "made_with.json"


def save_compiled(folder: str | os.PathLike) -> dict[str, int]:
    """Writes what torch.compile has compiled in this process, so that another process need not compile it again.

    These are the artifacts of ``torch.compiler.save_cache_artifacts``: Inductor's code, its Triton kernels, results of
    autotuning. Not among them are Dynamo's traces, CUDA graphs, what a C++ compiler makes for the CPU, and the kernels
    of custom ops, which Triton keeps in a cache folder of its own (``TRITON_CACHE_DIR``).

    Args:
        folder: created when missing; an earlier save in it is replaced, each file at once.

    Returns:
        Number of artifacts by kind.

    Raises:
        ValueError: nothing that can be kept was compiled in this process, or ``folder`` is a file.
    """
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise ValueError(
            "save_compiled: nothing to save; torch.compile has compiled nothing with Inductor in this process, "
            "or its caches are switched off"
        )
    content, info = saved
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"folder={str(folder)!r}; it must be a folder, {error.filename} is a file") from None
    about = {"made_with": _made_with(), "sha256": hashlib.sha256(content).hexdigest()}
    _replace(folder / ARTIFACTS, content)
    _replace(folder / MADE_WITH, json.dumps(about, indent=2).encode())
    return _counts(info)


def load_compiled(folder: str | os.PathLike) -> dict[str, int]:
    """Fills torch's caches from a folder that ``save_compiled`` wrote; call it before the first compile.

    Code that has changed since is compiled anew: torch finds an artifact by the content of the graph. Artifacts hold
    code and pickled objects: load only what you trust.

    Returns:
        Number of artifacts by kind.

    Raises:
        ValueError: nothing was saved in the folder, what was saved is damaged, or it was made with another Python,
            torch, Triton or kind of GPU; the message names what differs.
    """
    folder = Path(folder)
    try:
        about = (folder / MADE_WITH).read_bytes()
        content = (folder / ARTIFACTS).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"folder={str(folder)!r}; save_compiled wrote nothing there ({error.filename})") from None
    try:
        made_with, sha256 = _read(about)
    except ValueError as error:
        raise ValueError(f"folder={str(folder)!r}; {MADE_WITH} is not what save_compiled wrote ({error})") from None
    different = [
        f"{what} {made_with.get(what)} (here {value})"
        for what, value in _made_with().items()
        if made_with.get(what) != value
    ]
    if different:
        raise ValueError(f"folder={str(folder)!r}; saved with {', '.join(different)}: compile and save it here")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"folder={str(folder)!r}; {ARTIFACTS} is not the file that was saved with {MADE_WITH}")
    info = torch.compiler.load_cache_artifacts(content)
    if info is None:
        raise ValueError(f"folder={str(folder)!r}; torch cannot read {ARTIFACTS}")
    return _counts(info)


def _made_with() -> dict[str, Any]:
    """What artifacts depend on, in values that JSON gives back as they were."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    capability = list(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device capability": capability,
    }


def _read(content: bytes) -> tuple[dict[str, Any], str]:
    """What ``save_compiled`` wrote of artifacts: what they were made with, and their hash.

    Raises:
        ValueError: it did not write this.
    """
    about = json.loads(content)
    if not isinstance(about, dict):
        raise ValueError(f"a {type(about).__name__}")
    made_with, sha256 = about.get("made_with"), about.get("sha256")
    if not isinstance(made_with, dict) or not isinstance(sha256, str):
        raise ValueError(f"made_with={made_with!r}, sha256={sha256!r}")
    return made_with, sha256


def _counts(info: Any) -> dict[str, int]:
    return {kind: len(keys) for kind, keys in info.artifacts.items()}


def _replace(file: Path, content: bytes) -> None:
    """Writes a file at once: whoever reads it sees the old content or the new."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise

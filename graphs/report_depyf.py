"""Dynamo's bytecode as Python, by depyf where it is installed.

depyf's own ``prepare_debug`` runs the decompiled code in place of Dynamo's and patches torch while graphs are compiled:
a decompiler that fails there ends the run. Here it reads what is compiled once the run is over.
"""

import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def decompile_into(
    folder: Path, frames: Iterable[tuple[types.CodeType, dict[str, Any]]], notes: list[str]
) -> list[Path]:
    """Writes a file for each function compiled: its source, its guards and the code that Dynamo made of it.

    What goes wrong is a line of ``notes``. Returns the files written.
    """
    try:
        from depyf.explain.utils import DynamoOptimizationResult
    except ImportError as error:
        notes.append(f"no decompiled bytecode: depyf cannot be imported ({error})")
        return []
    written: list[Path] = []
    for code, its_globals in {id(code): (code, its_globals) for code, its_globals in frames}.values():
        try:
            source = DynamoOptimizationResult(code, None, its_globals).to_src()
        except Exception as error:  # depyf meets bytecode that it does not know in many ways
            notes.append(f"depyf could not decompile {code.co_name}: {type(error).__name__}: {error}")
            continue
        folder.mkdir(exist_ok=True)
        name = re.sub(r"\W", "_", code.co_name)
        path = folder / f"full_code_for_{name}_{len(written)}.py"
        path.write_text(source, encoding="utf-8")
        written.append(path)
    return written

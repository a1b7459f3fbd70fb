"""Clocks, peak rates and provenance of every benchmark here, and the file in which records are kept.

Times are medians of single runs between two CUDA events, in microseconds. A run that reads less than
``ROTATED_BYTES`` is given inputs that it takes in turn (``rotations``), so that L2 does not serve what memory would.
"""

import json
import math
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

BYTES_PER_US, BF16_FLOP_PER_US, FP8_FLOP_PER_US = 4.22e6, 750e6, 1275e6  # measured on an H200
ROTATED_BYTES = 150e6  # three times what an H200 keeps in L2
MOST_ROTATED = 128
ROUNDS, SECONDS = 20, 1.0  # of one measurement, whichever ends it first
DISTRIBUTIONS = ("torch", "triton", "transformers", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python")

Run = Callable[[], object]


# ---- limits ----------------------------------------------------------------------------------------------------------


def limit_us(moved: float, bf16_flop: float = 0.0, fp8_flop: float = 0.0) -> float:
    """The larger of the time of ``moved`` bytes and the time of the FLOP, at measured peak rates."""
    return max(moved / BYTES_PER_US, bf16_flop / BF16_FLOP_PER_US + fp8_flop / FP8_FLOP_PER_US)


def rotations(moved: float, least: int = 2) -> int:
    """Inputs that a run of ``moved`` bytes takes in turn, so that none is in L2 when its turn comes again."""
    return max(least, min(MOST_ROTATED, math.ceil(ROTATED_BYTES / moved)))


# ---- clocks ----------------------------------------------------------------------------------------------------------


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one run. The run comes twice before, since what first calls do cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def device_us(run: Run, *, calls: int = 1, rounds: int = ROUNDS, seconds: float = SECONDS, warm_ups: int = 2) -> float:
    """Median time between CUDA events around ``run``, divided by ``calls``, the calls that one run makes.

    The device is idle before each run, so that of a run without a graph the launches count too.
    """
    times: list[float] = []
    for repeat in range(rounds + warm_ups):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if repeat >= warm_ups:
            times.append(start.elapsed_time(end) * 1e3)
        if sum(times) > seconds * 1e6:
            break
    return statistics.median(times) / calls


def host_us(run: Run, repeats: int = 30) -> float:
    """Median time until ``run`` returns, the device idle before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What ``run`` returns, and the seconds until it and all its work on a GPU is done."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    sync()
    start = time.perf_counter()
    result = run()
    sync()
    return result, time.perf_counter() - start


class Launch(NamedTuple):
    """Something that ran on the device: a kernel, a copy or a fill."""

    name: str
    us: float


def launches(run: Run) -> list[Launch]:
    """All that one run starts on the device, in order, that of graphs too.

    Raises:
        RuntimeError: the profiler cannot run, or saw nothing, as without CUPTI.
    """
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = launched(profiler.events())
    if not found:
        raise RuntimeError("torch.profiler saw no work on the device")
    return found


def launched(events: Any) -> list[Launch]:
    """Of the events of a profile those that ran on the device, in order of their starts."""
    on_device = (e for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    device = [e for e in on_device if not getattr(e, "is_user_annotation", False)]
    return [Launch(e.name, e.time_range.elapsed_us()) for e in sorted(device, key=lambda e: e.time_range.start)]


# ---- records ---------------------------------------------------------------------------------------------------------


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def provenance(commit: str | None = None) -> dict:
    """What every record says of where it comes from: versions, GPU, commit and date.

    Args:
        commit: None: that of the checkout in the working folder, or "unknown".
    """
    command = ["git", "rev-parse", "--verify", "HEAD"]
    if commit is None and shutil.which("git"):
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    versions = {name: version(name) for name in DISTRIBUTIONS if version(name)}
    versions |= {"torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        versions["gpu"] = torch.cuda.get_device_name()
    else:
        versions["machine"] = platform.machine()
    return {
        "versions": versions,
        "commit": commit or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def keep(path: Path | None, new: dict, same: Sequence[str] = ("case",)) -> list[dict]:
    """Puts a record into the file, in place of one of the same case; returns all that it holds.

    Args:
        path: None: no file; the record alone is returned as it is.
        new: what it lacks of what all records have is written as empty: it has no sizes, or nothing was timed.
        same: keys in which a record must equal the new one for that to take its place.
    """
    if path is None:
        return [new]
    held = json.loads(path.read_text()) if path.exists() else []
    new = {"case": new["case"], "sizes": {}, "ours_us": None, "peers_us": {}, "limit_us": None} | new
    records = [r for r in held if any(r.get(key) != new[key] for key in same)] + [new]
    path.write_text(json.dumps(records, indent=1) + "\n")
    return records

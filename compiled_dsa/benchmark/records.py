"""Records of cases as they are written to a file, and the table that people read."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from compiled_dsa.benchmark.cases import MODEL, MODEL_LAYERS, BenchCase, Limits
from compiled_dsa.benchmark.reference import Accuracy
from compiled_dsa.benchmark.timing import Launch


@dataclass
class Measured:
    """What was found of one case. Times in microseconds.

    Attributes:
        modes_us, peers_us: name -> time.
        accuracy: name of a mode or peer -> its accuracy.
        host_us: name of a mode -> host time of a whole step, with copies into and out of static buffers.
        launches: name -> what one run starts on the device.
        not_run: name -> why there is no time.
        notes: further figures.
    """

    modes_us: dict[str, float] = field(default_factory=dict)
    peers_us: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    launches: dict[str, list[Launch]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def record(case: BenchCase, limits: Limits, measured: Measured, origin: dict) -> dict:
    """What is written of a case.

    ``ours_us`` is the time of the case's first mode, as the package runs it by default.

    Args:
        origin: versions, commit and date.
    """
    return {
        "case": case.name,
        "sizes": {
            "model": case.model,
            "layers": MODEL_LAYERS if case.level == MODEL else 1,
            "kind": case.kind,
            "batch": case.batch,
            "rows": case.tokens,
            "context": case.context,
            "dtype": "bfloat16 weights, fp8 latents and index keys",
        },
        "level": case.level,
        "ours_us": measured.modes_us.get(case.modes[0]),
        "ours_mode": case.modes[0],
        "modes_us": measured.modes_us,
        "peers_us": measured.peers_us,
        "limit_us": limits.limit,
        "byte_floor_us": limits.bytes,
        "stage_floor_us": limits.stages,
        "accuracy": {name: asdict(accuracy) for name, accuracy in measured.accuracy.items()},
        "host_us": measured.host_us,
        "kernels": {name: len(found) for name, found in measured.launches.items()},
        "launches": {name: _by_kernel(found) for name, found in measured.launches.items()},
        "not_run": measured.not_run,
        **measured.notes,
        **origin,
    }


def _by_kernel(launches: list[Launch]) -> dict[str, dict]:
    """Name -> number of launches and the time they took together, in order of the first launches."""
    kernels: dict[str, dict] = {}
    for name, us in launches:
        kernel = kernels.setdefault(name, {"launches": 0, "us": 0.0})
        kernel["launches"] += 1
        kernel["us"] += us
    return kernels


def _time(name: str, us: float, r: dict, count: bool = True) -> str:
    """A line: the time, launches and accuracy of a mode or peer."""
    parts = [f"{name} {us:,.1f}"]
    if name in r["peers_us"] and r["ours_us"]:
        parts[0] += f" ({us / r['ours_us']:.2f}x)"
    if name in r["kernels"]:
        parts.append(f"{r['kernels'][name]} launches")
    found = r["accuracy"].get(name)
    if found:
        parts.append(f"error {found['error']:.1e}, keys {found['overlap']:.3f}")
    return "; ".join(parts)


def table(records: list[dict]) -> Table:
    """Times in us; those of peers also as multiples of ours. Beside each its error against fp64 over the keys that it
    selected, and the share of the keys selected in fp64 that it selects."""
    result = Table(
        "case", "ours", "peers (x: times ours)", "floor: bytes, stages", "of stages", title="us", show_lines=True
    )
    for r in records:
        ours = "\n".join(_time(name, us, r) for name, us in r["modes_us"].items())
        peers = [_time(name, us, r) for name, us in r["peers_us"].items()]
        peers += [f"{name} not run: {reason}" for name, reason in r["not_run"].items()]
        share = f"{r['stage_floor_us'] / r['ours_us']:.0%}" if r["ours_us"] else "-"
        if r.get("tokens_per_s"):
            ours += f"\n{r['tokens_per_s']:,.0f} tokens/s"
        floors = f"{r['byte_floor_us']:,.0f}, {r['stage_floor_us']:,.0f}"
        result.add_row(r["case"], ours or "-", "\n".join(peers) or "-", floors, share)
    return result

"""Pictures of a results file of ``python -m compiled_dsa bench``."""

from pathlib import Path
from typing import Any

from compiled_dsa.batch import DECODE
from compiled_dsa.benchmark.cases import COMPOSITION, HF, LAYER

OURS = "ours"
NAMES = (OURS, COMPOSITION, *reversed(HF))


def plot(records: list[dict], path: Path) -> None:
    """Bars of every case, ours against its peers, over the stage floor; beside them, times of decode by context length.

    Records without a time of ours are left out.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in records if r.get("ours_us") and "stage_floor_us" in r]
    figure, (bars, lines) = pyplot.subplots(
        1, 2, figsize=(15, 2 + 0.45 * len(shown)), layout="constrained", width_ratios=(3, 2)
    )
    _bars(bars, shown)
    _by_context(lines, [r for r in shown if r["level"] == LAYER and r["sizes"]["kind"] == DECODE])
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _times(r: dict) -> dict[str, float]:
    return {OURS: r["ours_us"], **r["peers_us"]}


def _bars(axes: Any, records: list[dict]) -> None:
    names = [name for name in NAMES if any(name in _times(r) for r in records)]
    height = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        places = [place + i * height for place, r in enumerate(records) if name in _times(r)]
        lengths = [_times(r)[name] / r["stage_floor_us"] for r in records if name in _times(r)]
        axes.barh(places, lengths, height=height, label=name)
    axes.set_yticks([place + 0.4 for place in range(len(records))], [r["case"] for r in records], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time / stage floor")
    if names:
        axes.legend(fontsize=7)


def _by_context(axes: Any, records: list[dict]) -> None:
    """A line for each implementation and batch that has a time."""
    markers = {OURS: "o-", COMPOSITION: "s--"}
    for batch in sorted({r["sizes"]["batch"] for r in records}):
        of_batch = sorted((r for r in records if r["sizes"]["batch"] == batch), key=lambda r: r["sizes"]["context"])
        for name, marker in markers.items():
            points = [(r["sizes"]["context"], _times(r)[name]) for r in of_batch if name in _times(r)]
            if points:
                axes.plot(*zip(*points), marker, label=f"{name}, B={batch}", markersize=4)
        axes.plot(*zip(*[(r["sizes"]["context"], r["stage_floor_us"]) for r in of_batch]), "k.:", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of context (dotted: stage floor)")
    axes.set_ylabel("us of one decode step of one layer")
    axes.set_ylim(bottom=0)
    if records:
        axes.legend(fontsize=7)

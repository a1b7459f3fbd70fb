"""Every op by every provider that is installed, at real sizes on a GPU: times, bytes, FLOP, share of the limit.

    python examples/bench_ops.py --only sparse_mla_decode --json examples/results/h200-ops.json
    python examples/bench_ops.py --only index_topk_decode,heads=16 --providers triton,deep_gemm
    python examples/bench_ops.py --list

The file given with ``--json`` is written after every case and keeps the cases that were measured before, so a run may
be stopped, or made in pieces. The first call of flashinfer builds its kernels for minutes. What is measured, and what
the names of peers mean, is said in bench_cases.py.
"""

import argparse
import gc
from functools import partial
from pathlib import Path

import torch
from bench_cases import Case, Work, selected
from rich.console import Console
from rich.table import Table

from compiled_dsa.benchmark.timing import ROUNDS, captured, device_us, keep, provenance

OURS = "triton"
console = Console(soft_wrap=True, highlight=False)


# ---- time ------------------------------------------------------------------------------------------------------------


def once_each(work: Work, name: str) -> None:
    for args in work.inputs:
        work.runs[name](args)


def median_us(work: Work, name: str, rounds: int) -> float:
    """Median over rounds of the time of a call, each round one call on each element of the inputs."""
    run = partial(once_each, work, name)
    run()
    if work.captured and name not in work.uncaptured:
        run = captured(run).replay
    return device_us(run, calls=len(work.inputs), rounds=rounds)


def measure(case: Case, providers: list[str], rounds: int) -> tuple[Work, dict[str, float]]:
    """The work, and the time of each of its runs; one that fails is among the work's ``not_run``."""
    work, times = case.make(providers, **case.sizes), {}
    for name in list(work.runs):
        try:
            times[name] = median_us(work, name, rounds)
        except Exception as error:  # a library's failure is a result, and the other runs are measured
            if name == OURS:
                raise
            work.not_run[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return work, times


# ---- records ---------------------------------------------------------------------------------------------------------


def record(case: Case, work: Work, times: dict[str, float], origin: dict) -> dict:
    """What is written of a case; ``origin``: versions, commit and date."""
    return {
        "case": case.name,
        "sizes": {"op": case.op, **case.sizes},
        "ours_us": times.get(OURS),
        "peers_us": {name: us for name, us in times.items() if name != OURS},
        "limit_us": work.limit_us,
        "bytes": work.moved,
        "flop_bf16": work.flop[0],
        "flop_fp8": work.flop[1],
        "graph": "CUDA graph" if work.captured else "none",
        "not_run": work.not_run,
        **origin,
    }


def table(records: list[dict]) -> Table:
    """Times in us; those of peers also as multiples of ours."""
    result = Table("case", "triton", "of limit", "GB/s", "TFLOP/s", "peers")
    for r in records:
        ours, peers = r["ours_us"], r["peers_us"]
        if ours is None:
            result.add_row(r["case"], *("-",) * 4, "\n".join(f"{name} {us:,.1f}" for name, us in peers.items()))
            continue
        rates = (r["limit_us"] / ours, r["bytes"] / ours / 1e3, (r["flop_bf16"] + r["flop_fp8"]) / ours / 1e6)
        cells = (f"{rates[0]:.0%}", f"{rates[1]:,.0f}", f"{rates[2]:,.0f}")
        names = "\n".join(f"{name} {us:,.1f} ({us / ours:.2f}x)" for name, us in peers.items())
        result.add_row(r["case"], f"{ours:,.1f}", *cells, names)
    return result


def plot(records: list[dict], path: str) -> None:
    """Bars of times over the limit, ours and the peers' of each case.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [OURS, *dict.fromkeys(name for r in records for name in r["peers_us"])]
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.12 * len(records) * (len(names) + 1)), layout="constrained")
    for i, name in enumerate(names):
        times = [{OURS: r["ours_us"], **r["peers_us"]}.get(name) for r in records]
        bars = [(place, us / r["limit_us"]) for place, (r, us) in enumerate(zip(records, times)) if us]
        places, lengths = zip(*bars) if bars else ((), ())
        height = 0.8 / len(names)
        axes.barh([place + i * height for place in places], lengths, height=height, label=name)
    axes.set_yticks([place + 0.4 for place in range(len(records))], [r["case"] for r in records], fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time / limit of bytes and FLOP")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="comma-separated ops, or parts of the names of cases (see --list)")
    parser.add_argument("--providers", default="", help="comma-separated; only these and what they are parts of")
    parser.add_argument("--quick", action="store_true", help="few cases, 5 rounds each")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, measure nothing")
    parser.add_argument("--json", type=Path, help="write the records to this file after every case")
    parser.add_argument("--plot", help="draw the records (of the --json file, else of this run) into this PNG")
    parser.add_argument("--commit", help="the commit to record (default: that of the checkout)")
    args = parser.parse_args()
    chosen = selected(args.only, args.quick)
    if not chosen:
        parser.error(f"--only={args.only} is part of no case; --list prints them")
    if args.list:
        console.print("\n".join(case.name for case in chosen))
        return
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    if args.plot:
        try:
            import matplotlib  # noqa: F401 (asked for before anything is measured)
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    found = provenance(args.commit)
    records: list[dict] = []
    providers = [name for name in args.providers.split(",") if name]
    with torch.inference_mode():
        for case in chosen:
            work, times = measure(case, providers, 5 if args.quick else ROUNDS)
            new = record(case, work, times, found)
            del work
            gc.collect()
            torch.cuda.empty_cache()
            records.append(new)
            kept = keep(args.json, new) if args.json else records
            console.print(f"{case.name}: {', '.join(f'{name} {us:,.1f} us' for name, us in times.items())}")
            for name, reason in new["not_run"].items():
                console.print(f"  {name} not run: {reason}")
    console.print(table(records))
    if args.plot:
        plot(kept, args.plot)


if __name__ == "__main__":
    main()

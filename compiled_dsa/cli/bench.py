"""``python -m compiled_dsa bench``: a layer and a small model on a GPU, ours beside transformers and a composition of
public libraries, and beside what bytes and FLOP allow."""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from compiled_dsa.benchmark.cases import SIZES, BenchCase, case_limits, selected
from compiled_dsa.benchmark.measure import Bench
from compiled_dsa.benchmark.plots import plot
from compiled_dsa.benchmark.records import Measured, record, table
from compiled_dsa.benchmark.timing import keep, provenance

TOPK = ("auto", "flashinfer", "torch")


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m compiled_dsa``."""
    parser = commands.add_parser(
        "bench",
        help="time a layer and a small model on a GPU, beside transformers, a composition of libraries, and the limits",
        description="Needs a GPU. Errors are against fp64 over the keys that each implementation selected; keys are "
        "the share of those selected in fp64. Stopped runs keep what the --json file has.",
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="deepseek_v32")
    parser.add_argument("--only", metavar="PARTS", help="comma-separated parts of the names of cases (see --list)")
    parser.add_argument("--quick", action="store_true", help="few cases, without what takes long to compile")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, measure nothing")
    parser.add_argument("--json", dest="file", type=Path, metavar="FILE", help="write records there after every case")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the records (of --json, else of this run)")
    parser.add_argument(
        "--topk",
        choices=TOPK,
        default="auto",
        help="of the composition; auto: flashinfer where it is installed (its first call builds for minutes)",
    )
    parser.add_argument("--commit", help="the commit to record (default: that of the checkout)")
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with exit status 2 where nothing can be measured, and 1 when one of our own runs failed."""
    cases = selected(arguments.model, arguments.only, arguments.quick)
    if not cases:
        parser.error(f"--only={arguments.only} is part of no case; --list prints them")
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return
    if not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: error: torch sees no GPU\n")
    if arguments.plot:
        try:
            import matplotlib  # noqa: F401 (asked for before anything is measured)
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    console = Console(soft_wrap=True, highlight=False)
    with torch.inference_mode():
        bench = Bench(arguments.model, cases, topk=arguments.topk)
        new, kept = measure(bench, cases, arguments.file, provenance(arguments.commit), console)
    console.print(table(new))
    if arguments.plot:
        plot(kept, arguments.plot)
        console.print(f"plot: {arguments.plot}")
    failed = [f"{r['case']}, {m}" for r, case in zip(new, cases) for m in case.modes if m in r["not_run"]]
    if failed:
        parser.exit(1, f"{parser.prog}: failed: {'; '.join(failed)}\n")


def measure(
    bench: Bench, cases: list[BenchCase], file: Path | None, origin: dict, console: Console
) -> tuple[list[dict], list[dict]]:
    """(records of the cases, all that the file now holds). Each is printed, and written, as soon as it is there."""
    new: list[dict] = []
    kept: list[dict] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            measured = bench.measure(case)
            new.append(record(case, case_limits(case), measured, origin))
            kept = keep(file, new[-1]) if file else new
            console.print(summary(case, measured))
            progress.advance(task)
    return new, kept


def summary(case: BenchCase, measured: Measured) -> str:
    """A line of times, and one of reasons where something was not run."""
    times = {**measured.modes_us, **measured.peers_us}
    text = f"{case.name}: {', '.join(f'{name} {us:,.1f} us' for name, us in times.items()) or 'nothing was run'}"
    return "\n".join([text, *(f"  {name} not run: {reason}" for name, reason in measured.not_run.items())])

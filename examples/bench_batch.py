"""Time of the metadata of a step, in one launch against plain torch, on a GPU.

Run as ``python examples/bench_batch.py --json examples/results/h200-batch.json``. Torch is the op's own reference, as
eager calls and compiled into kernels by Inductor; all three are timed as replays of a CUDA graph, which is how a step
runs them, and the launch also as the eager call that fills the inputs of such a graph. A wrong result ends the run.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from compiled_dsa.benchmark.timing import captured, device_us, limit_us, provenance
from compiled_dsa.custom_ops import BATCH_METADATA
from compiled_dsa.custom_ops.layout import PAGE

CONTEXT = 65536  # tokens that a row of the page table has room for
CASES = [("decode", B, 1) for B in (1, 64, 512)] + [("verify", B, 4) for B in (1, 64, 512)]
CASES += [("prefill", 1, 16384), ("prefill", 64, 256), ("prefill", 512, 32)]
CALLS, REPEATS = 20, 50  # calls in a graph or between two events; measurements


def arguments(B: int, tokens: int) -> tuple:
    """Inputs and outputs of the op for B requests of about ``tokens`` rows, the sum known to the host."""
    q_len = torch.full((B,), tokens, device="cuda")
    if tokens > 4 and B > 1:  # ragged
        moved = torch.randint(0, tokens, (B // 2,), device="cuda")
        q_len[: B // 2] -= moved
        q_len[B // 2 :] += moved
    kv_len = q_len + torch.randint(0, CONTEXT - 2 * tokens, (B,), device="cuda")
    columns = CONTEXT // PAGE
    page_table = torch.randperm(B * columns, device="cuda").view(B, columns).int()
    sizes = (B * tokens, B * tokens, B * tokens, B * tokens, B + 1, B)
    dtypes = (torch.int32, torch.int64, torch.int32, torch.int32, torch.int32, torch.int32)
    filled = [torch.full((n,), -7, dtype=dtype, device="cuda") for n, dtype in zip(sizes, dtypes)]
    return q_len, kv_len, page_table, None, *filled


def calls_of(run: Callable[[], object]) -> Callable[[], None]:
    """CALLS calls of a launch of a few us, one of which the clock would not resolve."""

    def run_all() -> None:
        for _ in range(CALLS):
            run()

    return run_all


def median_us(run: Callable[[], None]) -> float:
    return device_us(run, calls=CALLS, rounds=REPEATS)


def measure(case: str, B: int, tokens: int, commit: str | None) -> dict:
    """One record of the results file. ``limit_us`` is the time of the bytes alone; a launch takes a few us."""
    ours, peer = BATCH_METADATA.overload, BATCH_METADATA.reference
    torch.manual_seed(0)
    torch._dynamo.reset()  # each case is compiled for its sizes
    args = arguments(B, tokens)
    want = [a.clone() for a in args[4:]]
    peer(*args[:4], *want)
    compiled = torch.compile(peer, fullgraph=True, dynamic=False)
    times = {}
    for name, call in (("ours", ours), ("torch", peer), ("torch_compiled", compiled)):
        for tensor in args[4:]:
            tensor.fill_(-7)
        replay = captured(calls_of(partial(call, *args))).replay
        replay()
        assert all(map(torch.equal, args[4:], want)), f"{name}, {case} {B} x {tokens}: differs from the reference"
        times[name] = median_us(replay)
    read = 2 * 8 * B + 4 * B * min(tokens, -(-tokens // PAGE) + 1)
    moved = read + sum(a.numel() * a.element_size() for a in args[4:])
    return {
        "case": f"batch_metadata {case} {B} x {tokens}",
        "sizes": {"requests": B, "rows": B * tokens, "page_table_columns": CONTEXT // PAGE},
        "ours_us": round(times.pop("ours"), 2),
        "peers_us": {name: round(us, 2) for name, us in times.items()},
        "limit_us": round(limit_us(moved), 4),
        "ours_eager_us": round(median_us(calls_of(partial(ours, *args))), 2),
        "torch_eager_us": round(median_us(calls_of(partial(peer, *args))), 2),
        **provenance(commit),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    parser.add_argument("--commit", help="commit that is measured, where there is no checkout")
    options = parser.parse_args()
    records = [measure(*case, options.commit) for case in CASES]
    table = Table("case", "ours", "torch", "torch, compiled", "ours, eager", "torch, eager", title="us a step")
    for r in records:
        figures = (r["ours_us"], *r["peers_us"].values(), r["ours_eager_us"], r["torch_eager_us"])
        table.add_row(r["case"], *(f"{us:.1f}" for us in figures))
    Console().print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()

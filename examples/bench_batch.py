"""Time of the metadata of a step, in one launch against plain torch, on a GPU.

Run as ``python examples/bench_batch.py --json examples/results/h200-batch.json``. Torch is the op's own reference, as
eager calls and compiled into kernels by Inductor; all three are timed as replays of a CUDA graph, which is how a step
runs them, and the launch also as the eager call that fills the inputs of such a graph. A wrong result ends the run.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from real_sizes import BYTES_PER_US, provenance
from rich.console import Console
from rich.table import Table

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


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A replay of CALLS calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            run()
    return graph.replay


def median_us(run: Callable[[], None]) -> float:
    """Median time of ``run`` divided by CALLS, in microseconds."""
    times = []
    for _ in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[3:])


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
        replay = captured(lambda call=call: call(*args))
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
        "limit_us": round(moved / BYTES_PER_US, 4),
        "ours_eager_us": round(median_us(lambda: [ours(*args) for _ in range(CALLS)]), 2),
        "torch_eager_us": round(median_us(lambda: [peer(*args) for _ in range(CALLS)]), 2),
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

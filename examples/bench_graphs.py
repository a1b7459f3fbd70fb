"""Graph runtimes at true attention sizes on a GPU: equality with the code that they captured, host time, memory.

    python examples/bench_graphs.py --model deepseek_v32 --json examples/results/h200-graphs.json

One compiled callable is run uncaptured, in full graphs, in breakable graphs, and (compiled in pieces) piecewise; then
torch's own mode="reduce-overhead" beside them. bf16 weights and latents, fp8 index keys, small MLPs.

The exit status is 1 when a replay is not bitwise equal to the code that it captured, when something compiles after the
warm-up, or when a difference from the eager model, or in what generate() returns, is beyond the bounds of
graph_judges.py. The record has these, and the numbers of exceptions within them.
"""

import argparse
import copy
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from graph_judges import ForcedSelections, RowFigures, faults, token_figures
from rich.console import Console
from rich.table import Table
from served_model import ServedModel
from torch.utils._pytree import tree_leaves

from compiled_dsa import Batch, PagePool, compile_model
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.benchmark.timing import device_us, host_us, provenance, timed
from compiled_dsa.benchmark.timing import keep as write_record
from compiled_dsa.compile import CompiledForward
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.graphs.buckets import Buckets
from compiled_dsa.graphs.buffers import Call
from compiled_dsa.graphs.capture import Break, Recording
from compiled_dsa.graphs.runner import GraphMemory, GraphRunner, Step
from compiled_dsa.huggingface import PagedCache
from compiled_dsa.huggingface.small_models import MODELS, SMALL, SMALL_MLP, model_config, random_model
from compiled_dsa.steps import Planner
from compiled_dsa.testing import random_index_pool, random_latent_pool

DEVICE = "cuda"
MAX_LEN, REQUESTS = 8192, 8
TWELVE_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SAME = ("case", "commit")  # of a record that further parts are added to; those of other commits stay
STEPS = {  # whose replays are compared: (kind, more keys than are selected?)
    f"{kind}, {'sparse' if sparse else 'k_only'}": (kind, sparse)
    for kind in (DECODE, PREFILL)
    for sparse in (True, False)
}
PARTS = ("time", "equality", "memory", "host_us_by_layers", "generate")
console = Console(soft_wrap=True, highlight=False)
batch_sizes = Buckets("batch_sizes", (4, REQUESTS))


def served(args, layers: int, **sizes) -> tuple[ServedModel, PagePool]:
    """A model and pools full of random keys; every request holds pages for MAX_LEN tokens."""
    config = model_config(args.model, layers, first_k_dense_replace=layers, **sizes)
    model = ServedModel(random_model(config, seed=0, device=DEVICE, dtype=torch.bfloat16, std=0.02))
    pages = REQUESTS * MAX_LEN // PAGE
    pool = model.make_pool(pages, REQUESTS, MAX_LEN, index_dtype=FP8)
    for layer, c in zip(pool.layers, model.configs):
        layer.latents.copy_(random_latent_pool(pages, c.kv_lora_rank, c.qk_rope_head_dim, torch.bfloat16, DEVICE))
        if layer.index_keys is not None:
            layer.index_keys.copy_(random_index_pool(pages, c.index_head_dim, FP8, DEVICE))
    return model, pool


def random_call(kind: str, sparse: bool, top_k: int, largest: int, generator: torch.Generator) -> tuple:
    """(ids, batch) of a random step over random pages: up to 8 requests, 2 or more decoding or 1 or more prefilling."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    longest = MAX_LEN if sparse else top_k
    if kind == DECODE:
        q_len = [1] * integer(2, REQUESTS)
    else:
        rows = integer(2, largest)
        cuts = sorted({0, rows, *(integer(1, rows - 1) for _ in range(integer(0, REQUESTS - 1)))})
        q_len = [b - a for a, b in zip(cuts, cuts[1:])]
    kv_len = [integer(n, longest) for n in q_len]
    pages = torch.randperm(REQUESTS * MAX_LEN // PAGE, generator=generator).int().view(REQUESTS, -1)[: len(q_len)]
    batch = Batch.from_lengths(
        torch.tensor(q_len, device=DEVICE),
        torch.tensor(kv_len, device=DEVICE),
        pages.to(DEVICE),
        sum(q_len),
        kind=kind,
        skip_scores=not sparse,
    )
    return torch.randint(1, 500, (sum(q_len),), generator=generator).to(DEVICE), batch


# ---- equality --------------------------------------------------------------------------------------------------------


def graph_runtimes(whole: CompiledForward, pieces: CompiledForward) -> dict[str, GraphRunner]:
    memory = GraphMemory()
    return {
        "full": GraphRunner(whole, cut=False, memory=memory),
        "breakable": GraphRunner(whole, cut=True, memory=memory),
        "piecewise": GraphRunner(pieces, cut=True, memory=memory),
    }


def check_equality(args, model: ServedModel, pool: PagePool) -> dict:
    """Replays against the same compiled code on the same buffers, bit for bit, and against the eager model on the keys
    that the replay selected."""
    forward = model.forward_and_selections
    whole, pieces = CompiledForward(forward), CompiledForward(forward, piecewise=True)
    runtimes = graph_runtimes(whole, pieces)

    def compiles() -> int:
        return whole.stats.compiles + pieces.stats.compiles

    planner = Planner(Buckets("token_sizes", (256, 512)), batch_sizes, MAX_LEN)
    top_k, figures = model.configs[0].index_topk, {}
    for name in args.steps:
        kind, sparse = STEPS[name]
        for size in (2, 5) if kind == DECODE else (512, 256):  # every bucket and compile before the counting starts
            generator = torch.Generator().manual_seed(size)
            for runner in runtimes.values():
                ids, batch = random_call(kind, sparse, top_k, size, generator)
                runner(planner.plan((ids, batch, pool), {})[1])
        warm = compiles()
        gc.collect()
        gc.freeze()  # what is alive now is not gone through again by each of the collections below
        generator, rows, unequal = torch.Generator().manual_seed(1), RowFigures(), 0
        for _ in range(args.batches):
            ids, batch = random_call(kind, sparse, top_k, 512, generator)
            _, step = planner.plan((ids, batch, pool), {})
            replayed = [runner(step) for runner in runtimes.values()]
            litter()
            for runner, out in zip(runtimes.values(), replayed):
                unequal += not all(map(torch.equal, tree_leaves(out), tree_leaves(runner.rerun(step))))
            for logits, selections in replayed:
                with ForcedSelections(selections) as forced:
                    eager = model(ids, batch, pool)
                rows.add(logits, eager, forced.margins)
        figures[name] = {
            "batches": args.batches,
            "runtimes": list(runtimes),
            "replays_not_bitwise_equal": unequal,
            "compiles_after_warm_up": compiles() - warm,
            **rows.figures(),
        }
        console.print(f"equality, {name}: {figures[name]}")
    return figures


def litter() -> None:
    """Memory that was free is used for something else, and garbage is collected."""
    junk = [torch.empty(size, device=DEVICE).fill_(torch.nan) for size in (1 << 10, 1 << 18, 1 << 22)]
    del junk
    gc.collect()


# ---- host time -------------------------------------------------------------------------------------------------------


def without_ops(runner: GraphRunner, step: Step, rows: tuple[int, ...]) -> tuple[float, float, int]:
    """Host time of a replay whose split ops do nothing, of its graph launches alone, and the number of breaks.

    Args:
        rows: real rows of one replay after another.
    """
    captured = runner.captured(step, Call(step.args, step.kwargs, step.bucket))
    parts = captured.recording.parts
    breaks = [part for part in parts if isinstance(part, Break)]
    held = [part.padded for part in breaks]
    for part in breaks:
        part.padded = replace(part.padded, function=lambda *args: None)
    real_rows = itertools.cycle(rows)
    try:
        empty = host_us(lambda: captured.recording.replay(next(real_rows)))
    finally:
        for part, padded in zip(breaks, held):
            part.padded = padded
    launches = host_us(lambda: [part.replay() for part in parts if not isinstance(part, Break)])
    return empty, launches, len(breaks)


def measure_time(model, pool, compiled, runtimes: dict[str, GraphRunner], rows: int = 256) -> dict:
    """Host and device time of one decode step of 8 requests and one prefill of ``rows`` rows, by runtime."""
    planner = Planner(Buckets("token_sizes", (rows,)), batch_sizes, MAX_LEN)
    reduced = torch.compile(model.forward, fullgraph=True, mode="reduce-overhead")
    figures: dict = {}
    for kind, q_len in ((DECODE, [1] * REQUESTS), (PREFILL, [rows // 4] * 4)):
        pages = pool.page_table[: len(q_len)]
        lengths = torch.tensor(q_len, device=DEVICE), torch.full((len(q_len),), MAX_LEN, device=DEVICE)
        batch = Batch.from_lengths(*lengths, pages, sum(q_len), kind=kind)
        ids = torch.ones(sum(q_len), dtype=torch.int64, device=DEVICE)
        _, step = planner.plan((ids, batch, pool), {})
        ways = {
            "eager": lambda a=(ids, batch, pool): model(*a),
            "uncaptured": lambda a=(ids, batch, pool): compiled(*a),
        }
        ways |= {name: lambda r=runner, s=step: r(s) for name, runner in runtimes.items()}
        ways["reduce-overhead"] = lambda a=(ids, batch, pool): reduced(*a)
        figures[kind] = {}
        for name, run in ways.items():
            for _ in range(3):
                run()
            figures[kind][name] = {"host_us": host_us(run), "device_us": device_us(run)}
            console.print(f"time, {kind}, {name}: {figures[kind][name]}")
    for name in ("breakable", "piecewise"):
        for case, real in (("all rows real", (rows,)), ("padding changes", (rows - 1, rows - 2))):
            empty, launches, breaks = without_ops(runtimes[name], step, real)
            figures[PREFILL][name][f"host_us_per_break, {case}"] = (empty - launches) / breaks
        figures[PREFILL][name]["breaks"] = breaks
        console.print(f"breaks, {name}: {figures[PREFILL][name]}")
    return figures


def host_time_by_layers(args) -> dict[int, dict[str, float]]:
    """Host time of one full-graph decode step of stacks of small layers, and of it the launch of the graph.

    A graph of more kernels takes longer to launch; whatever else a step does must not take longer with more layers.
    Layers are not compiled: what a step does on the host is the same, and there are more kernels to launch.
    """
    steps, recordings = {}, {}
    for layers in (1, 4, 16):
        model, pool = served(args, layers, **SMALL)
        runner = GraphRunner(CompiledForward(model.forward, backend="eager"), cut=False)
        planner = Planner(Buckets("token_sizes", (256,)), batch_sizes, MAX_LEN)
        ids, batch = random_call(DECODE, True, 64, 0, torch.Generator().manual_seed(0))
        _, step = planner.plan((ids, batch, pool), {})
        runner(step)
        recordings[layers] = runner.captured(step, Call(step.args, step.kwargs, step.bucket)).recording
        steps[layers] = partial(runner, step)
    rounds = [{n: _step_and_launch(steps[n], recordings[n]) for n in steps} for _ in range(400)]  # taken in turn
    result = {}
    for layers in steps:
        whole, launch = (statistics.median(times[layers][i] for times in rounds) for i in range(2))
        beside = statistics.median(times[layers][0] - times[layers][1] for times in rounds)
        result[layers] = {"step": whole, "launch": launch, "beside the launch": beside}
    console.print(f"host us of a full decode step by layers: {result}")
    return result


def _step_and_launch(step: Callable[[], object], recording: Recording) -> tuple[float, float]:
    """Host us of a step on an idle device, and of the launch of its one graph therein."""
    seconds = []
    (graph,) = recording.parts

    class Clocked:
        def replay(self) -> None:
            start = time.perf_counter()
            graph.replay()
            seconds.append(time.perf_counter() - start)

    recording.parts[:] = [Clocked()]
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    whole = time.perf_counter() - start
    recording.parts[:] = [graph]
    return whole * 1e6, seconds[0] * 1e6


# ---- capture and memory ----------------------------------------------------------------------------------------------


def capture_buckets(compiled: CompiledForward, model: ServedModel, pool: PagePool) -> dict:
    """Capture seconds of 12 prefill buckets, largest first, and the pool they share."""
    memory = GraphMemory()
    runner = GraphRunner(compiled, cut=True, memory=memory)
    planner = Planner(Buckets("token_sizes", TWELVE_SIZES), batch_sizes, MAX_LEN)
    seconds, pool_bytes = {}, []
    for size in reversed(TWELVE_SIZES):
        batch = Batch.idle(size, REQUESTS, MAX_LEN // PAGE, DEVICE, kind=PREFILL, skip_scores=False)
        ids = torch.ones(size, dtype=torch.int64, device=DEVICE)
        step = planner.plan((ids, batch, pool), {})[1]
        _, seconds[size] = timed(partial(runner, step))
        pool_bytes.append(memory.bytes())
    figures = {"capture_seconds": seconds, "pool_bytes_largest": pool_bytes[0], "pool_bytes_12": pool_bytes[-1]}
    console.print(f"capture: {figures}")
    return figures


# ---- generate() ------------------------------------------------------------------------------------------------------


def generation(args, stock, prompt_tokens: int = 500, new: int = 64) -> dict:
    """generate() with graphs="auto" against "off": tokens that differ, the margins where they first do, tokens/s."""
    prompt = torch.randint(1, 500, (2, prompt_tokens), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    runs, speeds = {}, {}
    for graphs in ("off", "auto"):
        model = compile_model(copy.deepcopy(stock), graphs=graphs)
        seconds = []
        for count in (2, 1, new + 1, 1, new + 1):
            cache = PagedCache(model.config, 2, prompt_tokens + new + 1)
            options = {"do_sample": False, "max_new_tokens": count, "past_key_values": cache}
            generate = partial(model.generate, return_dict_in_generate=True, output_logits=True, **options)
            out, duration = timed(partial(generate, prompt))
            seconds.append(duration)
        runs[graphs], speeds[graphs] = out, 2 * new / (seconds[-1] - seconds[-2])
        stats = model.graph_stats()
        console.print(f"generate, {graphs}: {speeds[graphs]:.0f} tokens/s; {stats}")
    tokens = {name: out.sequences[:, prompt_tokens:] for name, out in runs.items()}
    figures = {
        **token_figures(tokens["off"], tokens["auto"], runs["off"].logits),
        "decode_tokens_per_s": speeds,
        "auto_stats": stats,
    }
    console.print(f"generate: {figures}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=50, help="random batches of each kind (default 50)")
    names = ", ".join(f'"{name}"' for name in STEPS)
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help=f"whose equality is checked: {names}"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--commit", help="with --json: the commit to record (default: that of the checkout)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    figures: dict = {"case": f"graphs of {args.layers} layers of {args.model}", **provenance(args.commit)}
    path = Path(args.json) if args.json else None
    if path is not None and path.exists():  # with the parts that the commit has
        figures = {k: v for r in json.loads(path.read_text()) if _same(r, figures) for k, v in r.items()} | figures

    def keep(name: str, value) -> None:  # written at once: a run that is stopped loses nothing
        figures[name] = value
        write_record(path, figures, SAME)

    with torch.inference_mode():
        model, pool = served(args, args.layers, **SMALL_MLP)
        whole, pieces = CompiledForward(model.forward), CompiledForward(model.forward, piecewise=True)
        measurements = {
            "time": lambda: measure_time(model, pool, whole, graph_runtimes(whole, pieces)),
            "equality": lambda: figures.get("equality", {}) | check_equality(args, model, pool),
            "memory": lambda: capture_buckets(whole, model, pool),
            "host_us_by_layers": lambda: host_time_by_layers(args),
            "generate": lambda: generation(args, model.model),
        }
        for part in PARTS:
            if part in args.parts:
                keep(part, measurements[part]())
    if "time" in figures:
        decode = {name: times["device_us"] for name, times in figures["time"][DECODE].items()}
        keep("ours_us", decode["full"])
        keep("peers_us", {name: decode[name] for name in ("eager", "uncaptured", "reduce-overhead")})
        console.print(table(figures["time"]))
    wrong = faults(figures)
    console.print(f"faults: {'; '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def _same(record: dict, other: dict) -> bool:
    return all(record[key] == other[key] for key in SAME)


def table(times: dict) -> Table:
    result = Table("runtime", *(f"{kind} {what}" for kind in times for what in ("host us", "device us")))
    for name in times[DECODE]:
        cells = [f"{times[kind][name][key]:,.0f}" for kind in times for key in ("host_us", "device_us")]
        result.add_row(name, *cells)
    return result


if __name__ == "__main__":
    sys.exit(main())

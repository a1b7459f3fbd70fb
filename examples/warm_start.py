"""How long a process takes to its first tokens: compiling everything, and with the compiled code of another process.

    python examples/warm_start.py --model deepseek_v32
    python examples/warm_start.py --model glm_moe_dsa --device cuda --json FILE

Two processes generate with the same small random model. Each has an empty folder for Inductor's caches; the second one
calls ``load_compiled`` on what the first one saved. Both use one cache folder of Triton's, empty at first, since Triton
keeps the kernels of our ops itself. On a CPU most of the time is the C++ compiler's, whose libraries are not saved.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from compiled_dsa import compile_model, load_compiled, save_compiled
from compiled_dsa.benchmark.timing import keep, provenance, timed
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.huggingface.small_models import MODELS, SMALL, model_config, random_model

BATCH, PROMPT, NEW_TOKENS = 2, 100, 4
PHASES = {"load": "load_compiled", "first": "first generate()", "second": "second generate()", "save": "save_compiled"}


def start(args: argparse.Namespace) -> dict:
    """What one process does; seconds of each phase, and the graphs that Inductor compiled and found."""
    dense = args.layers if args.device == "cuda" else 1  # transformers' experts in fp32 cannot be captured
    config = model_config(args.model, args.layers, first_k_dense_replace=dense, **SMALL)
    model = random_model(config, seed=0, device=args.device, dtype=torch.float32)
    model = compile_model(replace_attention(model))
    prompt = torch.randint(1, config.vocab_size, (BATCH, PROMPT), device=args.device)

    def generate() -> None:
        cache = PagedCache(config, BATCH, PROMPT + NEW_TOKENS, index_dtype=torch.float32)
        model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, past_key_values=cache)

    phases = {"first": generate, "second": generate}
    if args.process == "warm":
        phases = {"load": lambda: load_compiled(args.folder), **phases}
    else:
        phases["save"] = lambda: save_compiled(args.folder)
    seconds = {name: round(timed(run)[1], 2) for name, run in phases.items()}
    counters = torch._dynamo.utils.counters["inductor"]
    graphs = {"compiled": counters["fxgraph_cache_miss"], "found": counters["fxgraph_cache_hit"]}
    return {"seconds": seconds, "graphs": graphs}


def in_process(args: argparse.Namespace, process: str, folder: Path) -> dict:
    """``start`` in a process of its own, whose Inductor caches are empty."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor_{process}"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [sys.executable, __file__, "--process", process, "--folder", str(folder / "saved")]
    command += ["--model", args.model, "--device", args.device, "--layers", str(args.layers)]
    process_run = partial(subprocess.run, command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    done, seconds = timed(process_run)
    result = json.loads(done.stdout.splitlines()[-1])
    result["seconds"]["process"] = round(seconds, 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default 2)")
    parser.add_argument("--json", help="write the figures to this file, in place of those of the same case")
    parser.add_argument("--commit", help="with --json: the commit to record (default: that of the checkout)")
    parser.add_argument("--process", choices=("cold", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        print(json.dumps(start(args)))
        return 0

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for process in ("cold", "warm"):
            with console.status(f"{process} start"):
                results[process] = in_process(args, process, Path(folder))
        saved = sum(file.stat().st_size for file in (Path(folder) / "saved").iterdir())

    table = Table("", "cold", "warm", title=f"{args.model}, {args.layers} layers, {args.device}: seconds")
    for phase, label in (PHASES | {"process": "whole process"}).items():
        table.add_row(label, *(str(results[process]["seconds"].get(phase, "")) for process in results))
    for what in ("compiled", "found"):
        table.add_row(f"graphs {what}", *(str(results[process]["graphs"][what]) for process in results))
    console.print(table)
    console.print(f"saved: {saved / 1e6:.1f} MB")
    if args.json:
        keep(Path(args.json), record(args, results, saved))
    return 0 if results["warm"]["graphs"]["compiled"] == 0 and results["warm"]["graphs"]["found"] > 0 else 1


def record(args: argparse.Namespace, results: dict, saved: int) -> dict:
    process_us = {name: result["seconds"]["process"] * 1e6 for name, result in results.items()}
    return {
        "case": f"warm start of {args.layers} layers of {args.model}, {args.device}",
        "sizes": {"model": args.model, "layers": args.layers, "batch": BATCH, "prompt": PROMPT, "tokens": NEW_TOKENS},
        "ours_us": process_us["warm"],
        "peers_us": {"cold": process_us["cold"]},
        "device": args.device,
        **results,
        "saved_bytes": saved,
        **provenance(args.commit),
    }


if __name__ == "__main__":
    sys.exit(main())

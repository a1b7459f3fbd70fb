"""Generates with an untouched transformers model and with ours, and compares the tokens.

    python examples/generate.py --model deepseek_v32
    python examples/generate.py --model glm_moe_dsa --device cuda --real-sizes

The model is a small random one, built by transformers' own classes from the family's config. Ours is the same model
after ``replace_attention`` and ``compile_model``, generating into a ``PagedCache`` in the model's dtype. The last line
is ``identical tokens: N/N``; the exit status is 1 when tokens differ.
"""

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from transformers.generation.streamers import BaseStreamer

from compiled_dsa import compile_model
from compiled_dsa.graphs import report
from compiled_dsa.graphs.torch_compat import graph_breaks
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.huggingface.small_models import MODELS, SMALL, model_config, random_model

BATCH, PROMPT, NEW_TOKENS, WARM_UP_TOKENS = 2, 100, 60, 4
console = Console(soft_wrap=True, highlight=False)


class ProgressStreamer(BaseStreamer):
    """Shows one step of a progress bar a generated token."""

    def __init__(self, progress: Progress, description: str, total: int):
        self.progress, self.task = progress, progress.add_task(description, total=total + 1)  # the prompt comes first

    def put(self, value):
        self.progress.advance(self.task)

    def end(self):
        pass


def generate(model, prompt: torch.Tensor, new_tokens: int, description: str, **kwargs) -> tuple[torch.Tensor, float]:
    """Greedy tokens [B, new_tokens] and the seconds they took."""
    with Progress(console=console, transient=True) as progress:
        start = time.perf_counter()
        streamer = ProgressStreamer(progress, description, new_tokens)
        tokens = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, streamer=streamer, **kwargs)
        if prompt.is_cuda:
            torch.cuda.synchronize()
        return tokens[:, prompt.shape[1] :], time.perf_counter() - start


def compare(args: argparse.Namespace) -> int:
    """The main job; returns the exit status."""
    # transformers' experts synchronise with the host in fp32, which no CUDA graph can hold: dense MLPs on a GPU
    dense = args.layers if args.device == "cuda" else 1
    config = model_config(args.model, args.layers, first_k_dense_replace=dense, **SMALL)
    stock = random_model(config, seed=args.seed, device=args.device, dtype=torch.float32)
    prompt = torch.randint(1, config.vocab_size, (BATCH, PROMPT), device=args.device)
    ours = compile_model(replace_attention(copy.deepcopy(stock)))
    console.print(f"{args.model}: {args.layers} layers, {BATCH} prompts of {PROMPT} tokens, top-k {config.index_topk}")

    generate(stock, prompt, WARM_UP_TOKENS, "stock, warm-up")
    expected, stock_seconds = generate(stock, prompt, NEW_TOKENS, "stock transformers")
    static, _ = generate(stock, prompt, NEW_TOKENS, "stock, static cache", cache_implementation="static")
    if not torch.equal(expected, static):
        console.print(
            "stock Dynamic and Static caches disagree at this seed: a near-tie, differences below mean nothing"
        )

    def paged() -> PagedCache:
        return PagedCache(config, BATCH, PROMPT + NEW_TOKENS, index_dtype=torch.float32)

    generate(ours, prompt, WARM_UP_TOKENS, "compiled_dsa, compiling", past_key_values=paged())
    compiles = ours.graph_stats()["compiles"]
    with report(Path(args.dump) / args.model, f"{args.model}, {args.layers} layers") as compiled:
        generate(ours, prompt, WARM_UP_TOKENS, "compiled_dsa, reporting", past_key_values=paged())
    tokens, seconds = generate(ours, prompt, NEW_TOKENS, "compiled_dsa", past_key_values=paged())
    stats = ours.graph_stats()
    later_compiles = stats["compiles"] - compiles

    total = tokens.numel()
    console.print(f"stock transformers: {total / stock_seconds:.1f} tokens/s")
    console.print(f"compiled_dsa:       {total / seconds:.1f} tokens/s")
    breaks = graph_breaks()
    console.print(f"graphs compiled: {compiles}; graph breaks: {breaks}")
    console.print(f"compiles after warm-up: {later_compiles}")
    console.print(f"CUDA graphs: {stats['graphs']}; captured: {stats['captured']}, replayed: {stats['replayed']}")
    console.print(f"what was compiled, layer by layer: {compiled.page}")
    same = int((tokens == expected).sum())
    console.print(f"identical tokens: {same}/{total}")
    return 0 if same == total and later_compiles == 0 and breaks == 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dump", default="dumps", help="folder for the report of what was compiled (default: dumps)")
    parser.add_argument(
        "--real-sizes",
        action="store_true",
        help="on a GPU: layers of the model's true attention sizes in bf16 with fp8 caches; errors and times",
    )
    parser.add_argument("--json", help="with --real-sizes: append the figures to this file")
    parser.add_argument("--commit", help="with --json: the commit to record (default: that of the checkout)")
    args = parser.parse_args()
    if args.layers < 1:
        parser.error(f"--layers={args.layers}; it must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch sees no GPU")
    if not args.real_sizes:
        return compare(args)
    if args.device != "cuda":
        parser.error("--real-sizes needs --device cuda")
    from real_sizes import measure

    return measure(args, console)


if __name__ == "__main__":
    sys.exit(main())

"""Memory of a long prefill at true attention sizes: what the ops take beside their inputs and outputs.

    python examples/long_prefill.py --tokens 131072 --json FILE

One request is prefilled at once: the indexer scores every token against all before it and selects, attention reads the
selection, both within ``scratch_bytes``. A program that takes more than that exits with 1. The whole layer is then run
too; what it holds beside its scratch are the projections of all rows, as in any layer.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from compiled_dsa import Batch, DSAConfig, PagePool, SparseAttention
from compiled_dsa.benchmark.timing import keep, provenance
from compiled_dsa.custom_ops.index_topk import index_topk_prefill
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.custom_ops.mla_prefill import mla_prefill
from compiled_dsa.huggingface.small_models import MODELS, model_config

DEVICE, MIB = "cuda", 2**20
console = Console(soft_wrap=True, highlight=False)


def peak_bytes(run: Callable[[], object]) -> tuple[int, float]:
    """Most memory that ``run`` holds at once beyond what was there, and its time in ms, both of the second run."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, start.elapsed_time(end)


def measure(config: DSAConfig, tokens: int) -> dict:
    """Peaks in bytes and times in ms of the two ops and of the layer, for one request of ``tokens``."""
    c, dtype = config, torch.bfloat16
    torch.manual_seed(0)
    pool = PagePool(
        [c],
        num_pages=-(-tokens // 64),
        max_requests=1,
        max_len=tokens,
        latent_dtype=dtype,
        index_dtype=FP8,
        device=DEVICE,
    )
    pool.reserve(0, tokens)
    lengths = torch.full((1,), tokens, device=DEVICE)
    batch = Batch.from_lengths(lengths, lengths, pool.page_table, tokens)
    layer = SparseAttention(c, device=DEVICE, dtype=dtype)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, c.hidden_size, dtype=dtype, device=DEVICE)
    angles = torch.rand(tokens, c.qk_rope_head_dim // 2, device=DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pools = pool.layers[0]
    figures: dict = {}

    peak, ms = peak_bytes(lambda: layer(x, cos, sin, batch, pools))  # fills the caches
    output_bytes = x.nbytes + 4 * tokens * c.index_topk
    figures["layer"] = {"peak_bytes": peak, "ms": ms, "input_bytes": x.nbytes, "output_bytes": output_bytes}

    p = layer.project(x, cos, sin)
    q = torch.randn(tokens, c.index_n_heads, c.index_head_dim, device=DEVICE).to(FP8)
    weights = torch.randn(tokens, c.index_n_heads, device=DEVICE)
    topk = torch.empty(tokens, c.index_topk, dtype=torch.int32, device=DEVICE)
    rows = (batch.page_table, batch.req_of_row, batch.visible)
    select = lambda: index_topk_prefill(q, weights, pools.index_keys, *rows, topk, False, c.scratch_bytes)  # noqa: E731
    figures["index_topk_prefill"] = dict(zip(("peak_bytes", "ms"), peak_bytes(select)))

    out = torch.empty(tokens, c.num_heads, c.v_head_dim, dtype=dtype, device=DEVICE)
    kv_b = layer.kv_b_proj.weight.unflatten(0, (c.num_heads, -1))
    count = batch.visible.clamp(max=c.index_topk)
    where = (pools.latents, topk, count, batch.page_table, batch.req_of_row, kv_b)
    attend = lambda: mla_prefill(  # noqa: E731
        p.q_nope, p.q_rope, *where, c.scale, None, out, c.scratch_bytes, own_pages=True
    )
    figures["mla_prefill"] = dict(zip(("peak_bytes", "ms"), peak_bytes(attend)))
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--scratch-mib", type=int, default=512, help="budget of each op (default 512)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--commit", help="with --json: the commit to record (default: that of the checkout)")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    config = replace(DSAConfig.from_hf(model_config(args.model, 1)), scratch_bytes=args.scratch_mib * MIB)
    with torch.inference_mode():
        figures = measure(config, args.tokens)
    over = [
        name for name in ("index_topk_prefill", "mla_prefill") if figures[name]["peak_bytes"] > config.scratch_bytes
    ]
    for name, f in figures.items():
        console.print(f"{name}: {f['peak_bytes'] / MIB:,.0f} MiB beside its inputs, {f['ms']:.1f} ms")
    record = {"case": f"prefill of {args.tokens} tokens, {args.model}", "scratch_bytes": config.scratch_bytes}
    if args.json:
        keep(Path(args.json), record | figures | provenance(args.commit))
    console.print(f"over the budget of {args.scratch_mib} MiB: {', '.join(over) or 'none'}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

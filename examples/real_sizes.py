"""Layers of true attention sizes on a GPU: error against fp64, and speed against transformers' own attention.

Run as ``python examples/generate.py --model deepseek_v32 --device cuda --real-sizes --json FILE``. The model has the
config's own attention sizes and small MLPs, bf16 weights; our caches are fp8 for index keys and latents.
"""

import copy
import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from transformers import DynamicCache

from compiled_dsa import DSAConfig, compile_model
from compiled_dsa.benchmark.cases import limits
from compiled_dsa.benchmark.timing import device_us, provenance, timed
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.huggingface.benchmark import decode_step, prefill_step
from compiled_dsa.huggingface.small_models import SMALL_MLP, model_config, random_model

CONTEXT = 8192


def measure(args, console) -> int:
    """Prints (and with ``--json`` appends) the figures of one model; returns the exit status."""
    config = model_config(args.model, args.layers, **SMALL_MLP)
    stock = random_model(config, seed=args.seed, device="cuda", dtype=torch.bfloat16, std=0.02)
    ours = replace_attention(copy.deepcopy(stock))
    records = []
    with torch.inference_mode():
        accuracy = layer_accuracy(config, stock, ours, console)
        compile_model(ours)
        compiled = copy.deepcopy(stock)
        compiled.forward = torch.compile(compiled.forward, fullgraph=True)
        models = {"ours": ours, "hf_sdpa": stock, "hf_eager": stock, "hf_compiled": compiled}
        for case, batch, tokens in (
            ("prefill", 1, 4096),
            ("prefill", 1, CONTEXT),
            ("decode", 1, CONTEXT),
            ("decode", 16, CONTEXT),
        ):
            times = {}
            for name, model in models.items():
                model.set_attn_implementation(
                    "compiled_dsa" if name == "ours" else "eager" if name == "hf_eager" else "sdpa"
                )
                run = prefill_step(model, tokens) if case == "prefill" else decode_step(model, batch, tokens)
                times[name] = median_us(run)
                shown = "out of memory" if times[name] is None else f"{times[name]:,.0f} us"
                console.print(f"{case} batch {batch}, {tokens} tokens: {name} {shown}")
                del run
                gc.collect()
                torch.cuda.empty_cache()
            records.append(record(args, config, case, batch, tokens, times, accuracy[case]))
        console.print(table(records))
        if args.json:
            path = Path(args.json)
            held = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps(held + records, indent=1) + "\n")
        console.print(f"generation after {CONTEXT} tokens: {generation_speed(config, ours):.1f} tokens/s")
    return 0


# ---- accuracy --------------------------------------------------------------------------------------------------------


def layer_accuracy(config, stock, ours, console, rows: int = 64) -> dict[str, dict[str, float]]:
    """Layer 0 on random hidden states, against transformers' own module in fp64.

    For the last ``rows`` tokens of a prefill of CONTEXT tokens and for one decode after it: relative errors of ours and
    of transformers in bf16, the share of the keys selected in fp64 that each selects too, and our error when it attends
    the keys selected in fp64. (Random hidden states are attended evenly, so a few other keys show as a large error.)
    """
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(1, CONTEXT + 1, config.hidden_size, device="cuda", generator=generator, dtype=torch.bfloat16)
    positions = torch.arange(CONTEXT + 1, device="cuda").unsqueeze(0)
    cos, sin = stock.model.rotary_emb(x, positions)
    exact = copy.deepcopy(stock.model.layers[0].self_attn).double()
    oracle = run_stock_layer(exact, x.double(), cos.double(), sin.double(), config, rows)
    layer = ours.model.layers[0].self_attn
    runs = {
        "hf": run_stock_layer(stock.model.layers[0].self_attn, x, cos, sin, config, rows),
        "ours": run_our_layer(layer, x, cos, sin, config, rows),
        "ours_same_keys": run_our_layer(layer, x, cos, sin, config, rows, oracle),
    }
    result: dict[str, dict[str, float]] = {}
    for case in ("prefill", "decode"):
        want, want_keys = oracle[case]
        figures = {}
        for name, run in runs.items():
            got, got_keys = run[case]
            figures[f"{name}_error"] = ((got.double() - want).norm() / want.norm()).item()
            common = [len(set(a) & set(b)) / len(b) for a, b in zip(got_keys, want_keys)]
            figures[f"{name}_overlap"] = sum(common) / len(common)
        result[case] = figures
        console.print(
            f"{case}: error against fp64 {figures['ours_error']:.2e}, over the same keys "
            f"{figures['ours_same_keys_error']:.2e} (transformers bf16 {figures['hf_error']:.2e}); "
            f"selected keys in common {figures['ours_overlap']:.4f} (transformers bf16 {figures['hf_overlap']:.4f})"
        )
    return result


def run_stock_layer(attention, x, cos, sin, config, rows: int, chunk: int = 512) -> dict:
    """transformers' module in chunks: {case: (output [n, hidden], selected positions of each row)}."""
    cache = DynamicCache(config=config)
    selections: list[torch.Tensor] = []
    hook = attention.indexer.register_forward_hook(lambda module, args, out: selections.append(out))
    outputs = []
    for start, end in [(i, i + chunk) for i in range(0, CONTEXT, chunk)] + [(CONTEXT, CONTEXT + 1)]:
        part = slice(start, end)
        mask = torch.arange(end, device="cuda") <= torch.arange(start, end, device="cuda").unsqueeze(1)
        outputs.append(attention(x[:, part], (cos[:, part], sin[:, part]), mask[None, None], cache)[0][0])
    hook.remove()
    return {
        "prefill": (outputs[-2][-rows:], selections[-2][0, -rows:].tolist()),
        "decode": (outputs[-1], selections[-1][0].tolist()),
    }


def run_our_layer(attention, x, cos, sin, config, rows: int, oracle: dict | None = None) -> dict:
    """The same of our module on a PagedCache; with ``oracle``, the compared rows attend the keys that it selected."""
    one_layer = copy.deepcopy(config)
    one_layer.num_hidden_layers = 1
    cache = PagedCache(one_layer, 1, CONTEXT + 64, latent_dtype=FP8, index_dtype=FP8)
    cache.allocate(x.device, x.dtype)
    pages = cache.pool.page_table[0].long()
    place_of_page = pages.argsort()
    select, selections = attention.indexer.select, []

    def selecting(*args):
        topk = select(*args)
        if oracle is not None:
            positions = torch.tensor(oracle["decode" if selections else "prefill"][1], device=x.device)
            topk[-len(positions) :] = (pages[positions // 64] * 64 + positions % 64).int()
        selections.append(topk)
        return topk

    attention.indexer.select = selecting
    outputs = [
        attention(x[:, part], (cos[:, part], sin[:, part]), None, cache)[0][0]
        for part in (slice(CONTEXT), slice(CONTEXT, CONTEXT + 1))
    ]
    del attention.indexer.select
    keys = [(place_of_page[t[-rows:].long() // 64] * 64 + t[-rows:].long() % 64).tolist() for t in selections]
    return {"prefill": (outputs[0][-rows:], keys[0]), "decode": (outputs[1], keys[1])}


# ---- time ------------------------------------------------------------------------------------------------------------


def median_us(run: Callable[[], None]) -> float | None:
    """Median of the runs, in microseconds; None when the GPU's memory does not hold the run."""
    try:
        return device_us(run, warm_ups=3)
    except torch.cuda.OutOfMemoryError:
        return None


def generation_speed(config, model, new_tokens: int = 64) -> float:
    """Tokens a second of generate() after a prompt of CONTEXT tokens."""
    prompt = torch.randint(1, 1024, (1, CONTEXT), device="cuda")
    seconds = []
    for count in (2, 1, new_tokens + 1):  # the first is warm-up
        cache = PagedCache(config, 1, CONTEXT + count, latent_dtype=FP8, index_dtype=FP8)
        generate = partial(model.generate, max_new_tokens=count, do_sample=False, past_key_values=cache)
        seconds.append(timed(partial(generate, prompt))[1])
    return new_tokens / (seconds[2] - seconds[1])


def lower_bound_us(config, case: str, batch: int, tokens: int) -> float:
    """Of the time of the attention layers; ``tokens`` are held before a decode."""
    layers = [DSAConfig.from_hf(config, i) for i in range(config.num_hidden_layers)]
    context, rows = (tokens + 1, batch) if case == "decode" else (tokens, tokens)
    return limits(layers, case, batch, context, rows).limit


# ---- output ----------------------------------------------------------------------------------------------------------


def record(args, config, case, batch, tokens, times, accuracy) -> dict:
    return {
        "case": f"{args.model} {case} {batch} x {tokens}",
        "sizes": {
            "model": args.model,
            "layers": config.num_hidden_layers,
            "batch": batch,
            "tokens": tokens,
            "dtype": "bfloat16, fp8 latents and index keys",
        },
        "ours_us": times["ours"],
        "peers_us": {name: us for name, us in times.items() if name != "ours"},
        "limit_us": lower_bound_us(config, case, batch, tokens),
        "accuracy": accuracy,
        **provenance(args.commit),
    }


def table(records: list[dict]) -> Table:
    """Times in ms; those of transformers as multiples of ours."""
    result = Table("case", "ours", "limit", "eager", "sdpa", "compiled", "error", "keys", title="ms; x = times ours")
    for r in records:
        peers = [r["peers_us"][name] for name in ("hf_eager", "hf_sdpa", "hf_compiled")]
        result.add_row(
            f"{r['case'].removeprefix(r['sizes']['model']).strip()}",
            f"{r['ours_us'] / 1e3:.2f}",
            f"{r['limit_us'] / 1e3:.2f}",
            *("memory" if us is None else f"{us / r['ours_us']:.2f}x" for us in peers),
            f"{r['accuracy']['ours_same_keys_error']:.1e}",
            f"{r['accuracy']['ours_overlap']:.3f}",
        )
    return result

"""Layers of true attention sizes on a GPU: error against fp64, and speed against transformers' own attention.

Run as ``python examples/generate.py --model deepseek_v32 --device cuda --real-sizes --json FILE``. The model has the
config's own attention sizes and small MLPs, bf16 weights; our caches are fp8 for index keys and latents.
"""

import copy
import gc
import json
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
import triton
from rich.table import Table
from transformers import DynamicCache, StaticCache

from compiled_dsa import compile_model
from compiled_dsa.custom_ops.store_index_keys import store_index_keys
from compiled_dsa.custom_ops.store_latents import store_latents
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.huggingface.small_models import model_config, random_model

FP8 = torch.float8_e4m3fn
SMALL_MLP = {
    "vocab_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
CONTEXT = 8192
BYTES_PER_US, BF16_FLOP_PER_US, FP8_FLOP_PER_US = 4.22e6, 750e6, 1275e6  # measured on an H200
REPEATS, SECONDS = 20, 1.0  # of one measurement, whichever ends it first


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
                run = prefill_step(model, tokens) if case == "prefill" else decode_step(name, model, batch, tokens)
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


def prefill_step(model, tokens: int) -> Callable[[], None]:
    """A prefill of ``tokens`` random tokens into a fresh or emptied cache."""
    ids = torch.randint(1, 1024, (1, tokens), device="cuda")
    paged = PagedCache(model.config, 1, tokens, latent_dtype=FP8, index_dtype=FP8)
    ours = hasattr(model, "dsa_stats")

    def run():
        paged.reset()
        model(input_ids=ids, past_key_values=paged if ours else DynamicCache(config=model.config), logits_to_keep=1)

    return run


def decode_step(name: str, model, batch: int, context: int) -> Callable[[], None]:
    """One token for each of ``batch`` rows over a cache of ``context`` random tokens; the cache grows by it."""
    config, room = model.config, 4 * REPEATS + 16
    ids = torch.randint(1, 1024, (batch, 1), device="cuda")
    if name == "ours":
        cache = PagedCache(config, batch, context + room, latent_dtype=FP8, index_dtype=FP8)
        cache.allocate(ids.device, torch.bfloat16)
        cache.begin(batch, context, None)
    else:
        cache = StaticCache(config, max_cache_len=context + room)
    for layer, attention in enumerate(layer.self_attn for layer in model.model.layers):
        latents = torch.randn(batch, 1, context, config.kv_lora_rank, device="cuda", dtype=torch.bfloat16)
        rope = torch.randn(batch, 1, context, config.qk_rope_head_dim, device="cuda", dtype=torch.bfloat16)
        keys = torch.randn(batch, context, config.index_head_dim, device="cuda", dtype=torch.bfloat16)
        if name == "ours":
            rows, pools = cache.step(layer, torch.empty(batch, context, 0, device="cuda"), None)
            store_latents(pools.latents, latents.flatten(0, 2), rope.flatten(0, 2), rows.slots)
            if pools.index_keys is not None:
                store_index_keys(pools.index_keys, keys.flatten(0, 1).float(), rows.slots)
        else:
            cache.update(latents, rope, layer)
            if attention.indexer is not None:
                cache.update_indexer(keys, layer)
    position = torch.full((batch, 1), context, device="cuda")
    return lambda: model(input_ids=ids, past_key_values=cache, position_ids=position)


def median_us(run: Callable[[], None]) -> float | None:
    """Median of the runs after warm-up, in microseconds; None when the GPU's memory does not hold the run."""
    times = []
    try:
        for _ in range(3):
            run()
        while len(times) < REPEATS and sum(times) < SECONDS * 1e6:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    except torch.cuda.OutOfMemoryError:
        return None
    return statistics.median(times)


def generation_speed(config, model, new_tokens: int = 64) -> float:
    """Tokens a second of generate() after a prompt of CONTEXT tokens."""
    prompt = torch.randint(1, 1024, (1, CONTEXT), device="cuda")
    seconds = []
    for count in (2, 1, new_tokens + 1):  # the first is warm-up
        cache = PagedCache(config, 1, CONTEXT + count, latent_dtype=FP8, index_dtype=FP8)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model.generate(prompt, max_new_tokens=count, do_sample=False, past_key_values=cache)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return new_tokens / (seconds[2] - seconds[1])


def limit_us(config, case: str, batch: int, tokens: int) -> float:
    """Lower bound of the attention layers' time: the larger of their bytes and their FLOP at measured peak rates."""
    H, L, R = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    N, V, HI, D = config.qk_nope_head_dim, config.v_head_dim, config.index_n_heads, config.index_head_dim
    weights = config.hidden_size * (config.q_lora_rank + L + R + D + HI + H * V)
    weights += config.q_lora_rank * (H * (N + R) + HI * D) + L * H * (N + V)
    K = config.index_topk
    rows = batch if case == "decode" else tokens
    seen = batch * (tokens + 1) if case == "decode" else tokens * (tokens + 1) // 2
    selected = batch * K if case == "decode" else K * (tokens - K) + K * (K + 1) // 2
    flop = rows * 2 * weights + selected * H * 2 * (2 * L + R)
    moved = 2 * weights + (batch if case == "decode" else 1) * (tokens * (D + 4) + K * (L + 4 * L // 128 + 2 * R))
    compute = flop / BF16_FLOP_PER_US + seen * HI * D * 2 / FP8_FLOP_PER_US
    return config.num_hidden_layers * max(compute, moved / BYTES_PER_US)


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
        "limit_us": limit_us(config, case, batch, tokens),
        "accuracy": accuracy,
        **provenance(args.commit),
    }


def provenance(commit: str | None) -> dict:
    """What every record of a measurement says of where it comes from; ``commit``: None for that of the checkout."""
    checkout = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return {
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "gpu": torch.cuda.get_device_name(),
        },
        "commit": commit or checkout.stdout.strip() or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
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

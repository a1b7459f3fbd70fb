"""What this machine has, and which provider would serve each op on it: ``python -m compiled_dsa`` alone.

Each provider is asked with the arguments of one decode row at the sizes of DeepSeek-V3.2, once for a pool in model
dtype and once for an fp8 pool. Nothing is run.
"""

import argparse
import json
import platform
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from compiled_dsa.benchmark.timing import DISTRIBUTIONS, version
from compiled_dsa.custom_ops import OPS, Op
from compiled_dsa.custom_ops.layout import FP8, index_pool_shape, latent_pool_shape
from compiled_dsa.custom_ops.providers import ELSEWHERE
from compiled_dsa.family import MODELS

# T rows, H heads, N nope dim, V value dim, L latent dim, R rope dim, Q q_lora rank, HI index heads, D index head dim,
# K top-k, P pages
T, H, N, V, L, R, Q = 1, 128, 128, 128, 512, 64, 1536
HI, D, K, P = 64, 128, 2048, 1
SCRATCH_BYTES = 1 << 20
POOL_DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}


def sample_arguments(op: str, pool_dtype: torch.dtype, device: torch.device) -> tuple:
    """Valid arguments of an op in the order of its schema, all zeros: one row that sees one token."""
    bf16, fp32, int32, int64 = (
        partial(torch.zeros, dtype=dtype, device=device)
        for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64)
    )
    latent_shape, latent_storage = latent_pool_shape(P, L, R, pool_dtype)
    index_shape, index_storage = index_pool_shape(P, D, pool_dtype)
    latent_pool = torch.zeros(latent_shape, dtype=latent_storage, device=device)
    index_pool = torch.zeros(index_shape, dtype=index_storage, device=device)
    index_q = torch.zeros(T, HI, D, dtype=pool_dtype, device=device)
    page_table, req_of_row, one, topk = int32(1, P), int32(T), int32(T) + 1, int32(T, K)
    select = (index_q, fp32(T, HI), index_pool, page_table, req_of_row, one, topk, False)
    attend = (latent_pool, topk, one, page_table, req_of_row)
    kv_b, scale, sinks = bf16(H, N + V, L), (N + R) ** -0.5, None
    filled = int32(T), int64(T), int32(T), int32(T), int32(2), int32(1)
    codes_shape, codes_storage = index_pool_shape(P, D, FP8)
    codes_pool = torch.zeros(codes_shape, dtype=codes_storage, device=device)
    angles = fp32(T, R // 2), fp32(T, R // 2)
    products, norms = (bf16(T, Q), bf16(T, L + R), bf16(T, D)), (bf16(Q), bf16(L), bf16(D), bf16(D))
    flags = True, True, False
    encoded = bf16(T, H, R), torch.zeros(T, HI, D, dtype=FP8, device=device), fp32(T, HI)
    return {
        "batch_metadata": (one, one, page_table, None, *filled),
        "store_latents": (latent_pool, bf16(T, L), bf16(T, R), int64(T)),
        "store_index_keys": (index_pool, bf16(T, D), int64(T), False),
        "store_tokens": (latent_pool, codes_pool, bf16(T, Q), *products, *norms, *angles, int64(T), 1e-6, 1e-6, *flags),
        "encode_queries": (*encoded, bf16(T, H, R), bf16(T, HI, D), fp32(T, HI), *angles, 1.0, *flags),
        "index_topk_decode": select,
        "select_and_absorb": (*select, bf16(T, H, N), bf16(H, N, L), bf16(T, H, L)),
        "index_topk_prefill": (*select, SCRATCH_BYTES),
        "sparse_mla_decode": (bf16(T, H, L), bf16(T, H, R), *attend, scale, sinks, bf16(T, H, L), fp32(T, H)),
        "skinny_linear": (bf16(T, H * V), bf16(D, H * V), bf16(T, D)),
        "unabsorb": (bf16(T, H, L), bf16(H, V, L), bf16(T, H, V)),
        "mla_prefill": (bf16(T, H, N), bf16(T, H, R), *attend, kv_b, scale, sinks, bf16(T, H, V), SCRATCH_BYTES),
    }[op]


def serving(op: Op, args: tuple, device: torch.device) -> tuple[str | None, dict[str, str | None]]:
    """The provider that runs ``args`` when none is named, and the others with their reasons (None: only by name)."""
    reasons = {name: op.refusal(name, *args) for name in op.names()}
    chosen = next((name for name in op.candidates(device) if reasons[name] is None), None)
    return chosen, {name: reason for name, reason in reasons.items() if name != chosen}


def overview() -> dict:
    """What ``--json`` prints."""
    devices = [{"type": "cpu", "name": platform.machine()}]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        devices.append({"type": "cuda", "name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"})
    ops = []
    for op in OPS.values():
        for pool, dtype in POOL_DTYPES.items():
            for device in devices:
                where = torch.device(device["type"])
                provider, others = serving(op, sample_arguments(op.name, dtype, where), where)
                graph = "split" if op.split else "captured"
                row = {"op": op.name, "graph": graph, "pool": pool, "device": device["type"]}
                ops.append({**row, "provider": provider, "others": others})
    versions = {"python": platform.python_version(), **{name: version(name) for name in DISTRIBUTIONS}}
    return {"versions": versions, "models": list(MODELS), "devices": devices, "ops": ops, "elsewhere": ELSEWHERE}


def show(report: dict, console: Console) -> None:
    """The same for people: what is installed, who serves what, and who does not and why."""
    gpus = [f"{d['name']}, capability {d['capability']}" for d in report["devices"] if d["type"] == "cuda"]
    for name, value in {**report["versions"], "GPU": gpus[0] if gpus else "none"}.items():
        console.print(f"{name:<18} {value or 'not installed'}", highlight=False)
    console.print(f"{'models':<18} {', '.join(report['models'])}", highlight=False)
    served = Table("op", "in a graph", "pool", "device", "served by")
    others: dict[tuple[str, str, str], list[str]] = {}
    for row in report["ops"]:
        served.add_row(row["op"], row["graph"], row["pool"], row["device"], row["provider"] or "none")
        for name, reason in row["others"].items():
            others.setdefault((name, row["device"], reason or "runs when named"), []).append(
                f"{row['op']} {row['pool']}"
            )
    unused = Table("provider", "device", "not chosen because", "for")
    for key, ops in others.items():
        unused.add_row(*key, "\n".join(ops))
    elsewhere = Table("names of other engines", "not available here, because")
    for name, reason in report["elsewhere"].items():
        elsewhere.add_row(name, reason)
    console.print(served, unused, elsewhere)


def run(arguments: argparse.Namespace) -> None:
    report = overview()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console())

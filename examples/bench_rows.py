"""The cases of bench_cases.py that take rows as they are: stores, queries, products, metadata.

Legend: T rows, H heads, HI index heads, N nope dim, V value dim, Q q_lora rank, D index head dim, L + R latent and rope
dims.
"""

import itertools
from collections.abc import Callable

import bench_cases as cases
import torch
from bench_cases import PAGE, D, L, R, Work, bf16
from peer_pointwise import Pointwise
from torch import Tensor

from compiled_dsa.benchmark.cases import layer_config
from compiled_dsa.cli.overview import sample_arguments
from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.testing import random_index_pool

Q = 1536
TOKENS = 1 << 18  # of a pool


def slots(rows: int) -> Tensor:
    return torch.randint(TOKENS, (rows,), device=cases.DEVICE)


def angles(rows: int) -> tuple[Tensor, Tensor]:
    """cos and sin in the dtype of hidden states, as transformers has them."""
    angle = torch.randn(rows, R // 2, device=cases.DEVICE)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def work(op: str, providers: list[str], moved: float, make: Callable[[], tuple], flop: float = 0.0) -> Work:
    """Also by the reference where that is a library's product."""
    inputs = [make() for _ in range(cases.rotations(moved))]
    library = ["reference"] if OPS[op].library else []
    runs, not_run = cases.by_provider(op, inputs, [*(providers or OPS[op].providers), *library])
    return Work(runs, inputs, moved, (flop, 0.0), not_run=not_run)


def whole(columns: Tensor, width: int) -> Tensor:
    """The product [T, width] that these are columns of."""
    return columns.as_strided((len(columns), width), (width, 1), 0)


def beside_inductor(made: Work, part: str, arguments: Callable[[tuple], tuple], compiled: bool = True) -> Work:
    """Beside Inductor's fusion: a part of peer_pointwise.py at the sizes of DeepSeek-V3.2, with these arguments.

    ``compiled``: False runs the part as it is.
    """
    fused = getattr(Pointwise(layer_config("deepseek_v32"), compiled, dynamic=False), part)
    made.runs["inductor alone"] = lambda args: fused(*arguments(args))
    return made


def store_latents(providers: list[str], rows: int) -> Work:
    pool, values = cases.latent_pool("fp8", TOKENS), (bf16(rows, L), bf16(rows, R))
    moved = rows * (cases.row_bytes("fp8") + 2 * (L + R) + 8)
    return work("store_latents", providers, moved, lambda: (pool, *values, slots(rows)))


def store_index_keys(providers: list[str], rows: int) -> Work:
    pool, keys = random_index_pool(TOKENS // PAGE, D, FP8, cases.DEVICE), bf16(rows, D)
    moved = rows * (D + 4 + 2 * D + 8)
    return work("store_index_keys", providers, moved, lambda: (pool, keys, slots(rows), False))


def store_tokens(providers: list[str], rows: int, compiled: bool = True) -> Work:
    """q_a, kv and k are columns of one product, as where projections are packed; head weights, which the composition
    reads in the same part, are its last."""
    HI = cases.MODELS["deepseek_v32"][1]
    pools = cases.latent_pool("fp8", TOKENS), random_index_pool(TOKENS // PAGE, D, FP8, cases.DEVICE)
    norms, eps = (bf16(Q), bf16(L), bf16(D), bf16(D)), (1e-6, 1e-6)
    moved = rows * (cases.row_bytes("fp8") + D + 4 + 2 * (2 * Q + L + R + D) + 2 * R + 8)

    def make() -> tuple:
        products = bf16(rows, Q + L + R + D + HI).split([Q, L + R, D, HI], dim=1)[:3]
        return *pools, bf16(rows, Q), *products, *norms, *angles(rows), slots(rows), *eps, True, False, False

    rows_of, bytes_of = pools[0].view(-1, pools[0].shape[2]), pools[1].view(-1)
    norms_of = (*norms[:2], *(norm.float() for norm in norms[2:]))

    def arguments(args: tuple) -> tuple:
        return whole(args[3], Q + L + R + D + HI), norms_of, *args[10:13], rows_of, bytes_of

    return beside_inductor(work("store_tokens", providers, moved, make), "after_first", arguments, compiled)


def encode_queries(providers: list[str], model: str, rows: int, compiled: bool = True) -> Work:
    """Rope and index queries are columns of one product, as where projections are packed."""
    H, HI, N, _ = cases.MODELS[model]
    moved = rows * (2 * H * 2 * R + HI * (2 * D + D + 2 * 4) + 2 * R)
    width = H * (N + R) + HI * D

    def make() -> tuple:
        q, index = bf16(rows, width).split([H * (N + R), HI * D], dim=1)
        rope, index = q.unflatten(1, (H, N + R))[..., N:], index.unflatten(1, (HI, D))
        outs = bf16(rows, H, R), torch.empty(rows, HI, D, dtype=FP8, device=cases.DEVICE), bf16(rows, HI).float()
        return *outs, rope, index, bf16(rows, HI).float(), *angles(rows), 1.0, True, False, False

    made = work("encode_queries", providers, moved, make)
    if model != "deepseek_v32":
        return made
    return beside_inductor(made, "after_second", lambda args: (whole(args[3], width), *args[5:8], args[0]), compiled)


def unabsorb(providers: list[str], model: str, rows: int) -> Work:
    """Beside the same product as torch.compile would make it: head by head, copied afterwards."""
    H, _, N, V = cases.MODELS[model]
    moved, flop = H * (V * L * 2 + rows * 2 * (L + V)), 2.0 * rows * H * V * L

    def make() -> tuple:
        return bf16(H, rows, L).transpose(0, 1), bf16(H, N + V, L)[:, N:], bf16(rows, H, V)

    made = work("unabsorb", providers, moved, make, flop)
    made.runs["torch.bmm and a copy alone"] = lambda args: args[2].copy_(
        torch.bmm(args[0].transpose(0, 1), args[1].transpose(1, 2)).transpose(0, 1)
    )
    return made


def select_and_absorb(providers: list[str], model: str, rows: int) -> Work:
    """Rows of 8192 keys; beside the two parts one after the other."""
    H, _, N, V = cases.MODELS[model]
    chosen = cases.index_decode(providers, model, rows, 8192).inputs
    absorbed = H * N * L * 2
    inputs = [
        (*args, bf16(rows, H, N), bf16(H, N + V, L)[:, :N], bf16(rows, H, L))
        for args, _ in zip(itertools.cycle(chosen), range(cases.rotations(absorbed)))
    ]
    runs, not_run = cases.by_provider("select_and_absorb", inputs, providers)

    def one_after_the_other(args: tuple) -> None:
        OPS["index_topk_decode"].overload(*args[:8])
        torch.bmm(args[8].transpose(0, 1), args[9], out=args[10].transpose(0, 1))

    runs["one after the other"] = one_after_the_other
    moved = absorbed + rows * 8192 * (D + 4)
    return Work(runs, inputs, moved, (2.0 * rows * H * N * L, 0.0), not_run=not_run)


def skinny_linear(providers: list[str], model: str, rows: int) -> Work:
    """The output projection."""
    H, _, _, V = cases.MODELS[model]
    N, K = cases.HIDDEN[model], H * V

    def make() -> tuple:
        return bf16(rows, K), bf16(N, K), bf16(rows, N)

    return work("skinny_linear", providers, 2.0 * N * K, make, 2.0 * rows * N * K)


def batch_metadata(providers: list[str]) -> Work:
    args = sample_arguments("batch_metadata", torch.bfloat16, torch.device(cases.DEVICE))
    return work("batch_metadata", providers, sum(x.nbytes for x in args if isinstance(x, Tensor)), lambda: args)

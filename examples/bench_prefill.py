"""The cases of bench_cases.py in which rows attend all that they see: expanded keys, absorbed ones, torch's SDPA.

Legend: T rows, H heads, N nope dim, R rope dim, V value dim, L latent dim, K top-k.
"""

import math
from unittest.mock import patch

import bench_cases as cases
import torch
from bench_cases import PAGE, L, R, Work, bf16, int32
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from compiled_dsa.custom_ops.kernels import mla_prefill_plan

OURS = "triton"


def first_prefill(providers: list[str], model: str, rows: int, start: int) -> Work:
    """A prefill of one request from position ``start`` = 0, whose first K rows attend all that they see.

    Where no row sees more than K, ``triton`` chooses between expanded and absorbed keys, ``triton, absorbed`` never
    expands, and SDPA over expanded keys computes the same; its expansion is one GEMM, and measured with it.
    """
    K, device = cases.K, cases.DEVICE
    H, _, N, V = cases.MODELS[model]
    q, rope, kv_b, out = bf16(rows, H, N), bf16(rows, H, R), bf16(H, N + V, L), bf16(rows, H, V)
    visible, scale, W = torch.arange(1, rows + 1, dtype=torch.int32, device=device), (N + R) ** -0.5, -(-rows // PAGE)
    inputs = []
    for _ in range(2):
        table = torch.randperm(W, device=device).int()[None]
        selection = (selected(table[0], visible, K), visible.clamp(max=K), table, int32(rows))
        pool = cases.latent_pool("bf16", W * PAGE)
        most = K if selection[0] is None else None
        inputs.append((q, rope, pool, *selection, kv_b, scale, None, out, cases.SCRATCH_BYTES, most))
    runs, not_run = cases.by_provider("mla_prefill", inputs, providers)
    if rows <= K:
        runs["sdpa alone"] = sdpa
        if OURS in runs:
            runs[f"{OURS}, absorbed"] = lambda args: absorbed(runs[OURS], args)
    attended, long_rows = float(visible.clamp(max=K).sum()), max(0, rows - K)
    absorption = K * (2 * L - N - V)  # more than the expanded form, for a row that attends K keys
    flop = 2.0 * H * (attended * (N + R + V) + rows * L * (N + V) + long_rows * absorption)
    moved = rows * (cases.row_bytes("bf16") + H * 2 * (N + R + V)) + kv_b.nbytes
    return Work(runs, inputs, moved, (flop, 0.0), False, not_run)


def selected(pages: Tensor, visible: Tensor, K: int) -> Tensor | None:
    """int32 [T, K]: all that a row sees in order, or keys all over it; None where every row sees at most K."""
    if visible.shape[0] <= K:
        return None
    lane, seen = torch.arange(K, device=visible.device), visible[:, None].long()
    position = torch.where(seen > K, (lane * 1009 + seen) % seen, lane)  # 1009: a prime
    return (pages[position // PAGE] * PAGE + position % PAGE).int()


def absorbed(run: cases.Run, args: tuple) -> None:
    with patch.object(mla_prefill_plan, "EXPANSION_COST", math.inf):
        run(args)


def sdpa(args: tuple) -> Tensor:
    """[1, H, T, V] of torch's attention over the request's tokens, which are gathered and expanded first."""
    q, rope, pool, _, _, table, _, kv_b, scale = args[:9]
    T, H, N = q.shape
    slots = (table[0].long()[:, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten()[:T]
    tokens = pool.flatten(0, 1)[slots]
    keys = (tokens[:, :L] @ kv_b.flatten(0, 1).T).view(T, H, -1)
    k = torch.cat([keys[..., :N], tokens[:, None, L:].expand(T, H, R)], dim=-1)
    q_k_v = (x.transpose(0, 1)[None] for x in (torch.cat([q, rope], dim=-1), k, keys[..., N:]))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(*q_k_v, is_causal=True, scale=scale)

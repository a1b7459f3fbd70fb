"""Arguments of mla_prefill, and what its output is held against."""

import torch

from compiled_dsa.custom_ops import MLA_PREFILL
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.testing import attention_tolerance, dequantised_latents, random_latent_pool, random_page_table


def setup(T, H, N, V, L, R, pool_dtype, dtype, device, K=70, sinks=False):
    """Arguments up to ``out``: kv lengths of a prefill over three requests of 2 pages."""
    pool = random_latent_pool(9, L, R, pool_dtype, device)
    q_nope = torch.randn(T, H, N, device=device).to(dtype)
    q_rope = torch.randn(T, H, R, device=device).to(dtype)
    kv_b = (torch.randn(H, N + V, L, device=device) * L**-0.5).to(dtype)
    topk = torch.stack([torch.randperm(9 * PAGE, device=device)[:K] for _ in range(T)]).int()
    count = torch.randint(1, K + 1, (T,), dtype=torch.int32, device=device)
    count[0] = 0
    table = random_page_table(3, 2, 9, device)
    requests = torch.randint(0, 3, (T,), dtype=torch.int32, device=device)
    sinks = torch.randn(H, device=device) if sinks else None
    return [q_nope, q_rope, pool, topk, count, table, requests, kv_b, (N + R) ** -0.5, sinks]


def check(out, args):
    q_nope, q_rope, pool, topk, count, table, requests, kv_b, scale, sinks = args
    N, L, R = q_nope.shape[2], kv_b.shape[2], q_rope.shape[2]
    want = torch.empty(out.shape, dtype=torch.float64, device=out.device)
    MLA_PREFILL.reference(
        q_nope.double(),
        q_rope.double(),
        dequantised_latents(pool, L, R),
        topk,
        count,
        table,
        requests,
        kv_b.double(),
        scale,
        sinks,
        want,
        1 << 30,
    )
    # the absorbed query is rounded, then attention runs, then rows of W_UV weigh the errors of its output
    eps = torch.finfo(q_nope.dtype).eps
    absorbed = torch.einsum("thn,hnl->thl", q_nope.double(), kv_b[:, :N].double()).to(q_nope.dtype)
    of_latent, _ = attention_tolerance(absorbed, q_rope, pool, scale, rounded_query=True)
    atol = float(kv_b[:, N:].double().norm(dim=-1).amax()) * of_latent + eps * float(want.abs().amax())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)

"""Sizes, ids and ways of running that need a GPU: real models, pools past 2^31 bytes, CUDA graphs, no host sync."""

import pytest
import torch

from compiled_dsa.custom_ops.layout import FP8, PAGE, index_pool_shape, latent_pool_shape
from compiled_dsa.custom_ops.sparse_mla import attend, selected_slots
from compiled_dsa.testing import (
    attention_oracle,
    attention_tolerance,
    check_topk,
    dequantised_latents,
    index_scores_oracle,
    poisoned,
    random_index_pool,
    random_latent_pool,
    random_page_table,
)

pytestmark = pytest.mark.gpu

L, R, D, K = 512, 64, 128, 2048
MODELS = {"deepseek_v32": (128, 64, 128, 128), "glm_moe_dsa": (64, 32, 192, 256)}  # H, HI, N, V
ops = torch.ops.compiled_dsa


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def causal(extend, prefix):
    """(requests, visible) of the rows of a prefill."""
    rows = [(b, p + i + 1) for b, (e, p) in enumerate(zip(extend, prefix)) for i in range(e)]
    return (int32(x) for x in zip(*rows))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("index_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("name", ["index_topk_decode", "index_topk_prefill"])
def test_index_topk(model, index_dtype, name):
    HI = MODELS[model][1]
    extend, prefix = ([1, 1, 1, 1], [8191, 2047, 2048, 5000]) if "decode" in name else ([140, 33], [6000, 2030])
    table = random_page_table(len(extend), 128, 600, "cuda")
    requests, visible = causal(extend, prefix)
    T = requests.numel()
    pool = random_index_pool(600, D, index_dtype, "cuda")
    q, weights = torch.randn(T, HI, D, device="cuda").to(index_dtype), torch.randn(T, HI, device="cuda")
    chosen = poisoned(T, K, dtype=torch.int32, device="cuda")
    args = (q, weights, pool, table, requests, visible, chosen, False)
    ops.index_topk_decode(*args) if "decode" in name else ops.index_topk_prefill(*args, 1 << 20)
    check_topk(chosen, visible, *index_scores_oracle(q, weights, pool, table, requests, visible))


def test_fault_i1_a_million_keys():
    columns = 2**20 // PAGE
    table = random_page_table(1, columns, columns, "cuda")
    pool = random_index_pool(columns, D, FP8, "cuda")
    q, weights = torch.randn(1, 64, D, device="cuda").to(FP8), torch.randn(1, 64, device="cuda")
    chosen = poisoned(1, K, dtype=torch.int32, device="cuda")
    rows = (table, int32([0]), int32([2**20]))
    ops.index_topk_decode(q, weights, pool, *rows, chosen, True)
    check_topk(chosen, rows[2], *index_scores_oracle(q, weights, pool, *rows))


def attention_inputs(T, H, pool_dtype, dtype=torch.bfloat16, pages=600):
    pool = random_latent_pool(pages, L, R, pool_dtype, "cuda")
    q_latent, q_rope = (torch.randn(T, H, n, device="cuda").to(dtype) for n in (L, R))
    topk = torch.stack([torch.randperm(pages * PAGE, device="cuda")[:K] for _ in range(T)]).int()
    count = torch.randint(1, K + 1, (T,), device="cuda").int()
    count[0] = K
    table = random_page_table(2, 64, pages, "cuda")
    return q_latent, q_rope, pool, topk, count, table, int32([t % 2 for t in range(T)])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize(("T", "paged"), [(1, False), (5, True), (20, False), (150, False)])
def test_sparse_mla(model, pool_dtype, T, paged):
    """From rows whose keys are split over many programs to rows of one program a block of 64 heads."""
    H = MODELS[model][0]
    args = [*attention_inputs(T, H, pool_dtype), (L + R) ** -0.5, torch.randn(H, device="cuda")]
    args[3] = None if paged else args[3]
    out = poisoned(T, H, L, dtype=torch.bfloat16, device="cuda")
    lse = poisoned(T, H, dtype=torch.float32, device="cuda")
    ops.sparse_mla_decode(*args, out, lse)
    want, want_lse = attention_oracle(*args)
    atol, lse_atol = attention_tolerance(args[0], args[1], args[2], args[7])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_atol)
    assert (out.double() - want).norm() / want.norm() < 4 * 2.0**-8  # of bfloat16's unit: weights, output, latents


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pool_dtype", [FP8, torch.bfloat16])
def test_mla_prefill(model, pool_dtype):
    H, _, N, V = MODELS[model]
    T = 70
    _, q_rope, pool, topk, count, table, requests = attention_inputs(T, H, pool_dtype)
    q_nope = torch.randn(T, H, N, device="cuda").bfloat16()
    kv_b = (torch.randn(H, N + V, L, device="cuda") * L**-0.5).bfloat16()
    scale = (N + R) ** -0.5
    out = poisoned(T, H, V, dtype=torch.bfloat16, device="cuda")
    ops.mla_prefill(q_nope, q_rope, pool, topk, count, table, requests, kv_b, scale, None, out, 8 << 20)
    w = kv_b.double()
    slots = selected_slots(topk, count, table, requests, pool.shape[0])
    absorbed = torch.einsum("thn,hnl->thl", q_nope.double(), w[:, :N])
    o, _ = attend(absorbed, q_rope.double(), dequantised_latents(pool, L, R), slots, scale, None)
    want = torch.einsum("thl,hvl->thv", o, w[:, N:])
    assert (out.double() - want).norm() / want.norm() < 8 * 2.0**-8


BIG = {"fp8 latents": (51_151, FP8), "bf16 latents": (58_255, torch.bfloat16)}


@pytest.mark.parametrize("case", BIG)
@pytest.mark.parametrize("paged", [False, True])
def test_fault_a3_latent_ids_past_int32(case, paged):
    """Tokens stored and attended on the last page below 2^31 elements or bytes and on those after it."""
    page, dtype = BIG[case]
    shape, storage = latent_pool_shape(page + 2, L, R, dtype)
    big = torch.empty(shape, dtype=storage, device="cuda")
    assert page * PAGE * shape[2] > 2**31 - PAGE * shape[2]
    small = torch.zeros(latent_pool_shape(4, L, R, dtype)[0], dtype=storage, device="cuda")
    first = page - 2
    latents, rope = (torch.randn(4 * PAGE, n, device="cuda").bfloat16() for n in (L, R))
    slots = torch.randperm(4 * PAGE, device="cuda")
    q_latent, q_rope = (torch.randn(3, 128, n, device="cuda").bfloat16() for n in (L, R))
    topk = torch.stack([torch.randperm(4 * PAGE, device="cuda")[:100] for _ in range(3)]).int()
    outs = []
    for pool, offset in ((big, first), (small, 0)):
        ops.store_latents(pool, latents, rope, slots + offset * PAGE)
        out = poisoned(3, 128, L, dtype=torch.bfloat16, device="cuda")
        lse = poisoned(3, 128, dtype=torch.float32, device="cuda")
        ids = None if paged else topk + offset * PAGE
        table = int32([[3, 0, 2, 1]]) + offset
        ops.sparse_mla_decode(
            q_latent, q_rope, pool, ids, int32([100] * 3), table, int32([0] * 3), 0.05, None, out, lse
        )
        outs.append((out, lse))
    assert torch.equal(big[first:], small)
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_fault_a3_index_ids_past_int32():
    page = 254_201
    big = torch.empty(page + 2, index_pool_shape(1, D, FP8)[0][1], dtype=torch.uint8, device="cuda")
    assert big.nbytes > 2**31
    small = torch.zeros(4, big.shape[1], dtype=torch.uint8, device="cuda")
    first = page - 2
    keys, slots = torch.randn(4 * PAGE, D, device="cuda"), torch.randperm(4 * PAGE, device="cuda")
    q, weights = torch.randn(2, 64, D, device="cuda").to(FP8), torch.randn(2, 64, device="cuda")
    chosen = []
    for pool, offset in ((big, first), (small, 0)):
        ops.store_index_keys(pool, keys, slots + offset * PAGE, False)
        out = poisoned(2, 50, dtype=torch.int32, device="cuda")
        table = int32([[3, 0, 2, 1]]) + offset
        ops.index_topk_decode(q, weights, pool, table, int32([0, 0]), int32([256, 200]), out, True)
        chosen.append(out - offset * PAGE)
    assert torch.equal(big[first:], small)
    assert torch.equal(*chosen)


def test_fault_a3_scratch_past_int32():
    """16,386 rows of 131,072 columns of scratch; the rows past 2^31 elements choose as they do alone."""
    T, columns = 16_386, 131_072 // PAGE
    table = random_page_table(1, columns, columns, "cuda")
    pool = random_index_pool(columns, D, FP8, "cuda")
    q, weights = torch.randn(T, 8, D, device="cuda").to(FP8), torch.randn(T, 8, device="cuda")
    visible = torch.zeros(T, dtype=torch.int32, device="cuda")
    visible[0], visible[-3:] = 5000, int32([131_072, 4000, 100_000])
    out = poisoned(T, 64, dtype=torch.int32, device="cuda")
    ops.index_topk_decode(q, weights, pool, table, torch.zeros_like(visible), visible, out, True)
    alone = poisoned(4, 64, dtype=torch.int32, device="cuda")
    rows = [0, T - 3, T - 2, T - 1]
    ops.index_topk_decode(q[rows], weights[rows], pool, table, visible[:4] * 0, visible[rows], alone, True)
    assert torch.equal(out[rows], alone)
    assert (out[1:-3] == -1).all()


@pytest.mark.parametrize("T", [8, 64])
def test_fault_c2_decode_in_a_graph(T):
    """Captured with lengths of 1, replayed with others, on outputs of NaN and a pool whose unused pages are NaN."""
    table = random_page_table(T, 90, T * 90 + 1, "cuda")
    index_pool = random_index_pool(T * 90 + 1, D, FP8, "cuda")
    latents = random_latent_pool(T * 90 + 1, L, R, FP8, "cuda")
    unused = int(torch.arange(T * 90 + 1).sum() - table.sum())
    index_pool[unused], latents[unused] = 0x7F, 0x7F
    q, weights = torch.randn(T, 64, D, device="cuda").to(FP8), torch.randn(T, 64, device="cuda")
    q_latent, q_rope = (torch.randn(T, 128, n, device="cuda").bfloat16() for n in (L, R))
    requests, visible = int32(range(T)), int32([1] * T)
    chosen = poisoned(T, K, dtype=torch.int32, device="cuda")
    out = poisoned(T, 128, L, dtype=torch.bfloat16, device="cuda")
    lse = poisoned(T, 128, dtype=torch.float32, device="cuda")

    def step():
        count = visible.clamp(max=K)
        ops.index_topk_decode(q, weights, index_pool, table, requests, visible, chosen, True)
        ops.sparse_mla_decode(q_latent, q_rope, latents, chosen, count, table, requests, 0.05, None, out, lse)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([5000, 1, 70], [1, 1, 1], [37]):
        visible.zero_()
        visible[: len(lengths)] = int32(lengths)
        for tensor in (out, lse):
            tensor.fill_(torch.nan)
        graph.replay()
        replayed = [x.clone() for x in (chosen, out, lse)]
        step()
        assert all(torch.equal(a, b) for a, b in zip(replayed, (chosen, out, lse)))
        assert not out.isnan().any() and (out[len(lengths) :] == 0).all()
        check_topk(chosen, visible, *index_scores_oracle(q, weights, index_pool, table, requests, visible))


def test_ops_never_wait_for_the_device():
    pool, index_pool = random_latent_pool(70, L, R, FP8, "cuda"), random_index_pool(70, D, FP8, "cuda")
    T = 9
    latents, rope, keys = (torch.randn(T, n, device="cuda").bfloat16() for n in (L, R, D))
    slots = torch.arange(T, device="cuda")
    q_latent, q_rope, topk, count, table, requests = (
        x for i, x in enumerate(attention_inputs(T, 64, FP8, pages=130)) if i != 2
    )
    table = table % 70
    q, weights = torch.randn(T, 64, D, device="cuda").to(FP8), torch.randn(T, 64, device="cuda")
    kv_b = torch.randn(64, 256, L, device="cuda").bfloat16()
    out, lse = torch.empty_like(q_latent), torch.empty(T, 64, device="cuda")
    visible, chosen = count + 1000, torch.empty_like(topk)

    def step():
        ops.store_latents(pool, latents, rope, slots)
        ops.store_index_keys(index_pool, keys, slots, False)
        rows = (table, requests, visible, chosen, False)
        ops.index_topk_decode(q, weights, index_pool, *rows)
        ops.index_topk_prefill(q, weights, index_pool, *rows, 1 << 16)
        selection = (pool, topk, count, table, requests)
        ops.sparse_mla_decode(q_latent, q_rope, *selection, 0.05, None, out, lse)
        values = torch.empty(T, 64, 128, dtype=torch.bfloat16, device="cuda")
        ops.mla_prefill(q_latent[..., :128], q_rope, *selection, kv_b, 0.05, None, values, 1 << 20)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

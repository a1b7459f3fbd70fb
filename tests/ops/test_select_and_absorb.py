"""select_and_absorb: the selection of index_topk_decode and the absorbed queries, on one stream and on two."""

import pytest
import torch

from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.testing import poisoned, random_index_pool
from tests.ops.index_cases import batch, queries

H, N, L, K = 4, 16, 24, 40


def arguments(rows, device, columns=3):
    """Of rows that see 100 keys and a few more or less; queries as columns of wider ones, w_uk as rows of kv_b."""
    torch.manual_seed(4)
    data, pages = batch([100 + t % 7 for t in range(rows)], columns, device)
    pool = random_index_pool(pages, 32, FP8, device)
    q, weights = queries(rows, 8, 32, FP8, device)
    q_nope = torch.randn(rows, H, N + 8, device=device)[..., :N]
    kv_b = torch.randn(H, N + 8, L, device=device)
    q_latent = poisoned(H, rows, L, dtype=torch.float32, device=device).transpose(0, 1)
    topk, positions = (poisoned(rows, K, dtype=torch.int32, device=device) for _ in range(2))
    ahead = [kv_b, kv_b[:, :, 1:], kv_b.clone(), kv_b.clone()]  # one is not contiguous
    return [q, weights, pool, *data, topk, True, q_nope, kv_b[:, :N], q_latent, ahead, positions, 2, 3]


def check(args, provider):
    """Against index_topk_decode of the same provider, bit for bit, and fp64."""
    topk, positions = (torch.empty_like(args[place]) for place in (6, 12))
    torch.ops.compiled_dsa.index_topk_decode(*args[:6], topk, True, positions, *args[13:], provider=provider)
    assert torch.equal(args[6], topk) and torch.equal(args[12], positions)
    want = torch.einsum("thn,hnl->thl", args[8].double(), args[9].double())
    torch.testing.assert_close(args[10].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 16, 17])
def test_both_parts(backend, rows):
    args = arguments(rows, backend.device)
    backend("select_and_absorb", *args)
    check(args, backend.provider)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (16, 3), (17, 3), (1, 300)])
def test_in_a_cuda_graph(rows, columns):
    """The side stream forks from the one that is captured and joins it: replays follow what the inputs hold."""
    args = arguments(rows, "cuda", columns)
    run = torch.ops.compiled_dsa.select_and_absorb
    run(*args, provider="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*args, provider="triton")
    for _ in range(3):
        args[1].normal_()
        args[8].normal_()
        for place in (6, 10, 12):
            args[place].zero_()
        graph.replay()
        check(args, "triton")


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (8, lambda a: a[1:], "q_nope has shape"),
        (9, lambda a: a[:, 1:], "w_uk has shape"),
        (9, lambda a: a.double(), "w_uk has dtype"),
        (10, lambda a: a[..., 1:], "q_latent has shape"),
        (10, lambda a: a.double(), "q_latent has dtype"),
        (6, lambda a: a.long(), "topk_out has dtype"),
        (13, lambda a: K, f"init_tokens={K}, local_tokens=3"),
    ],
)
def test_refusals(place, change, message):
    args = arguments(3, "cpu")
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.select_and_absorb(*args)

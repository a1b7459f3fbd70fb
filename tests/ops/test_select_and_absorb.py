"""select_and_absorb: the selection of index_topk_decode and the absorbed queries beside it."""

import pytest
import torch

from compiled_dsa.custom_ops.kernels.select_and_absorb import MOST_ROWS
from compiled_dsa.custom_ops.layout import FP8
from compiled_dsa.testing import poisoned, random_index_pool
from tests.ops.index_cases import batch, queries

H, K = 3, 40
ANY = (16, 24, torch.float32)
TRITON = (64, 128, torch.float16)  # N, L and dtype that the kernel takes
GLM = (192, 512, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def arguments(rows, device, sizes=ANY, columns=3, deterministic=True):
    """Of rows that see 100 keys and a few more or less; queries as columns of wider ones, w_uk as rows of kv_b."""
    torch.manual_seed(4)
    N, L, dtype = sizes
    data, pages = batch([100 + t % 7 for t in range(rows)], columns, device)
    pool = random_index_pool(pages, 32, FP8, device)
    q, weights = queries(rows, 8, 32, FP8, device)
    q_nope = torch.randn(rows, H, N + 8, dtype=dtype, device=device)[..., :N]
    w_uk = torch.randn(H, N + 8, L, dtype=dtype, device=device)[:, :N]
    q_latent = poisoned(H, rows, L, dtype=dtype, device=device).transpose(0, 1)
    topk, positions = (poisoned(rows, K, dtype=torch.int32, device=device) for _ in range(2))
    return [q, weights, pool, *data, topk, deterministic, q_nope, w_uk, q_latent, positions, 2, 3]


def check(args, provider):
    """Against index_topk_decode of the same provider, bit for bit, and fp64."""
    topk, positions = (torch.empty_like(args[place]) for place in (6, 11))
    torch.ops.compiled_dsa.index_topk_decode(*args[:6], topk, args[7], positions, *args[12:], provider=provider)
    assert torch.equal(args[6], topk) and torch.equal(args[11], positions)
    want = torch.einsum("thn,hnl->thl", args[8].double(), args[9].double())
    tolerance = TOLERANCE[args[10].dtype]
    torch.testing.assert_close(args[10].double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [ANY, TRITON, GLM], ids=["any", "triton", "glm"])
@pytest.mark.parametrize("rows", [0, 1, 17, 65])
def test_both_parts(backend, rows, sizes):
    args = arguments(rows, backend.device, sizes, deterministic=rows == 17)
    backend("select_and_absorb", *args)
    check(args, backend.provider)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "sizes"),
    [
        (1, 3, ANY),
        (1, 3, TRITON),
        (16, 3, GLM),
        (MOST_ROWS, 3, GLM),
        (MOST_ROWS + 1, 3, GLM),
        (1, 300, GLM),
        (1, 600, GLM),
    ],
)
def test_in_a_cuda_graph(rows, columns, sizes, deterministic):
    """What is launched behind both waits for both; replays follow what the inputs hold."""
    args = arguments(rows, "cuda", sizes, columns, deterministic)
    args[5].fill_(columns * 64)
    run = torch.ops.compiled_dsa.select_and_absorb
    after = [torch.empty_like(args[place]) for place in (6, 10, 11)]

    def run_and_read():
        run(*args, provider="triton")
        for place, copy in zip((6, 10, 11), after):
            copy.copy_(args[place])

    run_and_read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_and_read()
    for _ in range(3):
        args[1].normal_()
        args[8].normal_()
        for place in (6, 10, 11):
            args[place].zero_()
        graph.replay()
        check(args, "triton")
        for place, copy in zip((6, 10, 11), after):
            assert torch.equal(copy, args[place])


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (8, lambda a: a[1:], "q_nope has shape"),
        (9, lambda a: a[:, 1:], "w_uk has shape"),
        (9, lambda a: a.double(), "w_uk has dtype"),
        (10, lambda a: a[..., 1:], "q_latent has shape"),
        (10, lambda a: a.double(), "q_latent has dtype"),
        (6, lambda a: a.long(), "topk_out has dtype"),
        (12, lambda a: K, f"init_tokens={K}, local_tokens=3"),
    ],
)
def test_refusals(place, change, message):
    args = arguments(3, "cpu")
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_dsa.select_and_absorb(*args)

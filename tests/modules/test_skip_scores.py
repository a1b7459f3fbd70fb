"""Fault G1: prefills around index_topk = 2048, where ``skip_scores`` alone decides for indexer and attention."""

import pytest
import torch

from compiled_dsa.batch import PREFILL
from tests.modules.layers import Serving, our_layer, stock_layer

K = 2048
LAST = 4  # rows of a step, the end of a prefill whose other keys are in the cache


def held(*lengths: int) -> Serving:
    """Requests that lack their last rows; their keys so far are random."""
    torch.manual_seed(0)
    layer = our_layer(stock_layer("deepseek_v32", torch.float64, index_topk=K))
    serving = Serving.of([layer], [torch.randn(n, 64, dtype=torch.float64) for n in lengths])
    for pool in serving.pool.layers[0].tensors():
        pool.normal_()
    return serving


def last_rows(serving: Serving, of: list[bool], skip_scores: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(outputs, selection) of the last rows of some of the requests."""
    new = [LAST if one else 0 for one in of]
    serving.held = [len(x) - n for x, n in zip(serving.x, new)]
    x, cos, sin, batch = serving.inputs(new, kind=PREFILL, skip_scores=skip_scores)
    with torch.no_grad():
        return serving.layers[0](x, cos, sin, batch, serving.pool.layers[0])


@pytest.mark.parametrize("n", [100, 2047, 2048, 2049])
def test_fault_g1_prefills_around_topk(n):
    """Rows that see at most K keys select them all; the row of token 2049 leaves one out, so scores are needed."""
    serving = held(n)
    dense, none = last_rows(serving, [True], skip_scores=True)
    sparse, topk = last_rows(serving, [True], skip_scores=False)
    assert none is None and (topk >= 0).sum(-1).tolist() == [min(K, n - LAST + 1 + i) for i in range(LAST)]
    whole = LAST - max(0, n - K)
    torch.testing.assert_close(sparse[:whole], dense[:whole], rtol=1e-10, atol=1e-10)
    assert not torch.isclose(sparse[whole:], dense[whole:], rtol=1e-10, atol=1e-10).all(-1).any()


def test_fault_g1_short_and_long_in_one_batch():
    serving = held(100, 5000)
    short, _ = last_rows(serving, [True, False], skip_scores=True)
    long, chosen = last_rows(serving, [False, True], skip_scores=False)
    got, topk = last_rows(serving, [True, True], skip_scores=False)
    torch.testing.assert_close(got, torch.cat([short, long]), rtol=1e-10, atol=1e-10)
    assert torch.equal(topk[LAST:].sort(-1).values, chosen.sort(-1).values)

"""Indexer: what its cache formats do to the choice of keys."""

import dataclasses

import pytest
import torch

from compiled_dsa import Batch, DSAConfig, Indexer, IndexFormat
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.custom_ops.layout import FP8, split_index_pool
from compiled_dsa.indexer import hadamard_matrix
from compiled_dsa.testing import dequantised_keys
from tests.modules.layers import Serving, angles, our_layer, stock_layer, tiny_dsa_config

N = 200


def make(config: DSAConfig, seed: int = 0) -> tuple[Indexer, Serving]:
    """An indexer and the pools of one request of N tokens."""
    torch.manual_seed(seed)
    layer = our_layer(stock_layer("deepseek_v32", torch.float64))
    layer.dsa_config = config
    indexer = Indexer(config, dtype=torch.float64)
    if config.index_k_norm == "layer":
        indexer.load_state_dict(layer.indexer.state_dict())
    layer.indexer = indexer
    return indexer, layer


def choose(config: DSAConfig, index_dtype=None, kind: str = PREFILL, rows: int = N) -> torch.Tensor:
    """Slots int32 [rows, K] that the last rows of N tokens choose."""
    _, layer = make(config)
    serving = Serving.of([layer], [torch.randn(N, 64, dtype=torch.float64)], index_dtype=index_dtype)
    with torch.no_grad():
        for new in (N - rows, rows):
            x, cos, sin, batch = serving.inputs([new], kind=kind)
            _, topk = layer(x, cos, sin, batch, serving.pool.layers[0])
    return topk.sort(-1).values


def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of a's keys that b has chosen too, over rows that had to leave keys out."""
    shares = [
        len(set(x.tolist()) & set(y.tolist())) / len(x) for x, y in zip(a, b) if (x >= 0).all() and (y >= 0).all()
    ]
    assert len(shares) > N // 2
    return sum(shares) / len(shares)


CONFIG = tiny_dsa_config()


def with_format(**options) -> DSAConfig:
    return dataclasses.replace(CONFIG, index_format=dataclasses.replace(CONFIG.index_format, **options))


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_hadamard_matrix_is_orthonormal(size):
    matrix = hadamard_matrix(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5))


def test_hadamard_leaves_exact_scores_alone():
    assert torch.equal(choose(with_format(hadamard=True)), choose(CONFIG))


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("scale_ue8m0", [False, True])
def test_fp8_keeps_nearly_the_same_choice(hadamard, scale_ue8m0):
    """Relative errors of 2^-4/sqrt(3) in a key's and a query's elements add up at random over 32 dims and 16 heads, to
    about 2 % of a score; of 16 chosen among 200, about 2 lie that close to the border."""
    share = overlap(choose(with_format(hadamard=hadamard, scale_ue8m0=scale_ue8m0), FP8), choose(CONFIG))
    assert 0.85 < share < 1.0
    unrelated = overlap(choose(CONFIG).roll(1, 0), choose(CONFIG))
    assert unrelated < share


def test_format_of_keys_and_queries_is_one():
    """Keys stored with Hadamard and read by an indexer without it: the choice is scrambled."""
    _, layer = make(with_format(hadamard=True))
    serving = Serving.of([layer], [torch.randn(N, 64, dtype=torch.float64)])
    with torch.no_grad():
        serving.step([N - 1])
        layer.indexer.dsa_config = CONFIG
        x, cos, sin, batch = serving.inputs([1], kind=DECODE)
        _, mixed = layer(x, cos, sin, batch, serving.pool.layers[0])
    right = choose(CONFIG, kind=DECODE, rows=1)
    assert len(set(mixed[0].tolist()) & set(right[0].tolist())) < 12


@pytest.mark.parametrize("scale_ue8m0", [False, True])
def test_stored_keys_decode_to_the_keys(scale_ue8m0):
    config = with_format(scale_ue8m0=scale_ue8m0)
    indexer, layer = make(config)
    serving = Serving.of([layer], [torch.randn(64, 64, dtype=torch.float64)], index_dtype=FP8)
    x, cos, sin, batch = serving.inputs([64])
    pool = serving.pool.layers[0].index_keys
    with torch.no_grad():
        keys = indexer.make_keys(x, cos, sin, fp8=True)
        indexer.store(keys, batch, pool)
    stored = dequantised_keys(pool)[batch.slots // 64, batch.slots % 64]
    scales = split_index_pool(pool)[1][batch.slots // 64, batch.slots % 64]
    error = (stored - keys).abs()
    assert (error <= torch.maximum(keys.abs() * 2**-4, scales[:, None] * 2**-10) * (1 + 1e-6)).all()
    assert torch.equal(scales.log2().frac() == 0, torch.full_like(scales, scale_ue8m0, dtype=torch.bool))


def test_a_call_for_keys_only_selects_nothing():
    indexer, layer = make(CONFIG)
    serving = Serving.of([layer], [torch.randn(30, 64, dtype=torch.float64)])
    x, cos, sin, _ = serving.inputs([30])
    batch = Batch.from_lengths(torch.tensor([30]), torch.tensor([30]), serving.pool.page_table, 30, skip_scores=True)
    pool = serving.pool.layers[0].index_keys
    with torch.no_grad():
        topk = indexer(x, torch.randn(30, 48, dtype=torch.float64), cos, sin, batch, pool)
        keys = indexer.make_keys(x, cos, sin, fp8=False)
    assert topk is None
    assert torch.equal(pool[serving.pool.page_table[0, 0], :30], keys)
    assert pool[serving.pool.page_table[0, 0], 30:].isnan().all()


def test_decode_and_prefill_choose_the_same():
    assert torch.equal(choose(CONFIG, kind=DECODE, rows=8), choose(CONFIG, kind=PREFILL, rows=8))


def test_a_small_scratch_budget_changes_nothing():
    small = dataclasses.replace(CONFIG, scratch_bytes=4096, deterministic=True)
    assert torch.equal(choose(small), choose(dataclasses.replace(CONFIG, deterministic=True)))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_key_norms(norm):
    config = dataclasses.replace(CONFIG, index_k_norm=norm)
    indexer, _ = make(config)
    x = torch.randn(5, 64, dtype=torch.float64)
    cos, sin = angles(torch.zeros(5), 8, torch.float64)  # position 0: nothing is rotated
    with torch.no_grad():
        keys, exact = (indexer.make_keys(x, cos, sin, fp8=fp8) for fp8 in (True, False))
        k = indexer.wk(x)
        k = k - k.mean(-1, keepdim=True) if norm == "layer" else k
        want = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(exact, want)
    torch.testing.assert_close(keys.double(), want, rtol=1e-5, atol=1e-5)  # in fp32 for an fp8 cache


def test_rope_in_the_last_dims():
    """hy_v4's layout; from_hf never asks for it yet."""
    config = dataclasses.replace(CONFIG, index_format=IndexFormat(rope_interleaved=False, rope_last=True))
    indexer, _ = make(config)
    x = torch.randn(3, 64, dtype=torch.float64)
    cos, sin = angles(torch.full((3,), 5), 8, torch.float64)
    with torch.no_grad():
        keys = indexer.make_keys(x, cos, sin, fp8=False)
        plain = indexer.k_norm(indexer.wk(x))
    assert torch.equal(keys[:, :24], plain[:, :24])
    assert not torch.isclose(keys[:, 24:], plain[:, 24:]).any()

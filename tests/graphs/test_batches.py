"""Layers of ours over batches of any lengths: replays equal the compiled code that they captured, bit for bit."""

import pytest
import torch
from torch import Tensor, nn

from compiled_dsa import Batch, DSAConfig, IndexFormat, PagePool, SparseAttention, compile_model
from compiled_dsa.batch import DECODE, PREFILL
from tests.graphs.test_runner import litter

pytestmark = pytest.mark.gpu
LAYERS, TOPK, LONGEST, REQUESTS = 2, 64, 1024, 8
PAGES = REQUESTS * LONGEST // 64


class Layers(nn.Module):
    """[T, hidden] -> (hidden states [T, hidden], their largest magnitude over all rows, padding included)."""

    def __init__(self):
        super().__init__()
        config = DSAConfig(
            hidden_size=256,
            num_heads=16,
            q_lora_rank=128,
            kv_lora_rank=128,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            index_n_heads=16,
            index_head_dim=64,
            index_topk=TOPK,
            index_format=IndexFormat(rope_interleaved=False),
            scale=64**-0.5,
        )
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SparseAttention(config, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter.data, std=0.1)

    def forward(self, x: Tensor, batch: Batch, pool: PagePool) -> tuple[Tensor, Tensor]:
        angle = batch.positions[:, None] * torch.linspace(1, 0.01, 16, device=x.device)
        cos, sin, topk = angle.cos().to(x.dtype), angle.sin().to(x.dtype), None
        for layer, pools in zip(self.layers, pool.layers):
            out, topk = layer(x, cos, sin, batch, pools, topk)
            x = torch.nn.functional.rms_norm(x + out, x.shape[1:])
        return x, x.abs().amax()


def served(graphs: str, **options) -> tuple[Layers, PagePool]:
    """The layers, and pools whose memory holds NaN wherever no token has been written."""
    model = Layers()
    configs = [layer.dsa_config for layer in model.layers]
    pool = PagePool(
        configs,
        num_pages=PAGES,
        max_requests=REQUESTS,
        max_len=LONGEST,
        latent_dtype=torch.bfloat16,
        index_dtype=torch.float8_e4m3fn,
        device="cuda",
    )
    options = {"backend": "eager", "batch_sizes": (REQUESTS,), "token_sizes": (64, 256), **options}
    compile_model(model, graphs=graphs, max_cache_len=LONGEST, **options)
    return model, pool


def poison(pool: PagePool) -> None:
    for layer in pool.layers:
        layer.latents.fill_(torch.nan)
        layer.index_keys.fill_(0xFF)


def step(q_len: list[int], kv_len: list[int], kind: str, generator: torch.Generator) -> tuple[Tensor, Batch]:
    pages = torch.randperm(PAGES, generator=generator).int().view(REQUESTS, -1)[: len(q_len)]
    lengths = (torch.tensor(lengths, device="cuda") for lengths in (q_len, kv_len))
    batch = Batch.from_lengths(*lengths, pages.cuda(), sum(q_len), kind=kind, skip_scores=max(kv_len) <= TOPK)
    x = torch.randn(sum(q_len), 256, generator=generator).to("cuda", torch.bfloat16)
    return x, batch


@pytest.mark.parametrize("graphs", ["full", "breakable", "piecewise"])
@torch.no_grad()
def test_random_batches_replay_bit_for_bit(graphs):
    model, pool = served(graphs)
    for layer in pool.layers:
        layer.latents.normal_()
        layer.index_keys.copy_(torch.randint(0, 120, layer.index_keys.shape, device="cuda").to(torch.uint8))
    generator = torch.Generator().manual_seed(0)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for index in range(50):
        kind = (DECODE, PREFILL)[index % 2]
        requests, longest = integer(1, REQUESTS), TOPK if index % 5 == 0 else LONGEST
        q_len = [1] * requests if kind == DECODE else [integer(1, 30) for _ in range(requests)]
        x, batch = step(q_len, [integer(n, longest) for n in q_len], kind, generator)
        replayed = model(x, batch, pool)
        litter()
        assert torch.equal(replayed[0], model.run_padded(x, batch, pool)[0])
    stats = model.graph_stats()
    assert stats["uncaptured"] == 0 and stats["replayed"] == 50
    assert (stats["breaks"] == 0) == (graphs == "full")


@pytest.mark.parametrize("graphs", ["full", "breakable"])
@torch.no_grad()
def test_a_shorter_batch_after_a_longer_one_leaves_nothing_behind(graphs):
    model, pool = served(graphs)
    eager, generator = Layers(), torch.Generator().manual_seed(1)
    poison(pool)
    for kv_len in ([1000, 1, 70], [1, 1, 1]):
        pages = torch.arange(PAGES, dtype=torch.int32, device="cuda").view(REQUESTS, -1)[:3]
        lengths = torch.tensor(kv_len, device="cuda")
        prompt = Batch.from_lengths(lengths, lengths, pages, sum(kv_len))  # every key of the requests, uncompiled
        eager(torch.randn(sum(kv_len), 256, generator=generator).to("cuda", torch.bfloat16), prompt, pool)
        decode = Batch.from_lengths(torch.ones_like(lengths), lengths, pages, 3, kind=DECODE)
        x = torch.randn(3, 256, generator=generator).to("cuda", torch.bfloat16)
        got, largest = model(x, decode, pool)
        torch.testing.assert_close(got, eager(x, decode, pool)[0], rtol=0.05, atol=0.05)
        assert largest.isfinite()


@pytest.mark.parametrize("graphs", ["full", "breakable", "piecewise"])
@torch.no_grad()
def test_no_nan_of_unused_slots_or_padding_rows_reaches_a_real_row(graphs):
    model, pool = served(graphs)
    generator = torch.Generator().manual_seed(2)
    poison(pool)
    for kind, q_len in ((PREFILL, [37]), (DECODE, [1]), (PREFILL, [5, 3])):
        x, batch = step(q_len, q_len, kind, generator)  # keys of these rows alone, in pages full of NaN
        got, largest = model(x, batch, pool)
        assert got.isfinite().all() and largest.isfinite()
        written = sum(int(layer.latents.isfinite().all(-1).sum()) for layer in pool.layers)
        assert written == LAYERS * sum(q_len)  # padding rows store nothing, not even in slot 0
        poison(pool)


@pytest.mark.parametrize("graphs", ["auto", "full", "breakable", "piecewise"])
@torch.no_grad()
def test_steps_without_rows_replay_the_smallest_graph(graphs):
    model, pool = served(graphs, on_miss="raise")
    for kind, rows in ((DECODE, REQUESTS), (PREFILL, 64), (PREFILL, 256)):
        idle = Batch.idle(rows, REQUESTS, pool.page_table.shape[1], "cuda", kind=kind, skip_scores=False)
        model(torch.zeros(rows, 256, device="cuda", dtype=torch.bfloat16), idle, pool)
    model.end_warm_up()
    before = model.graph_stats()
    poison(pool)
    for kind in (DECODE, PREFILL):
        for requests in (0, 1, 3):
            none = torch.zeros(requests, dtype=torch.int64, device="cuda")
            batch = Batch.from_lengths(none, none, pool.page_table[:requests], 0, kind=kind)
            got, _ = model(torch.zeros(0, 256, device="cuda", dtype=torch.bfloat16), batch, pool)
            assert got.shape == (0, 256)
    stats = model.graph_stats()
    assert (stats["captured"], stats["uncaptured"], stats["recompiles"]) == (before["captured"], 0, 0)
    assert stats["replayed"] == before["replayed"] + 6
    for layer in pool.layers:
        assert layer.latents.isnan().all() and (layer.index_keys == 0xFF).all()

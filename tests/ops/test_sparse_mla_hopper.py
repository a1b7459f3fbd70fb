"""sparse_mla_decode with the Gluon kernels of Hopper: every way of cutting a call, against the reference in fp64.

What they refuse goes through the kernel of test_sparse_mla; shapes of theirs run there too, cut as the model says.
"""

import sys

import pytest
import torch

from compiled_dsa.custom_ops.kernels import sparse_mla, sparse_mla_hopper
from compiled_dsa.custom_ops.kernels.sparse_mla_hopper import FEW_HEADS, HEADS, MAX_SPLITS, Cut, cut
from compiled_dsa.custom_ops.layout import FP8, PAGE, split_latent_pool
from compiled_dsa.testing import (
    attention_oracle,
    attention_tolerance,
    poisoned,
    random_latent_pool,
    random_page_table,
)

gpu = pytest.mark.gpu
PAGES = 64
POOLS = {"fp8": FP8, "bf16": torch.bfloat16}
H200 = 132  # multiprocessors
# up to 16 and up to 32 heads of fp8 have kernels of their own; fewer than MIN_HEADS are refused, but would be right
CASES = [("fp8", H) for H in (1, 8, 16, 17, 32, 64, 96, 128)] + [("bf16", H) for H in (16, 24, 64, 96, 128)]


@pytest.fixture
def any_heads(monkeypatch):
    monkeypatch.setattr(sparse_mla_hopper, "MIN_HEADS", 1)


def inputs(pool: str, T: int, H: int, K: int, sinks=False):
    """Random ids, some of them no slots, and counts that end in and at blocks; NaN in all other slots."""
    latents = random_latent_pool(PAGES, 512, 64, POOLS[pool], "cuda")
    topk = torch.stack([torch.randperm(PAGES * PAGE, device="cuda")[:K] for _ in range(T)]).int()
    topk[:, ::7] = -1
    topk[:, 3::50] = PAGES * PAGE
    topk[:, 4::50] = 2**31 - 1
    topk[topk == 0] = -1  # slot 0 is where a careless kernel reads for lanes without a token
    count = torch.randint(0, K + 1, (T,), dtype=torch.int32, device="cuda")
    special = [K, 0, 1, 64, 65, 128, 129, -3, K + 7][:T]
    count[: len(special)] = torch.tensor(special, dtype=torch.int32, device="cuda")
    lanes = torch.arange(K, device="cuda")
    attended = torch.zeros(PAGES * PAGE, dtype=torch.bool, device="cuda")
    attended[topk[(lanes < count[:, None]) & (topk >= 0) & (topk < PAGES * PAGE)].long()] = True
    for part in split_latent_pool(latents, 512, 64):
        if part is not None:
            bits = part.view(torch.uint8) if part.dtype == FP8 else part
            bits[~attended.view(PAGES, PAGE)] = 0x7F if part.dtype == FP8 else torch.nan
    table = random_page_table(3, 8, PAGES, "cuda")
    requests = torch.randint(0, 3, (T,), dtype=torch.int32, device="cuda")
    q = torch.randn(T, H, 576, device="cuda").bfloat16()
    sink = torch.randn(H, device="cuda") if sinks else None
    return [q[..., :512], q[..., 512:], latents, topk, count, table, requests, 576**-0.5, sink]


def run(args):
    T, H, _ = args[0].shape
    out = poisoned(T, H, 512, dtype=torch.bfloat16, device="cuda")
    lse = poisoned(T, H, dtype=torch.float32, device="cuda")
    assert sparse_mla_hopper.refuses(*args[:3], args[7], out) is None
    sparse_mla.run(*args, out, lse)
    return out, lse


def check(args):
    out, lse = run(args)
    want, want_lse = attention_oracle(*args)
    atol, lse_atol = attention_tolerance(args[0], args[1], args[2], args[7])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_atol)
    again, again_lse = run(args)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


@gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("chosen", [Cut(1, 2), Cut(3, 2), Cut(8, 2), Cut(16, 1)])
@pytest.mark.parametrize(("pool", "H"), CASES)
def test_every_cut(hopper, any_heads, monkeypatch, pool, H, chosen, sinks):
    monkeypatch.setattr(sparse_mla_hopper, "cut", lambda *_: chosen)
    check(inputs(pool, 10, H, 1008, sinks))


@gpu
@pytest.mark.parametrize("chosen", [Cut(1, 2), Cut(2, 1), Cut(2, 2)])
@pytest.mark.parametrize("K", [112, 128, 576])
@pytest.mark.parametrize(("pool", "H"), [("fp8", H) for H in (8, 16, 17, 32, 128)] + [("bf16", 24), ("bf16", 128)])
def test_more_tiles_than_programs(hopper, monkeypatch, pool, H, K, chosen):
    """A program goes from tile to tile, with tiles of one step, of several and of nothing between them."""
    if chosen.sides == 1:
        K = min(K, 128)
    monkeypatch.setattr(sparse_mla_hopper, "cut", lambda *_: chosen)
    check(inputs(pool, 700, H, K, sinks=True))


@gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("blocks", [2, 3, 8])
@pytest.mark.parametrize("H", [1, 16, 32, 64])
def test_keys_in_every_other_block(hopper, any_heads, monkeypatch, H, blocks, sinks):
    """Where consumers have every other block each, one of them has no keys, then the other one, then both."""
    monkeypatch.setattr(sparse_mla_hopper, "cut", lambda *_: Cut(1, 2))
    args = inputs("fp8", 300, H, PAGE * blocks, sinks)
    block = torch.arange(PAGE * blocks, device="cuda") // PAGE
    args[3][::3, block % 2 == 0] = -1
    args[3][1::3, block % 2 == 1] = -1
    args[3][::7] = -1
    args[4].fill_(PAGE * blocks)
    args[2] = random_latent_pool(PAGES, 512, 64, FP8, "cuda")
    check(args)


@gpu
@pytest.mark.parametrize("factor", [-40, 40])
@pytest.mark.parametrize("H", [16, 64])
def test_blocks_of_other_magnitude(hopper, monkeypatch, H, factor):
    """Scores of odd blocks are ``factor``, the others 0: the sums of one kind vanish beside those of the other."""
    monkeypatch.setattr(sparse_mla_hopper, "cut", lambda *_: Cut(1, 2))
    args = inputs("fp8", 3, H, 512)
    args[0].zero_()
    args[1].zero_()
    args[1][..., 0] = factor / args[7]
    args[2] = random_latent_pool(PAGES, 512, 64, FP8, "cuda")
    split_latent_pool(args[2], 512, 64)[2][..., 0] = torch.arange(PAGES, device="cuda")[:, None] % 2
    args[3][:] = torch.arange(512, dtype=torch.int32, device="cuda")
    args[4].fill_(512)
    out, lse = run(args)
    want, want_lse = attention_oracle(*args)  # weights are 0 or 1, so only sums and outputs are rounded
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.double(), want, rtol=0, atol=eps * float(want.abs().amax()))
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-4)


@gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("chosen", [Cut(1, 2), Cut(2, 2)])
@pytest.mark.parametrize("step", [-70, 35, 50, 70])
@pytest.mark.parametrize("H", [16, 32, 64])
def test_scores_that_rise_and_fall(hopper, monkeypatch, H, step, chosen, sinks):
    """From one block of 128 keys to the next, by ``step`` for the first head, less for others, nothing for the last."""
    monkeypatch.setattr(sparse_mla_hopper, "cut", lambda *_: chosen)
    args = inputs("fp8", 3, H, 1024, sinks)
    args[0].zero_()
    args[1].zero_()
    args[1][..., 0] = torch.linspace(step / args[7], 0, H, device="cuda")
    args[2] = random_latent_pool(PAGES, 512, 64, FP8, "cuda")
    split_latent_pool(args[2], 512, 64)[2][..., 0] = torch.arange(PAGES, device="cuda")[:, None] // 2
    args[3][:] = torch.arange(1024, dtype=torch.int32, device="cuda")
    args[4].fill_(1024)
    out, lse = run(args)
    want, want_lse = attention_oracle(*args)
    atol, _ = attention_tolerance(torch.zeros_like(args[0]), torch.zeros_like(args[1]), args[2], args[7])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-3)


@gpu
@pytest.mark.parametrize("H", [16, 64])
@pytest.mark.parametrize("pool", POOLS)
def test_own_positions_of_requests(hopper, pool, H):
    args = inputs(pool, 9, H, 512, sinks=True)
    args[2] = random_latent_pool(PAGES, 512, 64, POOLS[pool], "cuda")
    args[3] = None
    args[5][0, 0], args[5][1, 3], args[5][2, 7] = -1, PAGES, 2**31 - 1
    check(args)


@gpu
@pytest.mark.parametrize("H", [16, 64])
@pytest.mark.parametrize("pool", POOLS)
def test_heads_outermost(hopper, pool, H):
    """Queries and outputs within buffers of more heads, [H, T, ...] in memory: the other heads stay as they were."""
    args = inputs(pool, 5, H, 300)
    for i in (0, 1):
        wide = torch.full((2 * H, 5, args[i].shape[2]), torch.nan, device="cuda").bfloat16()
        wide[:H] = args[i].transpose(0, 1)
        args[i] = wide[:H].transpose(0, 1)
    buffer = poisoned(2 * H, 5, 512, dtype=torch.bfloat16, device="cuda")
    lse = poisoned(2 * H, 5, dtype=torch.float32, device="cuda")
    out = buffer[:H].transpose(0, 1)
    assert sparse_mla_hopper.refuses(*args[:3], args[7], out) is None
    sparse_mla.run(*args, out, lse[:H].T)
    assert buffer[H:].isnan().all() and lse[H:].isnan().all()
    want, want_lse = attention_oracle(*args)
    atol, lse_atol = attention_tolerance(args[0], args[1], args[2], args[7])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse[:H].T.double(), want_lse, rtol=0, atol=lse_atol)


@gpu
@pytest.mark.parametrize("H", [16, 64])
def test_codes_that_are_subnormal(hopper, H):
    args = inputs("fp8", 4, H, 128)
    args[2] = random_latent_pool(PAGES, 512, 64, FP8, "cuda")
    codes, scales, _ = split_latent_pool(args[2], 512, 64)
    codes.view(torch.uint8).copy_(torch.randint(0, 256, codes.shape, device="cuda") & 0x8F)
    scales.fill_(64.0)
    check(args)


@gpu
@pytest.mark.parametrize("H", [16, 64])
def test_a_nan_code_of_an_attended_slot_is_seen(hopper, H):
    args = inputs("fp8", 3, H, 128)
    args[2] = random_latent_pool(PAGES, 512, 64, FP8, "cuda")
    args[3][args[3] == 77] = -1
    args[3][1, 100] = 77
    args[4].fill_(128)
    split_latent_pool(args[2], 512, 64)[0].view(torch.uint8)[1, 13, 333] = 0xFF
    out, lse = run(args)
    assert out[1].isnan().all() and lse[1].isnan().all() and not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("width", [0, 1, 64, 65, 100, 2048, 4096])
@pytest.mark.parametrize("H", [16, 64, 96, 128])
@pytest.mark.parametrize("T", [1, 4, 33, 128, 4096])
def test_a_cut_holds_every_lane_and_fills_the_device(T, H, width):
    splits, sides = cut(T, H, width, H200)
    blocks, tiles = -(-width // PAGE), T * -(-H // HEADS)
    assert 1 <= splits <= min(MAX_SPLITS, max(blocks, 1)) and sides in (1, 2)
    if sides == 1:
        assert splits >= blocks and tiles * splits <= H200
    if tiles >= 4 * H200:
        assert (splits, sides) == (1, 2)
    if tiles * 4 <= H200 and blocks >= 32:
        assert splits > 1


def test_a_deterministic_call_is_never_split(monkeypatch):
    chosen = []
    monkeypatch.setattr(sparse_mla_hopper, "launch", lambda *args: chosen.append(args[11:]))
    for T in (1, 128):
        sparse_mla_hopper.run(torch.empty(T, 128, 512), *[None] * 10, 2048, True)
    assert chosen == [(Cut(1, 2), 2048)] * 2


def test_more_rows_are_not_cut_finer():
    splits = [cut(T, 128, 2048, H200).splits for T in (1, 4, 16, 64, 256, 1024)]
    assert splits == sorted(splits, reverse=True) and splits[0] > 8 and splits[-1] == 1


def few_arguments(**changes):
    """(q_latent, q_rope, pool, scale, out) that the Gluon kernels take on their device, with changes."""
    H, L, R = (changes.get(name, default) for name, default in (("H", 16), ("L", 512), ("R", 64)))
    dtype, wide = getattr(torch, changes.get("dtype", "bfloat16")), changes.get("wide", 0)
    pool = random_latent_pool(2, L, R, FP8)
    if "offset" in changes:
        pool = torch.zeros(pool.numel() + changes["offset"], dtype=torch.uint8)[changes["offset"] :].view(pool.shape)
    q_latent, q_rope = torch.zeros(3, H, L + wide, dtype=dtype)[..., :L], torch.zeros(3, H, R, dtype=dtype)
    return q_latent, q_rope, pool, changes.get("scale", 0.1), torch.zeros(3, H, L, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "capability (9, 0)"),
        ({"H": 1 + FEW_HEADS}, "capability (9, 0)"),
        ({"H": 7}, "7 heads of 512+64"),
        ({"dtype": "float16"}, "not bfloat16"),
        ({"L": 128, "R": 32}, "16 heads of 128+32"),
        ({"R": 0}, "16 heads of 512+0"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"wide": 4}, "q_latent or a stride"),
        ({"offset": 8}, "pool or a stride"),
    ],
)
def test_what_the_gluon_kernels_refuse(changes, reason):
    before = {name for name in sys.modules if "gluon" in name}
    assert reason in sparse_mla_hopper.refuses(*few_arguments(**changes))
    # nothing imports triton's gluon where it does not run
    assert {name for name in sys.modules if "gluon" in name} == before

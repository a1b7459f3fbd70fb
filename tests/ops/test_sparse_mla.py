"""sparse_mla_decode: attention over selected tokens against the reference in fp64."""

import pytest
import torch

from compiled_dsa.custom_ops.layout import FP8, PAGE, split_latent_pool
from compiled_dsa.testing import (
    attention_oracle,
    attention_tolerance,
    poisoned,
    random_latent_pool,
    random_page_table,
)

SIZES = {  # L, R, pool dtype, query dtype, power-of-two scales
    "fp32": (128, 32, torch.float32, torch.float32, True),
    "fp16-512+0": (512, 0, torch.float16, torch.float16, True),
    "bf16": (512, 64, torch.bfloat16, torch.bfloat16, True),
    "fp8-128+32": (128, 32, FP8, torch.float16, True),
    "fp8-fp32-160+32": (160, 32, FP8, torch.float32, True),
    "fp8-bf16": (512, 64, FP8, torch.bfloat16, True),
    "fp8-any-scales": (512, 64, FP8, torch.float16, False),
}


def setup(size: str, T: int, H: int, K: int, device, sinks=False):
    """Arguments up to the outputs: random ids (some of them no slots) in the lanes, three requests of 4 pages."""
    L, R, pool_dtype, dtype, power_of_two = SIZES[size]
    pool = random_latent_pool(15, L, R, pool_dtype, device, power_of_two)
    q_latent = torch.randn(T, H, L, device=device).to(dtype)
    q_rope = torch.randn(T, H, R, device=device).to(dtype)
    topk = torch.stack([torch.randperm(15 * PAGE, device=device)[:K] for _ in range(T)]).int()
    topk[:, ::7] = -1
    count = torch.randint(0, K + 1, (T,), dtype=torch.int32, device=device)
    count[0], count[-1] = K, min(K, 65)
    table = random_page_table(3, 4, 15, device)
    requests = torch.randint(0, 3, (T,), dtype=torch.int32, device=device)
    return [q_latent, q_rope, pool, topk, count, table, requests, (L + R) ** -0.5, random_sinks(H, device, sinks)]


def random_sinks(H, device, wanted):
    return torch.randn(H, device=device) if wanted else None


def run(backend, args):
    q_latent = args[0]
    out = poisoned(*q_latent.shape, dtype=q_latent.dtype, device=backend.device)
    lse = poisoned(*q_latent.shape[:2], dtype=torch.float32, device=backend.device)
    backend("sparse_mla_decode", *args, out, lse)
    return out, lse


def check(out, lse, args):
    want, want_lse = attention_oracle(*args)
    atol, lse_atol = attention_tolerance(args[0], args[1], args[2], args[7])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_atol)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sinks", "paged"), [(False, False), (True, True), (True, False)])
def test_selected_and_paged_keys(backend, size, sinks, paged):
    args = setup(size, 5, 8, 100, backend.device, sinks)
    if paged:
        args[3] = None
        args[4] = torch.tensor([256, 0, 1, 130, 65], dtype=torch.int32, device=backend.device)
    check(*run(backend, args), args)


@pytest.mark.parametrize("H", [1, 8, 16, 24, 64, 128])
@pytest.mark.parametrize("T", [1, 9])
def test_fault_d3_query_heads(backend, H, T):
    """One row splits its keys over programs, nine do not."""
    args = setup("fp8-128+32", T, H, 70, backend.device, sinks=True)
    check(*run(backend, args), args)


@pytest.mark.parametrize("T", [32, 33, 128])
def test_fault_b1_all_counts_zero(backend, T):
    args = setup("fp8-128+32", T, 8, 16, backend.device, sinks=True)
    args[3].fill_(2**31 - 1)
    args[4].zero_()
    out, lse = run(backend, args)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("T", [1, 9])
def test_counts_beyond_the_lanes(backend, T):
    """As layers give them: the keys that a row sees, of which the selection has K."""
    args = setup("fp32", T, 8, 40, backend.device)
    args[4] = torch.arange(40, 40 + 100 * T, 100, dtype=torch.int32, device=backend.device)
    got = run(backend, args)
    args[4].fill_(40)
    for a, b in zip(got, run(backend, args)):
        assert torch.equal(a, b)
    check(*got, args)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("T", [1, 5])
def test_rows_without_a_key_among_others(backend, sinks, T):
    """Counts of zero and below, and a count of lanes that all hold no slot: o = 0, lse = -inf."""
    args = setup("fp32", T, 8, 40, backend.device, sinks)
    args[4][0] = 40
    args[3][0] = -1
    args[4][1:3] = torch.tensor([0, -3], dtype=torch.int32)[: T - 1]
    out, lse = run(backend, args)
    assert (out[:3] == 0).all() and (lse[:3] == -torch.inf).all()
    check(out, lse, args)


@pytest.mark.parametrize("T", [1, 64, 65])
@pytest.mark.parametrize("stale", ["-1", "in range", "2^31-1"])
def test_fault_i3_lanes_past_the_count(backend, T, stale):
    """10 visible of many lanes: attention over 10 keys whatever the other lanes hold, also NaN in their slots."""
    args = setup("fp8-128+32", T, 8, 96, backend.device)
    q_latent, _, pool, topk, count, table, requests, *_ = args
    count.fill_(10)
    topk.copy_(torch.randint(0, 8 * PAGE, topk.shape, device=backend.device))
    topk[:, 10:] = {"-1": -1, "in range": 9 * PAGE + 3, "2^31-1": 2**31 - 1}[stale]
    split_latent_pool(pool, 128, 32)[0].view(torch.uint8)[8:] = 0x7F  # NaN
    out, lse = run(backend, args)
    assert not out.isnan().any()
    pool[8:] = 0
    check(out, lse, args)


def test_fault_d1_scales_that_are_no_powers_of_two(backend):
    args = setup("fp8-any-scales", 2, 8, 20, backend.device)
    scales = split_latent_pool(args[2], 512, 64)[1]
    scales.copy_(torch.tensor([0.0173, 0.11, 0.004, 0.73], device=backend.device).expand_as(scales))
    check(*run(backend, args), args)


def test_fault_d1_ids_outside_the_pool_act_as_absent(backend):
    args = setup("fp32", 3, 8, 40, backend.device)
    bad = torch.tensor([15 * PAGE, 15 * PAGE + 5, 2**31 - 1, -2, -(2**31)], dtype=torch.int32, device=backend.device)
    args[3][:, 5:10] = bad
    check(*run(backend, args), args)


def test_bad_pages_act_as_absent(backend):
    args = setup("fp32", 4, 8, 40, backend.device)
    args[3] = None
    args[4][:] = torch.tensor([256, 100, 64, 10], dtype=torch.int32, device=backend.device)
    args[5][:, 0] = torch.tensor([-1, 15, 2**31 - 1], dtype=torch.int32, device=backend.device)
    out, lse = run(backend, args)
    assert (out[2:] == 0).all() and (lse[2:] == -torch.inf).all()
    check(out, lse, args)


def test_nan_of_unattended_slots_stays_there(backend):
    args = setup("fp32", 4, 8, 40, backend.device)
    args[2][10:] = torch.nan
    args[3] = torch.where(args[3] >= 10 * PAGE, -1, args[3])
    out, lse = run(backend, args)
    assert not out.isnan().any() and not lse.isnan().any()
    check(out, lse, args)


def test_nan_of_an_attended_slot_is_seen(backend):
    args = setup("fp32", 2, 8, 40, backend.device)
    args[4].fill_(40)
    args[2].view(-1, 160)[args[3][1, 5].long()] = torch.nan
    args[3][0, :] = torch.where(args[3][0] == args[3][1, 5], -1, args[3][0])
    out, lse = run(backend, args)
    assert not out[0].isnan().any() and out[1].isnan().all() and lse[1].isnan().all()


@pytest.mark.parametrize("T", [1, 6])
def test_fault_h3_strided_queries_and_outputs(backend, T):
    """8 heads of buffers of 64, heads outermost: strides are kept, the other heads stay as they were."""
    args = setup("fp32", T, 8, 40, backend.device, sinks=True)
    for i in (0, 1):
        wide = torch.zeros(64, T, args[i].shape[2], device=backend.device)
        wide[:8] = args[i].transpose(0, 1)
        args[i] = wide[:8].transpose(0, 1)
    buffer = poisoned(64, T, 128, dtype=torch.float32, device=backend.device)
    lse_buffer = poisoned(64, T, dtype=torch.float32, device=backend.device)
    out, lse = buffer[:8].transpose(0, 1), lse_buffer[:8].T
    backend("sparse_mla_decode", *args, out, lse)
    assert buffer[8:].isnan().all() and lse_buffer[8:].isnan().all()
    check(out, lse, args)


def test_no_rows(backend):
    args = setup("fp32", 2, 8, 40, backend.device)
    for i in (0, 1, 3, 4, 6):
        args[i] = args[i][:0]
    pool = args[2].clone()
    out, lse = run(backend, args)
    assert out.shape == (0, *args[0].shape[1:]) and lse.shape == out.shape[:2]
    assert torch.equal(args[2], pool)


def test_outputs_without_a_dense_last_dim_are_refused(backend):
    if backend.provider == "reference":
        pytest.skip("the reference takes any strides")
    args = setup("fp32", 2, 8, 40, backend.device)
    out = torch.empty(2, 128, 8, device=backend.device).transpose(1, 2)
    with pytest.raises(ValueError, match="out has strides .* last dim must be dense"):
        backend("sparse_mla_decode", *args, out, torch.empty(2, 8, device=backend.device))

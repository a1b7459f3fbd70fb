"""store_latents: what lies in the pool after a store, byte for byte."""

import pytest
import torch

from compiled_dsa.custom_ops import STORE_LATENTS
from compiled_dsa.custom_ops.layout import FP8, latent_pool_shape, split_latent_pool
from compiled_dsa.custom_ops.store_latents import power_of_two_ceil
from compiled_dsa.testing import dequantised_latents, expand_groups, poisoned, random_latent_pool

SIZES = [(512, 64), (128, 32), (512, 0), (160, 32)]
SLOTS = [5, -1, 191, 0, 192, 64, 2**62, -(2**40)]  # of 3 pages: the last two, 192 and -1 are outside


def expected(pool, latents, rope, slots):
    """The pool after the reference's store, computed on the CPU."""
    pool = pool.cpu().clone()
    STORE_LATENTS.reference(pool, latents.cpu(), rope.cpu(), slots.cpu())
    return pool


def fp8_exact(T: int, L: int, device) -> torch.Tensor:
    """Latents that are codes times a power of two, the largest code 448 in every group: they quantise exactly."""
    codes = (torch.randn(T, L, device=device) * 100).clamp(-448, 448).to(FP8).float()
    codes[:, ::128] = 448.0
    exponents = torch.randint(-13, 3, (T, -(-L // 128)), device=device)
    return codes * expand_groups(exponents.float().exp2(), L)


@pytest.mark.parametrize(("L", "R"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_dtype(backend, L, R, dtype):
    pool = poisoned(3, 64, L + R, dtype=dtype, device=backend.device)
    latents = torch.randn(len(SLOTS), L, dtype=dtype, device=backend.device)
    rope = torch.randn(len(SLOTS), R, dtype=dtype, device=backend.device)
    slots = torch.tensor(SLOTS, device=backend.device)
    want = expected(pool, latents, rope, slots)
    backend("store_latents", pool, latents, rope, slots)
    assert torch.equal(pool.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("L", "R"), SIZES)
def test_fp8_of_exact_values(backend, L, R):
    shape, dtype = latent_pool_shape(3, L, R, FP8)
    pool = torch.full(shape, 0x7F, dtype=dtype, device=backend.device)
    latents = fp8_exact(len(SLOTS), L, backend.device)
    rope = torch.randn(len(SLOTS), R, device=backend.device).bfloat16().float()
    slots = torch.tensor(SLOTS, device=backend.device)
    want = expected(pool, latents, rope, slots)
    backend("store_latents", pool, latents, rope, slots)
    assert torch.equal(pool.cpu(), want)
    assert torch.equal(dequantised_latents(want, L, R).flatten(0, 1)[191, :L], latents[2].cpu().double())


@pytest.mark.gpu  # triton's interpreter rounds wrongly when it casts fp32 to e4m3 and to bfloat16
@pytest.mark.parametrize(("L", "R"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_bytes_equal_the_reference(L, R, dtype):
    T, pages = 4000, 80
    shape, storage = latent_pool_shape(pages, L, R, FP8)
    pool = torch.full(shape, 0x7F, dtype=storage, device="cuda")
    size = torch.randn(T, 1, device="cuda").mul(4).exp2()
    latents = (torch.randn(T, L, device="cuda") * size).clamp(-6e4, 6e4).to(dtype)
    latents[7], latents[8] = 0.0, 3e4
    rope = torch.randn(T, R, device="cuda").to(dtype)
    slots = torch.randperm(pages * 64, device="cuda")[:T]
    want = expected(pool, latents, rope, slots)
    torch.ops.compiled_dsa.store_latents(pool, latents, rope, slots, provider="triton")
    assert torch.equal(pool.cpu(), want)


def test_strided_inputs(backend):
    pool = poisoned(3, 64, 160, dtype=torch.float32, device=backend.device)
    both = torch.randn(7, 200, device=backend.device)
    latents, rope = both[:, 8:136], both[:, 150:182]
    slots = torch.tensor([1, 2, 3, 100, -1, 150, 191], device=backend.device)
    want = expected(pool, latents, rope, slots)
    backend("store_latents", pool, latents, rope, slots)
    assert torch.equal(pool.cpu().nan_to_num(7.0), want.nan_to_num(7.0))


def test_padding_touches_no_slot(backend):
    """Slot 0 is an ordinary slot: rows with slot -1, whatever they hold, leave it as it was."""
    pool = random_latent_pool(2, 128, 32, torch.float32, backend.device)
    before = pool.clone()
    nan = torch.full((33, 160), torch.nan, device=backend.device)
    slots = torch.full((33,), -1, dtype=torch.int64, device=backend.device)
    backend("store_latents", pool, nan[:, :128], nan[:, 128:], slots)
    assert torch.equal(pool, before)


def test_no_tokens(backend):
    pool = random_latent_pool(2, 128, 32, FP8, backend.device)
    before = pool.clone()
    empty = torch.empty(0, 160, device=backend.device)
    slots = torch.empty(0, dtype=torch.int64, device=backend.device)
    backend("store_latents", pool, empty[:, :128], empty[:, 128:], slots)
    assert torch.equal(pool, before)


def test_fault_a2_moves_carry_codes_and_scales(backend):
    """Tokens 0..191 with a scale and a code of their own; 63, 64, 65 move to 0, 127, 128, neighbours stay."""
    L, R = 128, 32
    shape, dtype = latent_pool_shape(3, L, R, FP8)
    pool = torch.zeros(shape, dtype=dtype, device=backend.device)
    token = torch.arange(192, device=backend.device)
    latents = (1 + token % 8).float()[:, None].expand(192, L).clone()
    latents[:, 0] = 448.0
    latents *= (token // 8 % 13 - 12).float().exp2()[:, None]
    rope = (token[:, None] + torch.zeros(R, device=backend.device)) / 4
    backend("store_latents", pool, latents, rope, token)
    _, scales, _ = split_latent_pool(pool, L, R)
    assert torch.equal(scales.flatten(), (token // 8 % 13 - 12).float().exp2())
    wanted = dequantised_latents(pool, L, R).flatten(0, 1)
    target = torch.tensor([0, 127, 128], device=backend.device)
    wanted[target] = wanted[63:66].clone()
    backend("store_latents", pool, latents[63:66].contiguous(), rope[63:66].contiguous(), target)
    assert torch.equal(dequantised_latents(pool, L, R).flatten(0, 1), wanted)


def test_scale_is_the_next_power_of_two(backend):
    """amax / 448 between powers of two, exactly one, and below the floor of 1e-4 (whose next is 2^-13)."""
    L, R = 512, 0
    shape, dtype = latent_pool_shape(1, L, R, FP8)
    pool = torch.zeros(shape, dtype=dtype, device=backend.device)
    latents = torch.zeros(1, L, device=backend.device)
    latents[0, 0], latents[0, 128], latents[0, 256] = 300.0, -448.0 / 4, 1e-6
    rope = torch.empty(1, 0, device=backend.device)
    backend("store_latents", pool, latents, rope, torch.zeros(1, dtype=torch.int64, device=backend.device))
    scales = split_latent_pool(pool, L, R)[1][0, 0]
    assert scales.tolist() == [1.0, 0.25, 2.0**-13, 2.0**-13]


def test_power_of_two_ceil_is_exact():
    powers = torch.arange(-126, 127).float().exp2()
    assert torch.equal(power_of_two_ceil(powers), powers)
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(power_of_two_ceil(above), powers * 2)

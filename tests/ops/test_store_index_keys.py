"""store_index_keys: what lies in the pool after a store, byte for byte."""

import pytest
import torch

from compiled_dsa.custom_ops import STORE_INDEX_KEYS
from compiled_dsa.custom_ops.layout import FP8, index_pool_shape, split_index_pool
from compiled_dsa.testing import dequantised_keys, poisoned, random_index_pool

DIMS = [32, 64, 128, 96]
SLOTS = [5, -1, 191, 0, 192, 64, 2**62, -(2**40)]  # of 3 pages: the last two, 192 and -1 are outside


def expected(pool, keys, slots, scale_ue8m0):
    """The pool after the reference's store, computed on the CPU."""
    pool = pool.cpu().clone()
    STORE_INDEX_KEYS.reference(pool, keys.cpu(), slots.cpu(), scale_ue8m0)
    return pool


@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_dtype(backend, D, dtype):
    pool = poisoned(3, 64, D, dtype=dtype, device=backend.device)
    keys = torch.randn(len(SLOTS), D, dtype=dtype, device=backend.device)
    slots = torch.tensor(SLOTS, device=backend.device)
    want = expected(pool, keys, slots, False)
    backend("store_index_keys", pool, keys, slots, False)
    assert torch.equal(pool.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("scale_ue8m0", [False, True])
def test_fp8_of_exact_values(backend, D, scale_ue8m0):
    shape, dtype = index_pool_shape(3, D, FP8)
    pool = torch.full(shape, 0x7F, dtype=dtype, device=backend.device)
    keys = (torch.randn(len(SLOTS), D, device=backend.device) * 100).clamp(-448, 448).to(FP8).float()
    keys[:, 0] = 448.0
    keys *= torch.arange(len(SLOTS), device=backend.device).float().sub(4).exp2()[:, None]
    slots = torch.tensor(SLOTS, device=backend.device)
    want = expected(pool, keys, slots, scale_ue8m0)
    backend("store_index_keys", pool, keys, slots, scale_ue8m0)
    assert torch.equal(pool.cpu(), want)
    assert torch.equal(dequantised_keys(want).flatten(0, 1)[191], keys[2].cpu().double())


@pytest.mark.gpu  # triton's interpreter rounds wrongly when it casts fp32 to e4m3
@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("scale_ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_bytes_equal_the_reference(D, scale_ue8m0, dtype):
    T, pages = 4000, 80
    shape, storage = index_pool_shape(pages, D, FP8)
    pool = torch.full(shape, 0x7F, dtype=storage, device="cuda")
    size = torch.randn(T, 1, device="cuda").mul(4).exp2()
    keys = (torch.randn(T, D, device="cuda") * size).clamp(-6e4, 6e4).to(dtype)
    keys[7], keys[8] = 0.0, 3e4
    slots = torch.randperm(pages * 64, device="cuda")[:T]
    want = expected(pool, keys, slots, scale_ue8m0)
    torch.ops.compiled_dsa.store_index_keys(pool, keys, slots, scale_ue8m0, provider="triton")
    assert torch.equal(pool.cpu(), want)


@pytest.mark.parametrize(("scale_ue8m0", "scale"), [(False, 300 / 448), (True, 1.0)])
def test_fault_d4_codes_and_scale_belong_together(backend, scale_ue8m0, scale):
    """A row of amax 300, and a row of zeros: the stored scale is the one that the codes were made with."""
    shape, dtype = index_pool_shape(1, 128, FP8)
    pool = torch.full(shape, 0x7F, dtype=dtype, device=backend.device)
    keys = torch.zeros(2, 128, device=backend.device)
    keys[0, :3] = torch.tensor([300.0, -150.0, 75.0])
    backend("store_index_keys", pool, keys, torch.tensor([3, 4], device=backend.device), scale_ue8m0)
    scales = split_index_pool(pool)[1][0]
    assert scales[3].item() == pytest.approx(scale, rel=2e-7)
    assert 0 < scales[4].item() <= 2.0**-22  # 1e-4 / 448, or the next power of two
    stored = dequantised_keys(pool)[0]
    # e4m3 keeps 3 bits after the leading one
    torch.testing.assert_close(stored[3, :3], keys[0, :3].double(), rtol=2.0**-4, atol=0)
    assert not stored[3, 3:].any() and not stored[4].any()


def test_padding_touches_no_slot(backend):
    pool = random_index_pool(2, 64, torch.float32, backend.device)
    before = pool.clone()
    keys = torch.full((33, 64), torch.nan, device=backend.device)
    slots = torch.full((33,), -1, dtype=torch.int64, device=backend.device)
    backend("store_index_keys", pool, keys, slots, False)
    assert torch.equal(pool, before)


def test_strided_keys(backend):
    pool = poisoned(3, 64, 64, dtype=torch.float32, device=backend.device)
    keys = torch.randn(3, 100, device=backend.device)[:, 20:84]
    slots = torch.tensor([1, 100, 191], device=backend.device)
    want = expected(pool, keys, slots, False)
    backend("store_index_keys", pool, keys, slots, False)
    assert torch.equal(pool.cpu().nan_to_num(7.0), want.nan_to_num(7.0))


def test_no_tokens(backend):
    pool = random_index_pool(2, 64, FP8, backend.device)
    before = pool.clone()
    slots = torch.empty(0, dtype=torch.int64, device=backend.device)
    backend("store_index_keys", pool, torch.empty(0, 64, device=backend.device), slots, True)
    assert torch.equal(pool, before)

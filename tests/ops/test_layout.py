"""Every shape of a pool comes from layout; pools of another shape or dtype are refused by name."""

import pytest
import torch

from compiled_dsa.custom_ops.layout import (
    FP8,
    check_index_pool,
    check_latent_pool,
    index_pool_shape,
    latent_pool_shape,
    split_index_pool,
    split_latent_pool,
)


@pytest.mark.parametrize(("L", "R", "row"), [(512, 64, 656), (128, 32, 196), (512, 0, 528), (160, 32, 232)])
def test_fp8_latent_row(L, R, row):
    shape, dtype = latent_pool_shape(3, L, R, FP8)
    assert (shape, dtype) == ((3, 64, row), torch.uint8)
    pool = torch.arange(3 * 64 * row).remainder(251).to(torch.uint8).view(shape)
    latents, scales, rope = split_latent_pool(pool, L, R)
    # the parts lie one after the other in the bytes of a token
    parts = [latents.view(torch.uint8), scales.contiguous().view(torch.uint8), rope.contiguous().view(torch.uint8)]
    assert torch.equal(torch.cat(parts, dim=-1), pool)


def test_fp8_index_page():
    shape, dtype = index_pool_shape(2, 128, FP8)
    assert (shape, dtype) == ((2, 8448), torch.uint8)
    pool = torch.arange(2 * 8448).remainder(251).to(torch.uint8).view(shape)
    keys, scales = split_index_pool(pool)
    parts = [keys.contiguous().view(torch.uint8).flatten(1), scales.contiguous().view(torch.uint8)]
    assert torch.equal(torch.cat(parts, dim=-1), pool)


def test_fault_d2_bytes_of_512_pages():
    shape, dtype = latent_pool_shape(512, 512, 64, FP8)
    assert torch.empty(shape, dtype=dtype, device="meta").nbytes == 21_495_808


def test_fault_d2_view_of_another_dtype_is_refused_by_name():
    latents = torch.zeros(latent_pool_shape(2, 512, 64, FP8)[0], dtype=torch.uint8).view(torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16.*\(2, 64, 328\).*raw uint8, never as a view"):
        check_latent_pool(latents, 512, 64)
    keys = torch.zeros(index_pool_shape(2, 128, FP8)[0], dtype=torch.uint8).view(torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16.*raw uint8, never as a view"):
        check_index_pool(keys, 128)


def test_fault_d2_ops_refuse_the_view():
    pool = torch.zeros(latent_pool_shape(2, 512, 64, FP8)[0], dtype=torch.uint8).view(torch.bfloat16)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="raw uint8, never as a view"):
        torch.ops.compiled_dsa.store_latents(pool, torch.zeros(1, 512), torch.zeros(1, 64), slots)

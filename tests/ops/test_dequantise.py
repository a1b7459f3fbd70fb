"""fp8 latents in bf16, of a pool and of the pages of a batch, and the numbers of slots among these."""

import pytest
import torch

from compiled_dsa.custom_ops.kernels.dequantise import dequantise, dequantise_pages, renumber
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.testing import dequantised_latents, random_latent_pool


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("unit", [PAGE, 1])
def test_new_numbers(device, unit):
    """Of ids in rows that lie apart: of pages with a place and without, and outside the pool on both sides."""
    places = int32([3, -1, 0, 700_000, -1], device)
    some = [p * unit + i for p in range(5) for i in {0, unit // 2, unit - 1}]
    some += [-1, -64, -(2**31), 5 * unit, 5 * unit + 1, 2**31 - 1]
    ids = int32([some * 70, some[::-1] * 70], device)
    apart = torch.cat([ids, ids], 1)[:, : ids.shape[1]]
    found = renumber(apart, places, unit, torch.empty_like(ids))
    inside = (ids >= 0) & (ids < 5 * unit)
    page = torch.where(inside, ids // unit, 1).long()
    want = torch.where(places[page] >= 0, places[page] * unit + ids % unit, -1)
    assert torch.equal(found, want.int())


@pytest.mark.parametrize(("L", "R"), [(512, 64), (128, 32)])
def test_pages_of_a_batch(device, L, R):
    """Pages in both requests, twice in one, and outside the pool; the rest of the pool is NaN and not read."""
    pool = random_latent_pool(40, L, R, FP8, device)
    table = int32([[7, 39, 7, -1], [0, 40, 39, 2**31 - 1]], device)
    pool[[p for p in range(40) if p not in (0, 7, 39)]] = 0x7F
    pages, places = dequantise_pages(pool, table, L, R)
    assert pages.shape == (8, PAGE, L + R)
    want = dequantised_latents(pool, L, R)
    for entry, page in enumerate(table.flatten().tolist()):
        if 0 <= page < 40:
            assert torch.equal(pages[entry].double(), want[page])  # scales are powers of two
    assert places[0] == 4 and places[7] in (0, 2) and places[39] in (1, 6) and (places >= 0).sum() == 3
    assert torch.equal(dequantise(pool, L, R)[7], pages[0])

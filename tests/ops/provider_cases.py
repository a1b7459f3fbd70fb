"""What the tests of providers share: stand-ins for their libraries, and arguments of index_topk."""

import importlib
import sys

import pytest
import torch

from compiled_dsa.custom_ops import Op
from compiled_dsa.custom_ops.layout import FP8, split_index_pool
from compiled_dsa.custom_ops.providers import common
from compiled_dsa.testing import check_topk, index_scores_oracle, poisoned, random_index_pool, random_page_table
from tests.ops import fake_libraries

FOLDER = "compiled_dsa.custom_ops.providers"
MODULES = {"deep_gemm": ["deep_gemm"], "flashinfer": ["flashinfer"], "flash_mla": ["flash_mla", "flash_mla_prefill"]}

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins and Triton's interpreter are for a CPU")


@pytest.fixture
def fakes(monkeypatch):
    """The providers over stand-ins, on any device; by name of the library."""
    modules = {}
    for library, stems in MODULES.items():
        monkeypatch.setitem(sys.modules, library, getattr(fake_libraries, library)())
        for stem in stems:
            monkeypatch.delitem(sys.modules, f"{FOLDER}.{stem}", raising=False)
    monkeypatch.setattr(common, "refuses_device", lambda pool: None)
    for stems in MODULES.values():
        for stem in stems:
            modules[stem] = importlib.import_module(f"{FOLDER}.{stem}")
    yield modules
    for stem in modules:
        sys.modules.pop(f"{FOLDER}.{stem}")


def index_arguments(HI=32, D=64, K=40, dtype=FP8, deterministic=False, budget=None, device="cpu"):
    """Rows that see none, few and many keys, one request with a page outside the pool, NaN scales, ties at 0."""
    table = random_page_table(3, 3, 12, device)
    table[1, 1] = -7
    pool = random_index_pool(12, D, dtype, device)
    if dtype == FP8:
        keys, scales = split_index_pool(pool)
        scales[table[2, 0], 5] = torch.nan
        keys.view(torch.uint8)[table[0, 0], 8:40] = 0  # scores of 0
    requests = torch.tensor([0, 0, 1, 2, 2, 1], dtype=torch.int32, device=device)
    visible = torch.tensor([190, 3, 192, 100, 0, 70], dtype=torch.int32, device=device)
    q = torch.randn(6, HI, D, device=device).to(dtype)
    weights = torch.randn(6, HI, device=device)
    out = poisoned(6, K, dtype=torch.int32, device=device)
    args = (q, weights, pool, table, requests, visible, out, deterministic)
    return args if budget is None else (*args, budget)


def run_index(op: Op, provider: str, args):
    op.overload(*args, provider=provider)
    q, weights, pool, table, requests, visible, out = args[:7]
    check_topk(out, visible, *index_scores_oracle(q, weights, pool, table, requests, visible))
    return out

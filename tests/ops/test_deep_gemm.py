"""index_topk around DeepGEMM beyond what providers share: maxima and lists of long rows, NaN, cuts, strides.

On a CPU the library is a stand-in, as in test_providers.
"""

import pytest
import torch

from compiled_dsa.custom_ops import INDEX_TOPK_DECODE, INDEX_TOPK_PREFILL
from compiled_dsa.custom_ops.layout import PAGE, split_index_pool
from tests.ops.provider_cases import cpu_only, fakes, index_arguments, run_index

__all__ = ["fakes"]  # a fixture


@cpu_only
def test_long_rows_of_deep_gemm_get_maxima(fakes, monkeypatch):
    from compiled_dsa.custom_ops.kernels import select

    for name in ("DIRECT_SCORES", "DIRECT_SCORES_PREFILL", "NARROWED_MAXIMA"):
        monkeypatch.setattr(select, name, 64)
    monkeypatch.setattr(select, "SMALLEST_TILE", 64)
    run_index(INDEX_TOPK_DECODE, "deep_gemm", index_arguments(K=10))
    run_index(INDEX_TOPK_PREFILL, "deep_gemm", index_arguments(K=10, budget=1 << 20))


@cpu_only
@pytest.mark.parametrize("where", ["key", "query"])
def test_nan_among_codes_is_seen_in_a_prefill(fakes, where):
    """By the reference such a key is never chosen, and a row with such a query chooses nothing."""
    args = index_arguments(deterministic=True, budget=1 << 20)
    pool, table, chosen = args[2], args[3], args[6]
    codes = split_index_pool(pool)[0].view(torch.uint8)[table[2, 1], 4:9] if where == "key" else args[0][3, 7:8]
    codes.view(torch.uint8)[0, 5] = 0xFF
    want = torch.empty_like(chosen)
    INDEX_TOPK_PREFILL.reference(*args[:6], want, True)
    INDEX_TOPK_PREFILL.overload(*args, provider="deep_gemm")
    assert torch.equal(chosen, want)
    assert (want[3] == -1).all() if where == "query" else not (want == table[2, 1] * PAGE + 4).any()


@cpu_only
def test_long_rows_of_a_deep_gemm_prefill_are_selected_by_lists(fakes, monkeypatch):
    from compiled_dsa.custom_ops.kernels import select_listed

    for name in ("LISTED_SCORES", "SMALLEST_LIST", "LARGEST_LIST", "SAMPLE"):
        monkeypatch.setattr(select_listed, name, 64)
    module, called = fakes["deep_gemm"], []

    def write(*args, **options):
        called.append(args[0].shape[0])
        select_listed.write_slots_listed(*args, **options)

    monkeypatch.setattr(module, "write_slots_listed", write)
    run_index(INDEX_TOPK_PREFILL, "deep_gemm", index_arguments(K=10, budget=1 << 20))
    run_index(INDEX_TOPK_PREFILL, "deep_gemm", index_arguments(K=10, budget=46_000))
    assert called == [6, 4, 2], "the second budget holds part of the rows"


@cpu_only
@pytest.mark.parametrize(("room", "rows"), [(1 << 30, 5000), (5_000_000, 2376), (4_300_000, 1848), (40_000, 18)])
def test_deep_gemm_scores_rows_of_whole_turns(fakes, room, rows):
    """64 heads: tiles of 2 rows, 132 of them at a time."""
    table = torch.zeros(1, 8, dtype=torch.int32)
    cut = fakes["deep_gemm"]._cut(5000, 64, table, 40, room, table.device)
    assert (cut.rows >= 5000) if rows == 5000 else (cut.rows == rows)
    assert min(cut.rows, 5000) * fakes["deep_gemm"]._row_bytes(table, 40) <= room


@cpu_only
def test_weights_and_queries_in_other_orders(fakes):
    """Weights may have any strides; queries in a prefill are refused, since a copy would not be in its budget."""
    args = list(index_arguments(deterministic=True, budget=1 << 20))
    args[1] = args[1].T.contiguous().T
    run_index(INDEX_TOPK_PREFILL, "deep_gemm", args)
    args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert "q is not contiguous" in INDEX_TOPK_PREFILL.refusal("deep_gemm", *args)
    run_index(INDEX_TOPK_DECODE, "deep_gemm", args[:8])


@cpu_only
def test_lists_are_in_the_budget(fakes):
    module, table = fakes["deep_gemm"], torch.zeros(1, 512, dtype=torch.int32)
    for room in (1 << 20, 1 << 24, 1 << 28):
        cut = module._cut(5000, 64, table, 2048, room, table.device)
        assert cut.programs > 0 and cut.rows >= 2
        assert min(cut.rows, 5000) * module._row_bytes(table, 2048) + 8 * cut.listed * cut.programs <= room

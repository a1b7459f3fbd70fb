"""How examples/bench_graphs.py judges replays: what is an exception, what is beyond a bound."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from compiled_dsa import Batch
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.huggingface.small_models import MODELS, SMALL, model_config, random_model

EXAMPLES = Path(__file__).parents[1] / "examples"
NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def examples_are_importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


@pytest.fixture(scope="module")
def judges():
    return importlib.import_module("graph_judges")


# ---- selections ------------------------------------------------------------------------------------------------------

SCORES = torch.tensor([[8.0, 6.0, 5.0, 4.0, NAN], [1.0, -4.0, 3.0, 2.0, 0.0]], dtype=torch.float64)
SLOTS = torch.tensor([[10, 11, 12, 13, -1], [24, 23, 22, 21, 20]])
OWN = torch.tensor([[10, 11], [22, 21]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("other", "margins"),
    [
        ([[11, 10], [21, 22]], [0, 0]),  # in another order
        ([[10, 12], [22, 21]], [1 / 8, 0]),
        ([[11, 13], [22, 24]], [2 / 8, 1 / 4]),  # the K-th in place of the best is as far as the farthest of both
        ([[10, 11], [22, 23]], [0, 6 / 4]),
        ([[10, 10], [22, 21]], [math.inf, 0]),  # twice
        ([[10, -1], [22, 21]], [math.inf, 0]),  # too few
        ([[10, 24], [22, 99]], [math.inf, math.inf]),  # another row's, and nobody's
    ],
)
def test_score_margins(judges, other, margins):
    got = judges.score_margins(SCORES, SLOTS, OWN, torch.tensor(other, dtype=torch.int32))
    assert got.tolist() == margins


def test_a_key_without_a_number_as_score_is_beyond_every_bound(judges):
    slots = SLOTS.clone()
    slots[0, 4] = 14
    assert judges.score_margins(SCORES, slots, OWN, torch.tensor([[10, 14], [22, 21]]))[0] > judges.SCORE_BOUND


def test_rows_that_see_few_keys_select_all_of_them(judges):
    own = torch.tensor([[10, 11, 12, 13, -1, -1]])
    assert judges.score_margins(SCORES[:1], SLOTS[:1], own, own).tolist() == [0]
    one_less = torch.tensor([[10, 11, 12, -1, -1, -1]])
    assert judges.score_margins(SCORES[:1], SLOTS[:1], own, one_less).tolist() == [math.inf]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [PREFILL, DECODE])
@torch.no_grad()
def test_a_model_attends_what_it_is_told(judges, name, kind):
    config = model_config(name, 2, first_k_dense_replace=2, **SMALL | {"index_topk": 8})
    stock = random_model(config, seed=0, device="cpu", dtype=torch.float64)
    model = importlib.import_module("served_model").ServedModel(stock)
    pool = model.make_pool(4, 2, 2 * PAGE)
    pages = torch.arange(4, dtype=torch.int32).view(2, 2)
    lengths = torch.tensor([20, 30])
    batch = Batch.from_lengths(lengths, lengths, pages, 50, kind=PREFILL)
    ids = torch.arange(1, 51)
    model(ids, batch, pool)
    if kind == DECODE:
        ids, batch = ids[:2], Batch.from_lengths(torch.ones_like(lengths), lengths + 1, pages, 2, kind=DECODE)
    want, selections = model.forward_and_selections(ids, batch, pool)
    assert len(selections) == {"deepseek_v32": 2, "glm_moe_dsa": 1}[name]
    with judges.ForcedSelections(selections) as forced:
        assert torch.equal(model(ids, batch, pool), want)
    assert torch.stack(forced.margins).tolist() == [[0] * len(ids)] * len(selections)

    row = len(ids) - 1
    others = [selection.clone() for selection in selections]
    others[0][row, 0] = next(
        slot for slot in range(2 * PAGE, 2 * PAGE + int(batch.visible[row])) if slot not in selections[0][row]
    )
    with judges.ForcedSelections(others) as forced:
        got, given = model.forward_and_selections(ids, batch, pool)
    assert all(map(torch.equal, given, others))
    assert (forced.margins[0] > 0).nonzero().flatten().tolist() == [row]
    assert (got != want).any(1).nonzero().flatten().tolist() == [row]


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_counted_over_batches(judges):
    rows, want = judges.RowFigures(), torch.ones(4, 9)
    rows.add(want, want, [])
    got = want * torch.tensor([[1.0], [1 + judges.ROW_BOUND / 2], [1 + 2 * judges.ROW_BOUND], [NAN]])
    near, far = judges.SCORE_BOUND / 2, 2 * judges.SCORE_BOUND
    rows.add(got, want, [torch.tensor([0.0, near, 0, 0]).double(), torch.tensor([0.0, 0, far, 0]).double()])
    figures = rows.figures()
    assert figures.pop("largest_relative_difference") > 1e100  # of the NaN
    assert figures == {
        "rows": 8,
        "rows_of_other_keys": 2,
        "largest_score_margin": far,
        "rows_beyond_score_bound": 1,
        "rows_beyond_row_bound": 2,
        "row_bound": judges.ROW_BOUND,
        "score_bound": judges.SCORE_BOUND,
    }


# ---- tokens and the exit status --------------------------------------------------------------------------------------


def test_tokens_are_compared_up_to_the_first_difference(judges):
    tokens = torch.tensor([[1, 2, 0], [1, 1, 1], [0, 0, 0]])
    others = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1]])
    logits = [torch.zeros(3, 3) for _ in range(3)]
    logits[1][0] = torch.tensor([4.0, 0.0, 4.0 + 4 * judges.LOGIT_BOUND / 2])
    logits[1][2] = torch.tensor([4.0, 3.0, 0.0])
    figures = judges.token_figures(tokens, others, logits)
    near, far = figures.pop("relative_margins_at_first_difference")
    assert 0 < near < judges.LOGIT_BOUND and far == 0.25
    assert figures == {
        "tokens": 9,
        "rows_that_differ": 2,
        "differences_beyond_logit_bound": 1,
        "logit_bound": judges.LOGIT_BOUND,
    }


def test_faults_are_named_and_exceptions_are_none(judges):
    fine = {"replays_not_bitwise_equal": 0, "compiles_after_warm_up": 0, **judges.RowFigures(9, 4, 0.01).figures()}
    tokens = {"rows_that_differ": 1, "differences_beyond_logit_bound": 0}
    assert judges.faults({"time": {}, "equality": {"decode": fine}, "generate": tokens}) == []
    assert judges.faults({}) == []
    wrong = fine | {"rows_beyond_row_bound": 2, "rows_beyond_score_bound": 3}
    equality = {"decode": fine, "prefill": wrong, "k_only": fine | {"replays_not_bitwise_equal": 1}}
    assert judges.faults({"equality": equality, "generate": tokens | {"differences_beyond_logit_bound": 5}}) == [
        "equality, prefill: rows_beyond_score_bound 3",
        "equality, prefill: rows_beyond_row_bound 2",
        "equality, k_only: replays_not_bitwise_equal 1",
        "generate: differences_beyond_logit_bound 5",
    ]
    assert judges.faults({"equality": {"decode": fine | {"compiles_after_warm_up": 1}}}) != []

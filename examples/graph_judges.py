"""Whether replays compute what the eager model does, where two right computations round differently.

Keys whose index scores are nearly those of the K-th are selected by one and not by the other, and each key that differs
moves a row. So the eager model is made to attend the keys that the replay selected. What differs then is held against
two bounds: ``ROW_BOUND`` for the outputs of every row, and ``SCORE_BOUND`` for the scores of the keys that only one of
the two would select. Rows within them that selected other keys are exceptions, and counted.

Legend: T rows, K keys selected, n positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_dsa.custom_ops import OPS
from compiled_dsa.testing import index_scores_oracle

# For bf16. Of a row's logits, in the norm: rows of decode that attend the same keys differed by up to 0.017 on an H200,
# and one other key of 2048 moves a row by 0.03.
ROW_BOUND = 0.05
# Of the largest score of a row: queries, rounded to e4m3 (steps of 2^-3) after products in bf16, differ by a few 2^-6.
SCORE_BOUND = 2**-4
LOGIT_BOUND = 2**-6  # of the largest logit, which numbers of bf16 give to 2^-8
SELECTING = tuple(OPS[name].overload for name in ("index_topk_decode", "index_topk_prefill", "select_and_absorb"))


class ForcedSelections(TorchDispatchMode):
    """Within it, an eager model attends the keys that it is told.

    Args:
        selections: slots int32 [T, K] for each indexer, in the order in which they are called.

    Attributes:
        margins: [T] for each call so far, see ``score_margins``: how far they are from the model's own choice.
    """

    def __init__(self, selections: Sequence[Tensor]):
        super().__init__()
        self._selections = iter(selections)
        self.margins: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in SELECTING:
            *scored, own = args[:7]
            selection = next(self._selections)
            scores, _, slots = index_scores_oracle(*scored)
            self.margins.append(score_margins(scores, slots, own, selection))
            own.copy_(selection)
        return result


def score_margins(scores: Tensor, slots: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """How far from the K-th score the keys are that only one of two selections has, [T].

    Of all such keys of a row the largest distance, over the largest magnitude of a score; 0 where both selections are
    the same, inf where ``other`` has a slot twice, one that the row does not see, or another number of them.

    Args:
        scores: [T, n], NaN where the row sees nothing.
        slots: [T, n], the physical slots of the scores, -1 where there is none.
        own: [T, K] slots that the scores select, -1 past the last.
        other: [T, K], likewise.
    """
    ours, theirs = _selected(slots, own), _selected(slots, other)
    seen = ~scores.isnan()
    kth = scores.masked_fill(~(ours & seen), torch.inf).amin(1, keepdim=True)
    distances = (scores - kth).abs() / scores.nan_to_num(0.0).abs().amax(1, keepdim=True)
    margins = distances.nan_to_num(torch.inf).masked_fill(ours == theirs, 0.0).amax(1)
    wrong = ((theirs & seen).sum(1) != (other >= 0).sum(1)) | (theirs.sum(1) != ours.sum(1))
    return margins.masked_fill(wrong, torch.inf)


def _selected(slots: Tensor, selection: Tensor) -> Tensor:
    """Which of the slots [T, n] are among those of a selection [T, K]; bool [T, n]."""
    size = 2 + int(max(slots.max(), selection.max()))
    held = torch.zeros(slots.shape[0], size, dtype=torch.bool, device=slots.device)
    held.scatter_(1, selection.long() + 1, True)
    held[:, 0] = False  # of -1
    return held.gather(1, slots.long() + 1)


@dataclass
class RowFigures:
    """What is counted over batches.

    Attributes:
        rows: compared.
        rows_of_other_keys: the exceptions: rows of which a layer selected other keys than the eager model would.
        largest_score_margin: of them.
        rows_beyond_score_bound: of them, those that ``SCORE_BOUND`` does not excuse.
        largest_relative_difference: of a row from the eager model on the same keys, in the norm of its logits.
        rows_beyond_row_bound: rows with a larger one than ``ROW_BOUND``.
    """

    rows: int = 0
    rows_of_other_keys: int = 0
    largest_score_margin: float = 0.0
    rows_beyond_score_bound: int = 0
    largest_relative_difference: float = 0.0
    rows_beyond_row_bound: int = 0

    def add(self, got: Tensor, want: Tensor, margins: Sequence[Tensor]) -> None:
        """Counts the rows of a batch.

        Args:
            got: [T, V] of the replay.
            want: [T, V] of the eager model on the keys that the replay selected.
            margins: [T] for each indexer; none where scores are skipped.
        """
        differences = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
        margin = torch.stack([differences.new_zeros(len(got)), *margins]).amax(0)
        self.rows += len(got)
        self.rows_of_other_keys += int((margin > 0).sum())
        self.largest_score_margin = max(self.largest_score_margin, float(margin.amax()))
        self.rows_beyond_score_bound += int((margin > SCORE_BOUND).sum())
        # a NaN is beyond every bound
        self.largest_relative_difference = max(
            self.largest_relative_difference, float(differences.nan_to_num(torch.inf).amax())
        )
        self.rows_beyond_row_bound += int((~(differences <= ROW_BOUND)).sum())

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"row_bound": ROW_BOUND, "score_bound": SCORE_BOUND}


def token_figures(expected: Tensor, tokens: Tensor, logits: Sequence[Tensor]) -> dict[str, Any]:
    """Where generated tokens first differ, and by how much the largest logit led the second there.

    What follows the first difference of a row has another history, and is not compared.

    Args:
        expected, tokens: [B, N] new tokens.
        logits: N times [B, V], of the expected ones.
    """
    margins = []
    for row in range(len(expected)):
        different = (expected[row] != tokens[row]).nonzero().flatten()
        if different.numel():
            first, second = logits[int(different[0])][row].float().topk(2).values
            margins.append(float((first - second) / first.abs()))
    return {
        "tokens": expected.numel(),
        "rows_that_differ": len(margins),
        "relative_margins_at_first_difference": margins,
        "differences_beyond_logit_bound": sum(not margin <= LOGIT_BOUND for margin in margins),
        "logit_bound": LOGIT_BOUND,
    }


def faults(figures: dict[str, Any]) -> list[str]:
    """What of a record's parts "equality" and "generate", as far as they are there, must not be."""
    parts = {f"equality, {name}": case for name, case in figures.get("equality", {}).items()}
    if "generate" in figures:
        parts["generate"] = figures["generate"]
    must_be_zero = (
        "replays_not_bitwise_equal",
        "compiles_after_warm_up",
        "rows_beyond_score_bound",
        "rows_beyond_row_bound",
        "differences_beyond_logit_bound",
    )
    return [f"{part}: {key} {case[key]}" for part, case in parts.items() for key in must_be_zero if case.get(key)]

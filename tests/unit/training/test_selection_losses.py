from __future__ import annotations

import math

import pytest
import torch

from sedem.errors import ConfigError
from sedem.training.selection_losses import (
    CONDITIONING,
    ConditionedLosses,
    SelectionLosses,
    choose_blocks,
    evidence_recall,
)

SCORES = torch.tensor([[0.5, 3.0, -2.0, 9.0], [4.0, 1.0, 2.0, 0.0]])
EVIDENCE = torch.tensor([[False, False, True, False], [False, True, False, True]])


def test_schedules_by_training_progress() -> None:
    shares = {name: [share(p) for p in (0.0, 0.5, 1.0)] for name, share in CONDITIONING.items()}
    assert shares == {
        "selected": [0.0, 0.0, 0.0],
        "mixed": [0.5, 0.5, 0.5],
        "gold": [1.0, 1.0, 1.0],
        "gold-then-selected": [1.0, 0.25, 0.0],
    }
    with pytest.raises(ConfigError, match="conditioning is 'golden'; it can be selected, mixed"):
        ConditionedLosses(conditioning="golden")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "budget", "chosen"),
    [
        (0.0, 2, [[3, 1], [0, 2]]),
        (0.5, 2, [[2, 3], [0, 2]]),  # only the first coin is below one half
        (1.0, 2, [[2, 3], [1, 3]]),
        (1.0, 1, [[2], [1]]),
        (1.0, 9, [[2, 3, 1, 0], [1, 3, 0, 2]]),
    ],
)
def test_forced_evidence_comes_first_then_the_best_scores(
    share: float, budget: int, chosen: list[list[int]]
) -> None:
    coins = torch.tensor([0.4, 0.6])
    assert choose_blocks(SCORES, EVIDENCE, coins, share, budget).tolist() == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_evidence_is_ordered_by_its_scores_in_any_type(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, 1.25, 9.0, 1.5]], dtype=dtype)
    evidence = torch.tensor([[True, True, False, True]])
    assert choose_blocks(scores, evidence, torch.zeros(1), 1.0, 2).tolist() == [[3, 1]]
    assert choose_blocks(scores, evidence, torch.zeros(1), 1.0, 9).tolist() == [[3, 1, 0, 2]]


@pytest.mark.parametrize(("budget", "recall"), [(1, 0.0), (3, 0.5), (4, 1.0), (9, 1.0)])
def test_recall_is_the_share_with_evidence_among_the_best(budget: int, recall: float) -> None:
    assert float(evidence_recall(SCORES, EVIDENCE, budget)) == recall


def test_recall_counts_only_examples_with_evidence() -> None:
    without = EVIDENCE & torch.tensor([[False], [True]])
    assert float(evidence_recall(SCORES, without, 3)) == 1.0
    assert float(evidence_recall(SCORES, torch.zeros_like(EVIDENCE), 3)) == 0.0


@pytest.mark.parametrize("normalize", [False, True])
def test_the_selection_loss_of_one_example_written_out(normalize: bool) -> None:
    losses = SelectionLosses(
        margin_weight=0.5, margin=2.0, selection_temperature=0.5, normalize_scores=normalize
    )
    scores, evidence = torch.tensor([[1.0, 0.0, 7.0]]), torch.tensor([[True, False, False]])
    blocks, question = torch.tensor([[True, True, False]]), torch.ones(1, 4, dtype=torch.bool)
    # Normalized scores are means over the four question tokens; the third block is padding.
    scale = 0.5 * 4 if normalize else 0.5
    contrast = math.log(1 + math.exp(-1 / scale))
    margin = max(0.0, 2.0 - 1.0 + 0.0)
    found = losses.compute(scores, evidence, blocks, question)
    assert float(found) == pytest.approx(contrast + 0.5 * margin, rel=1e-6)

from __future__ import annotations

from typing import Any

import pytest
import torch

from sedem_lab.training.selection_losses import choose_blocks, evidence_recall

SCORES = torch.tensor([[0.5, 3.0, -2.0, 9.0], [4.0, 1.0, 2.0, 0.0]])
EVIDENCE = torch.tensor([[False, False, True, False], [False, True, False, True]])


def batch(budget: int, evidence: torch.Tensor = EVIDENCE) -> Any:
    return {"evidence": evidence, "coins": torch.tensor([0.4, 0.6]), "budget": budget}


GOLD, SELECTED, MIXED = [[2, 3], [1, 3]], [[3, 1], [0, 2]], [[2, 3], [0, 2]]


@pytest.mark.parametrize(
    ("conditioning", "progress", "budget", "chosen"),
    [
        ("selected", 0.0, 2, SELECTED),
        ("mixed", 0.9, 2, MIXED),  # only the first coin is below one half
        ("gold", 0.9, 2, GOLD),
        ("gold", 0.9, 1, [[2], [1]]),
        ("gold", 0.9, 9, [[2, 3, 1, 0], [1, 3, 0, 2]]),
        ("gold-then-selected", 0.0, 2, GOLD),
        ("gold-then-selected", 0.2, 2, GOLD),
        ("gold-then-selected", 0.35, 2, MIXED),
        ("gold-then-selected", 0.7, 2, SELECTED),
        ("gold-then-selected", 1.0, 2, SELECTED),
    ],
)
def test_forced_evidence_comes_first_then_the_best_scores(
    conditioning: Any, progress: float, budget: int, chosen: list[list[int]]
) -> None:
    assert choose_blocks(SCORES, batch(budget), conditioning, progress).tolist() == chosen
    nothing = batch(2, torch.zeros_like(EVIDENCE))
    assert choose_blocks(SCORES, nothing, conditioning, progress).tolist() == SELECTED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_evidence_is_ordered_by_its_scores_in_any_type(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, 1.25, 9.0, 1.5]], dtype=dtype)
    given: Any = {"evidence": torch.tensor([[True, True, False, True]]), "coins": torch.zeros(1)}
    chosen = choose_blocks(scores, {**given, "budget": 9}, "gold", 0.0)
    assert chosen.tolist() == [[3, 1, 0, 2]]


@pytest.mark.parametrize(("budget", "recall"), [(1, 0.0), (3, 0.5), (4, 1.0), (9, 1.0)])
def test_recall_is_the_share_with_evidence_among_the_best(budget: int, recall: float) -> None:
    assert float(evidence_recall(SCORES, batch(budget))) == recall
    # Only examples with evidence count.
    without = EVIDENCE & torch.tensor([[False], [True]])
    assert float(evidence_recall(SCORES, batch(3, without))) == 1.0
    assert float(evidence_recall(SCORES, batch(3, torch.zeros_like(EVIDENCE)))) == 0.0

"""Losses of a selector, and which blocks an answer is trained on.

Letters: B batch, N blocks, K selected blocks, Q question tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from sedem.method.losses import selection_loss
from sedem.validation import Flag, Number, NumberAbove0, Settings

Conditioning = Literal["selected", "mixed", "gold", "gold-then-selected"]

CONDITIONING: dict[Conditioning, Callable[[float], float]] = {
    "selected": lambda progress: 0.0,
    "mixed": lambda progress: 0.5,
    "gold": lambda progress: 1.0,
    "gold-then-selected": lambda progress: max(0.0, 1.0 - 1.5 * progress),
}
"""Share of examples whose evidence is forced into the selected blocks, by training progress."""


class SelectionLosses(Settings):
    """Weights and temperature of L_ret; the defaults are the paper's.

    Attributes:
        normalize_scores: divide scores by the number of question tokens before L_InfoNCE; the
            margin always applies to sums.
    """

    select: Number = 1.0
    margin_weight: Number = 0.5
    margin: Number = 2.0
    selection_temperature: NumberAbove0 = 0.07
    normalize_scores: Flag = False

    def compute(
        self, scores_BN: Tensor, evidence_BN: Tensor, blocks_BN: Tensor, question_mask_BQ: Tensor
    ) -> Tensor:
        """L_ret of a batch.

        Args:
            blocks_BN: False where a block is padding.
            question_mask_BQ: False where a question token is padding.
        """
        temperature: float | Tensor = self.selection_temperature
        if self.normalize_scores:
            temperature = self.selection_temperature * question_mask_BQ.sum(1, keepdim=True)
        return selection_loss(
            scores_BN,
            evidence_BN,
            blocks_BN,
            temperature=temperature,
            margin=self.margin,
            margin_weight=self.margin_weight,
        )


class ConditionedLosses(SelectionLosses):
    """Selection losses for a selector that is trained with a reader of raw text.

    Attributes:
        conditioning: which paragraphs the reader learns from; a name in `CONDITIONING`.
    """

    conditioning: Conditioning = "gold-then-selected"


def choose_blocks(
    scores_BN: Tensor, evidence_BN: Tensor, coins_B: Tensor, share: float, budget: int
) -> Tensor:
    """Choose the blocks that each answer is conditioned on `[B, K]`, best first.

    Args:
        coins_B: a random number from 0 to 1 for each example.
        share: share of examples whose evidence comes first.
        budget: K.
    """
    forced_BN = evidence_BN & (coins_B < share)[:, None]
    # Two stable sorts, the second by whether a block is forced. Adding a large number to forced
    # scores would round them to one value in bfloat16 and lose their order.
    best_BN = scores_BN.sort(dim=1, descending=True, stable=True).indices
    first_BN = forced_BN.gather(1, best_BN).byte().sort(dim=1, descending=True, stable=True).indices
    return best_BN.gather(1, first_BN)[:, :budget]


def evidence_recall(scores_BN: Tensor, evidence_BN: Tensor, budget: int) -> Tensor:
    """Among examples with evidence, the share with evidence in some of their K best blocks."""
    best_BK = scores_BN.topk(min(budget, scores_BN.shape[1])).indices
    found_B = evidence_BN.gather(1, best_BK).any(1)[evidence_BN.any(1)]
    return found_B.float().mean() if len(found_B) else scores_BN.new_zeros(())

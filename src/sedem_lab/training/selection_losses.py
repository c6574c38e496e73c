"""Losses of a selector, and which blocks an answer is trained on.

Letters: B batch, N blocks, K selected blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from sedem.config import Flag, Number, NumberAbove0, Settings
from sedem.method.losses import mean_where, selection_loss
from sedem_lab.training.block_batch import BlockBatch

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

    def compute(self, scores_BN: Tensor, batch: BlockBatch) -> Tensor:
        """L_ret of a batch."""
        temperature: float | Tensor = self.selection_temperature
        if self.normalize_scores:
            temperature = temperature * batch["question_mask"].sum(1, keepdim=True)
        return selection_loss(
            scores_BN,
            batch["evidence"],
            batch["blocks"],
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
    scores_BN: Tensor, batch: BlockBatch, conditioning: Conditioning, progress: float
) -> Tensor:
    """Choose the blocks that each answer is conditioned on `[B, K]`, best first.

    Args:
        progress: share of the training that is done.
    """
    share = CONDITIONING[conditioning](progress)
    forced_BN = batch["evidence"] & (batch["coins"] < share)[:, None]
    # Two stable sorts, the second by whether a block is forced. Adding a large number to forced
    # scores would round them to one value in bfloat16 and lose their order.
    best_BN = scores_BN.sort(dim=1, descending=True, stable=True).indices
    first_BN = forced_BN.gather(1, best_BN).byte().sort(dim=1, descending=True, stable=True).indices
    return best_BN.gather(1, first_BN)[:, : batch["budget"]]


def evidence_recall(scores_BN: Tensor, batch: BlockBatch) -> Tensor:
    """Among examples with evidence, the share with evidence in some of their K best blocks."""
    best_BK = scores_BN.topk(min(batch["budget"], scores_BN.shape[1])).indices
    evidence_BN = batch["evidence"]
    return mean_where(evidence_BN.gather(1, best_BK).any(1).float(), evidence_BN.any(1))

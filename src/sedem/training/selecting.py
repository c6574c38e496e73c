"""What trains a selector, whatever it selects: losses, and the blocks that answers see meanwhile.

Letters: B batch, N blocks, Q question tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.errors import ConfigError
from sedem.method.losses import selection_loss

CONDITIONING: dict[str, Callable[[float], float]] = {
    "selected": lambda progress: 0.0,
    "mixed": lambda progress: 0.5,
    "gold": lambda progress: 1.0,
    "gold-then-selected": lambda progress: max(0.0, 1.0 - 1.5 * progress),
}
"""Share of examples whose evidence is forced among the selected blocks, by training progress."""


def check_conditioning(name: str) -> None:
    """Refuse an unknown schedule.

    Raises:
        ConfigError: with those that there are.
    """
    if name not in CONDITIONING:
        raise ConfigError(f"losses.conditioning is '{name}'; it can be {', '.join(CONDITIONING)}")


@dataclass(frozen=True)
class SelectionLosses:
    """Weights and temperature of L_ret; the defaults are the paper's.

    Attributes:
        select: lambda_ret.
        margin_weight: lambda_margin.
        margin: gamma of L_margin.
        selection_temperature: tau of L_InfoNCE.
        normalize_scores: divide scores by the number of question tokens before L_InfoNCE; the
            margin always applies to sums.
    """

    select: float = 1.0
    margin_weight: float = 0.5
    margin: float = 2.0
    selection_temperature: float = 0.07
    normalize_scores: bool = False

    def __post_init__(self) -> None:
        if self.selection_temperature <= 0:
            raise ConfigError(
                f"losses.selection_temperature is {self.selection_temperature}; it must be above 0"
            )

    def of(
        self, scores_BN: Tensor, evidence_BN: Tensor, blocks_BN: Tensor, question_mask_BQ: Tensor
    ) -> Tensor:
        """L_ret; with `normalize_scores` InfoNCE sees means, the margin still sums."""
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


@dataclass(frozen=True)
class ConditionedLosses(SelectionLosses):
    """The same beside a reader of raw text.

    Attributes:
        conditioning: which paragraphs the reader learns from; a name in `CONDITIONING`.
    """

    conditioning: str = "gold-then-selected"

    def __post_init__(self) -> None:
        check_conditioning(self.conditioning)
        super().__post_init__()


def conditioned(
    scores_BN: Tensor, evidence_BN: Tensor, coins_B: Tensor, share: float, budget: int
) -> Tensor:
    """The blocks that condition each answer `[B, K]`, best first.

    Args:
        scores_BN: s_n.
        evidence_BN: e_n.
        coins_B: a number from 0 to 1 for each example.
        share: of examples whose evidence goes first.
        budget: K.
    """
    forced_BN = evidence_BN & (coins_B < share)[:, None]
    # Above every score: a cosine sum never exceeds the number of question tokens.
    scores_BN = torch.where(forced_BN, scores_BN + 1e6, scores_BN)
    return scores_BN.sort(dim=1, descending=True, stable=True).indices[:, :budget]


def recall(scores_BN: Tensor, evidence_BN: Tensor, budget: int) -> Tensor:
    """Share of the examples with evidence that have some among their own K best blocks."""
    own_BK = scores_BN.topk(min(budget, scores_BN.shape[1])).indices
    found_B = evidence_BN.gather(1, own_BK).any(1)[evidence_BN.any(1)]
    return found_B.float().mean() if len(found_B) else scores_BN.new_zeros(())


def rows_at(rows_L: Tensor, index: Tensor) -> Tensor:
    """Rows by index `[..., *row]`; index -1 is a row of zeros."""
    padded = torch.cat([rows_L, rows_L.new_zeros(1, *rows_L.shape[1:])])
    return padded[index]

"""Guided attention: the score of a block biases the attention to it. Ours.

The paper discards the selector's scores after choosing K blocks, and the decoder must find out by
itself which of them matter. Here the scores also become an attention bias (docs/deviations.md). The
bias carries gradient, so the answer loss trains the selector, with or without labels.

Letters: B batch, K selected blocks, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def guidance_bias(scores_BK: Tensor, tau: Tensor | float) -> Tensor:
    """(s_n - max s) / tau, added to the attention logits on the states of block n.

    The best block has bias 0, so one selected block is read as in the paper.

    Args:
        scores_BK: s_n of the selected blocks; -inf where there is no block.

    Returns:
        Biases `[B, K]` in float32; 0 where there is no block.
    """
    scores_BK = scores_BK.float()
    if not scores_BK.shape[-1]:
        return scores_BK
    absent_BK = scores_BK == -torch.inf
    best_B1 = scores_BK.amax(-1, keepdim=True)
    # Zeroed before the division: -inf times a gradient of 0 is NaN.
    behind_BK = (scores_BK - best_B1).masked_fill(absent_BK, 0.0)
    return behind_BK / tau


class Guidance(nn.Module):
    """Guided attention with a trained temperature.

    All layers share one tau and therefore one bias. The same softmax(s / tau) determines how many
    blocks a question needs (`budgets.blocks_for_mass`).

    Args:
        tau: the initial temperature, in units of a score, which is a sum of cosines over question
            tokens.
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.tensor(float(tau)).log())

    @property
    def tau(self) -> Tensor:
        """The temperature, always positive."""
        return self.log_tau.exp()

    def forward(self, scores_BK: Tensor) -> Tensor:
        """Biases `[B, K]` of selected blocks with scores `[B, K]`."""
        return guidance_bias(scores_BK, self.tau)

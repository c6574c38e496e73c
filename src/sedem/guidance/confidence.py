"""Confidence that the documents contain the evidence: a logistic function of two features. Ours.

The paper ranks blocks and always answers. The scores also show whether any block fits: if the
evidence is missing, the best block matches each question token less well, and stands out less from
the next ones.

Letters: B questions, N blocks, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

RIVALS = 7
"""Number of next-best blocks that the best one is compared with. Fixed, so that the features depend
little on the size of a bank and the candidates of a large bank include all of them."""

FEATURES = ("best", "lead")


def confidence_features(scores_N: Tensor, question_tokens: int) -> Tensor:
    """The features of one question.

    A score is a sum of cosines over question tokens, so all features are divided by their count.

    Args:
        scores_N: s_n of every block; -inf for non-candidates.
        question_tokens: number of tokens of the question.

    Returns:
        `[F]` in float32: the best score, and by how much it exceeds the mean of the next `RIVALS`
        scores. With only one block the lead is 0, because there is nothing to compare it with.
    """
    best_N = scores_N.float().topk(min(1 + RIVALS, len(scores_N))).values
    rivals_N = best_N[1:][best_N[1:] > -torch.inf]
    lead = best_N[0] - rivals_N.mean() if len(rivals_N) else torch.zeros_like(best_N[0])
    return torch.stack([best_N[0], lead]) / question_tokens


class Confidence(nn.Module):
    """The probability that a bank has the evidence, as a logistic function of the features.

    It has three parameters, which `fit` sets after training. Before that it returns 0.5.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(FEATURES)))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, features_BF: Tensor) -> Tensor:
        """Probabilities `[B]` from features `[B, F]`."""
        return (features_BF.to(self.weight) @ self.weight + self.bias).sigmoid()

    def fit(self, features_BF: Tensor, present_B: Tensor) -> None:
        """Fit the parameters by maximum likelihood.

        Args:
            present_B: whether the documents had the evidence.
        """
        features_BF, target_B = features_BF.double(), present_B.double()
        # Features of one scale make the problem well conditioned. A small penalty keeps weights
        # finite if the features separate the two classes.
        mean_F, spread_F = features_BF.mean(0), features_BF.std(0).clamp_min(1e-9)
        scaled_BF = (features_BF - mean_F) / spread_F
        weight_F = torch.zeros(len(FEATURES), dtype=torch.float64, requires_grad=True)
        bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight_F, bias], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            logits_B = scaled_BF @ weight_F + bias
            value = nn.functional.binary_cross_entropy_with_logits(logits_B, target_B)
            value = value + 1e-4 * weight_F.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        with torch.no_grad():
            self.weight.copy_(weight_F / spread_F)
            self.bias.copy_(bias - (weight_F * mean_F / spread_F).sum())

"""Queries from other states than those that W_Q was trained on. Ours, not in the paper.

In the paper, the frozen encoder reads the question to select blocks, and the decoder's own lower
layers read it again to answer. `read_once` spares the first pass: the queries come from the states
at the injection layer, which the answer needs anyway. A product of low rank is added to W_Q for it.

A second hop finds blocks that only the first one makes the question lead to. "Where was the founder
of Arlo born?" needs the block that names the founder, and then one that the question shares no word
with. The encoder therefore reads the best block and then the question again. The question's states
now know the block, and queries of another W_Q look for what is left.

Letters: B questions, Q question tokens, E width, R heads, H width of a head, N blocks, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sedem.guidance.scores import Confidence
from sedem.method.selector import Selector

READ_ONCE_RANK, HOP_RANK = 32, 8
"""Ranks of what is added to W_Q for the decoder's states, and for the second hop."""
PARTS = ("states", "words", "named")
"""What the scores of a second hop are added to: s_n, BM25 of the question's words, and BM25 of the
words of the first block."""
WEIGHTS = (0.0, 0.05, 0.05)
"""Weights of `PARTS` at the start of training."""


class Queries(nn.Module):
    """W_Q for other states: the selector's, plus a product of low rank.

    Args:
        selector: the selector whose keys the queries are compared with.

    Attributes:
        down, up: the two factors of what is added.
    """

    def __init__(self, selector: Selector, rank: int) -> None:
        super().__init__()
        own = selector.w_query
        self.down = nn.Linear(own.in_features, rank, bias=False)
        self.up = nn.Linear(rank, own.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def queries(self, selector: Selector, hidden_BQE: Tensor) -> Tensor:
        """Queries `[B, Q, R, H]` from the states of question tokens."""
        hidden_BQE = selector.norm_query(hidden_BQE)
        return selector.unit_heads(selector.w_query(hidden_BQE) + self.up(self.down(hidden_BQE)))


class SecondHop(Queries):
    """W_Q of the second hop, and how its scores join those of the first.

    Args:
        selector: the selector whose keys it is compared with, and whose W_Q it begins as.

    Attributes:
        weights: units of its scores that one unit of each of `PARTS` is worth.
        open: the probability that a question needs a second hop.
    """

    def __init__(self, selector: Selector) -> None:
        super().__init__(selector, HOP_RANK)
        self.weights = nn.Parameter(torch.tensor(WEIGHTS))
        self.open = Confidence(3)

    def forward(
        self, again_N: Tensor, states_N: Tensor, words_N: Tensor, named_N: Tensor
    ) -> Tensor:
        """What the other blocks are ordered by `[N]`, given their scores and `PARTS`."""
        states, words, named = self.weights
        return again_N + states * states_N + words * words_N + named * named_N


def reordered(total_N: Tensor, again_N: Tensor, first: int) -> Tensor:
    """What blocks are selected and guided by after a second hop `[N]`.

    The second hop orders the others: the best of them gets the second best total of the first hop,
    and so on. Its scores are not on the scale for which guidance was trained, and that of the first
    block, of whose words its queries were made, would suppress all others.

    Args:
        total_N: what the first hop selects by, best at `first`; -inf for non-candidates.
        again_N: what the second one orders the others by.
    """
    is_other_N = torch.arange(len(total_N)) != first
    others_N = is_other_N.nonzero()[:, 0]
    order_N = others_N[again_N[others_N].argsort(descending=True, stable=True)]
    found_N = total_N.clone()
    found_N[order_N] = total_N[others_N].sort(descending=True).values
    return found_N


def open_features(
    total_N: Tensor, states_N: Tensor, covered: float, question_tokens: int
) -> Tensor:
    """The features of whether a question needs a second hop `[F]`.

    Args:
        total_N: what the first block is selected by; -inf for non-candidates.
        states_N: s_n of the blocks.
        covered: share of the question's words in the first block, by their weights.

    Returns:
        That share, the first block's s_n, and how far the next block is behind it.
    """
    best = total_N.topk(min(2, len(total_N)))
    behind = best.values[0] - best.values[-1]
    state = states_N[best.indices[0]]
    return torch.stack([torch.tensor(covered), state / question_tokens, behind / question_tokens])

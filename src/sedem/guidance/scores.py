"""What selecting has beyond the paper: what scores tell besides the K best; other queries. Ours.

The paper discards the selector's scores after choosing K blocks, and always answers. Here:

    guided attention   the score of a block biases the attention to it (docs/deviations.md). The
                       bias carries gradient, so the answer loss trains the selector, with or
                       without labels.
    adaptive budgets   softmax(s / tau) determines how many blocks a question needs.
    confidence         a logistic function of two features of s. If the evidence is missing, the
                       best block matches each question token less well, and stands out less from
                       the next ones.

Queries come from other states than those that W_Q was trained on:

    read once          in the paper, the frozen encoder reads the question to select blocks, and the
                       decoder's own lower layers read it again to answer. The first pass is spared:
                       the queries come from the states at the injection layer, which the answer
                       needs anyway. A product of low rank is added to W_Q for it.
    second hop         it finds blocks that only the first one makes the question lead to. "Where
                       was the founder of Arlo born?" needs the block that names the founder, and
                       then one that the question shares no word with. The encoder reads the best
                       block and then the question again. The question's states now know the block,
                       and queries of another W_Q look for what is left.

Letters: B batch, Q question tokens, K selected blocks, N blocks, F features, E width, R heads, H
width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sedem.config import Condition, SedemConfig
from sedem.errors import ConfigError
from sedem.method.selector import Selector, is_count

AUTO = "auto"

RIVALS = 7
"""Number of next-best blocks that the best one is compared with. Fixed, so that the features depend
little on the size of a bank and the candidates of a large bank include all of them."""

FEATURES = ("best", "lead")

READ_ONCE_RANK, HOP_RANK = 32, 8
"""Ranks of what is added to W_Q for the decoder's states, and for the second hop."""
PARTS = ("states", "words", "named")
"""What the scores of a second hop are added to: s_n, BM25 of the question's words, and BM25 of the
words of the first block."""
WEIGHTS = (0.0, 0.05, 0.05)
"""Weights of `PARTS` at the start of training."""


class Guidance(nn.Module):
    """Guided attention with a trained temperature.

    All layers share one tau and therefore one bias. The same softmax(s / tau) determines how many
    blocks a question needs (`blocks_for_mass`).

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
        return behind_BK / self.tau


def combined_scores(states_N: Tensor | None, words_N: Tensor | None, config: SedemConfig) -> Tensor:
    """s_n + w b_n, what blocks are selected by if words count too. Not in the paper.

    A state score is a sum over question tokens and BM25 a sum over question words, so one weight
    serves short and long questions.

    Args:
        states_N: s_n of every block; -inf for non-candidates, None if states do not count.
        words_N: BM25 of every block, None if words do not count.
    """
    if words_N is None:
        assert states_N is not None
        return states_N
    weighted_N = config.word_weight * words_N
    return weighted_N if states_N is None else states_N + weighted_N


@dataclass(frozen=True)
class Auto:
    """An adaptive budget: the fewest blocks that reach a mass of softmax(s / tau). Extension.

    tau is that of guided attention, so the model needs guidance. `k="auto"` is `Auto()`.

    Attributes:
        mass: the share to reach of the total mass of the `most` best blocks; None means the model's
            `auto_mass`.
        least: the fewest blocks; None means the model's `auto_min`.
        most: the most blocks; None means the model's `auto_max`.

    Raises:
        ConfigError: a value is out of its range, or `least` is more than `most`.
    """

    mass: float | None = None
    least: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.mass is not None and not is_share(self.mass):
            raise ConfigError(f"mass is {self.mass!r}; it must be a number from 0 to 1")
        for name, value in (("least", self.least), ("most", self.most)):
            if value is not None and not is_count(value):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ConfigError(
                f"least is {self.least} but most {self.most}; the fewest blocks cannot be more "
                "than the most"
            )

    def filled(self, config: SedemConfig) -> tuple[float, int, int]:
        """Mass, fewest and most blocks; the model's values where none is given.

        If only one limit is given, the model's other limit yields to it.
        """
        least = config.auto_min if self.least is None else self.least
        most = config.auto_max if self.most is None else self.most
        if self.least is None:
            least = min(least, most)
        if self.most is None:
            most = max(least, most)
        return config.auto_mass if self.mass is None else self.mass, least, most


Budget = int | str | Auto
"""A number of blocks, "all", "auto" or `Auto`."""


def blocks_for_mass(
    scores_N: Tensor, tau: Tensor | float, mass: float, least: int, most: int
) -> int:
    """The fewest blocks, best first, whose softmax(s / tau) reaches a mass. Not in the paper.

    The softmax is over the `most` best blocks, because only they can be used: guided attention
    weights each of them by the same exp(s / tau), before the decoder's own logits. Over all blocks,
    the shares of very many bad ones would add up, and every question to a large bank would use
    `most`. The limit also makes the count exact where only candidates have scores.

    Args:
        scores_N: s_n of every block; -inf for non-candidates.
        least: the fewest blocks to return, if there are that many.
        most: the most blocks to return.
    """
    best_K = scores_N.double().topk(min(most, len(scores_N))).values
    best_K = best_K[best_K > -torch.inf]
    reached_K = (best_K / torch.as_tensor(tau).to(best_K)).softmax(-1).cumsum(-1)
    count = int((reached_K < mass).sum()) + 1
    return min(max(count, least), len(best_K))


def is_share(value: object) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def text_count(condition: Condition, count: int) -> int:
    """How many of the `count` best blocks the decoder reads as text; the others are memory."""
    return {"memory": 0, "text": count, "both": min(1, count)}[condition]


def confidence_features(scores_N: Tensor, question_tokens: int) -> Tensor:
    """The features of one question.

    A score is a sum of cosines over question tokens, so all features are divided by their count.

    Args:
        scores_N: s_n of every block; -inf for non-candidates.

    Returns:
        `[F]` in float32: the best score, and by how much it exceeds the mean of the next `RIVALS`
        scores. With only one block the lead is 0, because there is nothing to compare it with.
    """
    best_N = scores_N.float().topk(min(1 + RIVALS, len(scores_N))).values
    rivals_N = best_N[1:][best_N[1:] > -torch.inf]
    lead = best_N[0] - rivals_N.mean() if len(rivals_N) else torch.zeros_like(best_N[0])
    return torch.stack([best_N[0], lead]) / question_tokens


COVERED = 0.2
"""Share of a question's words (`Words.covered`) that make a block worth an answer anyhow."""


class Confidence(nn.Module):
    """A probability, such as that a bank has the evidence, as a logistic function of features.

    `fit` sets its parameters after training. Before that it returns 0.5.
    """

    def __init__(self, features: int = len(FEATURES)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, features_BF: Tensor) -> Tensor:
        """Probabilities `[B]` from features `[B, F]`."""
        return (features_BF.to(self.weight) @ self.weight + self.bias).sigmoid()

    def fit(self, features_BF: Tensor, present_B: Tensor) -> None:
        """Fit the parameters by maximum likelihood.

        Args:
            present_B: whether what it is the probability of was so.
        """
        features_BF, target_B = features_BF.double(), present_B.double()
        # Features of one scale make the problem well conditioned. A small penalty keeps weights
        # finite if the features separate the two classes.
        mean_F, spread_F = features_BF.mean(0), features_BF.std(0).clamp_min(1e-9)
        scaled_BF = (features_BF - mean_F) / spread_F
        weight_F = torch.zeros_like(self.weight, dtype=torch.float64, requires_grad=True)
        bias = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def loss() -> Tensor:
            logits_B = scaled_BF @ weight_F + bias
            value = nn.functional.binary_cross_entropy_with_logits(logits_B, target_B)
            return value + 1e-4 * weight_F.square().sum()

        minimize(loss, [weight_F, bias])
        with torch.no_grad():
            self.weight.copy_(weight_F / spread_F)
            self.bias.copy_(bias - (weight_F * mean_F / spread_F).sum())


def minimize(loss: Callable[[], Tensor], parameters: list[Tensor]) -> None:
    """Set a few parameters in place to where a smooth loss is smallest."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


# Queries from other states


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

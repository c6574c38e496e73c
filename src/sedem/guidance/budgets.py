"""How many blocks an answer uses: an adaptive budget, and blocks read as text. Not in the paper.

Letters: N blocks, K selected blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.config import Condition, SedemConfig
from sedem.errors import ConfigError
from sedem.method.selector import is_count

AUTO = "auto"


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
        tau: the temperature of guided attention.
        mass: the mass to reach, from 0 to 1.
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

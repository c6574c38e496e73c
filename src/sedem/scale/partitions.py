"""Selection by parts: a bank's blocks are split, each part selects, and the results are merged.

The merged result equals that of the whole bank, including ties: blocks are ranked by score, and of
equal scores the earlier block is first. A block among the best of the bank is also among the best
of its part, so the best blocks of each part are enough.

Letters: N blocks, n blocks of one part, K blocks that are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.answering.requests import Request, auto_budget, budget_of
from sedem.guidance.confidence import RIVALS
from sedem.method.selector import ALL, resolve_budget, select
from sedem.modules import SedemModules


@dataclass(frozen=True, eq=False)
class Found:
    """The best blocks of a part or of a bank.

    Attributes:
        blocks: their indices in the bank `[K]`, best first.
        scores: their scores `[K]`, in float32.
    """

    blocks: NDArray[np.int64]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        """K."""
        return len(self.blocks)

    def spread(self, blocks: int) -> Tensor:
        """Return the score of every block of the bank `[N]`; -inf for one that was not found.

        Args:
            blocks: N.
        """
        scores_N = torch.full((blocks,), -torch.inf)
        # Copies, because arrays from another process may be read-only.
        scores_N[torch.tensor(self.blocks)] = torch.tensor(self.scores)
        return scores_N


def best(scores_n: Tensor, first: int, count: int | None) -> Found:
    """Return the best blocks of a part.

    Args:
        scores_n: score of each of its blocks, on the CPU; -inf for one that is not a candidate.
        first: index of its first block in the bank.
        count: maximum number; None means every candidate.
    """
    most = int((scores_n > -torch.inf).sum())
    chosen_K = select(scores_n, most if count is None else min(count, most))
    return Found(chosen_K.numpy() + first, scores_n[chosen_K].numpy())


def merge(parts: Sequence[Found], count: int | None) -> Found:
    """Merge the best blocks of all parts into the best blocks of the bank.

    Args:
        parts: what each part found when asked for at least `count` blocks, in any order.
        count: maximum number; None means all.
    """
    blocks = np.concatenate([part.blocks for part in parts])
    scores = np.concatenate([part.scores for part in parts])
    # The last key has priority; -0.0 and 0.0 are equal here, as in `select`.
    order = np.lexsort((blocks, -scores))[:count]
    return Found(blocks[order], scores[order])


def needed(model: SedemModules, request: Request) -> int | None:
    """Return how many of the best blocks an answer depends on.

    These are the blocks that it is conditioned on, those that `k="auto"` weighs, and those whose
    scores the confidence compares.

    Args:
        model: its settings are the defaults of the request.
        request: the request.

    Returns:
        The number; None if it depends on every block.

    Raises:
        ConfigError: `k` cannot be used.
    """
    if request.ranking or request.blocks is not None:
        return None
    auto = auto_budget(model, request.k)
    if auto is None:
        budget = budget_of(model, request.k)
        if budget == ALL:
            return None
        count = resolve_budget(budget, np.iinfo(np.int64).max)
    else:
        count = auto[2]
    return max(count, 1 + RIVALS) if model.confidence is not None else count

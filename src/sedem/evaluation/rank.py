"""How many directions memory slots use: normalized effective rank (app. Effective-Rank Definition).

Letters: M slots, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sedem.evaluation.metrics import summarize
from sedem.model import SeDeM
from sedem.types import Document


def effective_rank(memory_MD: Tensor) -> float:
    """Exponential of the entropy of the singular values, taken as shares of their sum.

    Between 1, for slots that are multiples of one vector, and min(M, D), for orthogonal slots of
    one length; slots of nothing but zeros have none, 0.
    """
    values = torch.linalg.svdvals(memory_MD.double())
    shares = values[values > 0] / values.sum()
    return float(torch.exp(-(shares * shares.log()).sum())) if len(shares) else 0.0


def normalized_effective_rank(memories: Iterable[Tensor]) -> dict[str, Any]:
    """Effective rank of slots over their number, in percent, averaged over blocks or segments.

    Args:
        memories: slots of each `[M, D]`.

    Returns:
        Mean, its interval over them, and how many there are.
    """
    return summarize([100.0 * effective_rank(slots_MD) / len(slots_MD) for slots_MD in memories])


def block_slots(model: SeDeM, documents: Sequence[Document]) -> Iterator[Tensor]:
    """Slots of every block of some documents; those that only pad a block are left out."""
    bank = model.read(documents)
    for indices, memory_NJD in bank.scan():
        real_NJ = bank.slot_tokens(indices) > 0
        for memory_JD, real_J in zip(memory_NJD, real_NJ, strict=True):
            yield memory_JD[real_J]

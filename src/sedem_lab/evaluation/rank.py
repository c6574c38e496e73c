"""The number of directions that memory slots use (appendix Effective-Rank Definition).

Letters: M slots, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sedem.model import SeDeM
from sedem.types import Document
from sedem_lab.evaluation.metrics import summarize


def effective_rank(memory_MD: Tensor) -> float:
    """The exponential of the entropy of the singular values, as shares of their sum.

    It is 1 for slots that are multiples of one vector, min(M, D) for orthogonal slots of equal
    length, and 0 for slots that are all zeros.
    """
    values = torch.linalg.svdvals(memory_MD.double())
    shares = values[values > 0] / values.sum()
    return float(torch.exp(-(shares * shares.log()).sum())) if len(shares) else 0.0


def normalized_effective_rank(memories: Iterable[Tensor]) -> dict[str, Any]:
    """The effective rank of slots `[M, D]` over their number, in percent, averaged over blocks."""
    return summarize([100.0 * effective_rank(slots_MD) / len(slots_MD) for slots_MD in memories])


def block_slots(model: SeDeM, documents: Sequence[Document]) -> Iterator[Tensor]:
    """Slots of every block of the given documents, without padding."""
    bank = model.read(documents)
    for indices, memory_NJD in bank.scan():
        mask_NJ = bank.slot_tokens(indices) > 0
        for memory_JD, mask_J in zip(memory_NJD, mask_NJ, strict=True):
            yield memory_JD[mask_J]

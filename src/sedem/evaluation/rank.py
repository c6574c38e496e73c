"""How many directions memory slots use: normalized effective rank (app. Effective-Rank Definition).

Letters: M slots, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sedem.contracts import Document
from sedem.evaluation.metrics import summarize
from sedem.model import SeDeM


def effective_rank(memory_MD: Tensor) -> float:
    """Exponential of the entropy of the singular values, taken as shares of their sum.

    Between 1, for slots that are multiples of one vector, and min(M, D), for orthogonal slots of
    one length; slots of nothing but zeros have none, 0.
    """
    values = torch.linalg.svdvals(memory_MD.double())
    shares = values[values > 0] / values.sum()
    return float(torch.exp(-(shares * shares.log()).sum())) if len(shares) else 0.0


def normalized_effective_rank(model: SeDeM, documents: Sequence[Document]) -> dict[str, Any]:
    """Effective rank of a block's slots over their number, in percent, averaged over blocks.

    Slots that only pad a block are left out, so they neither add rank nor count as slots.

    Args:
        model: reads.
        documents: whose blocks.

    Returns:
        Mean, its interval over blocks, and the number of blocks.
    """
    bank = model.read(documents)
    shares = []
    for indices, memory_NJD in bank.scan():
        real_NJ = bank.slot_tokens(indices) > 0
        for memory_JD, real_J in zip(memory_NJD, real_NJ, strict=True):
            slots_MD = memory_JD[real_J]
            shares.append(100.0 * effective_rank(slots_MD) / len(slots_MD))
    return summarize(shares)

"""What passes between one trained baseline and what all of them share.

Letters: B batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sedem.engine.interface import Step
from sedem.types import Document


@dataclass(frozen=True)
class Remembered:
    """What a method keeps of a context.

    Attributes:
        content: whatever it answers from.
        stored_bytes: of it; None means that it is the text itself, in UTF-8.
        notes: one sentence for each thing that was done to the context.
    """

    content: Any
    stored_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContextMemory:
    """Documents that were read.

    Attributes:
        documents: in their order.
        ends: character of the joined text after each of its tokens.
        remembered: what is kept of it.
    """

    documents: list[Document]
    ends: list[int]
    remembered: Remembered

    @property
    def stored_bytes(self) -> int:
        """What is kept to answer from."""
        if self.remembered.stored_bytes is not None:
            return self.remembered.stored_bytes
        return sum(len(document.text.encode()) for document in self.documents)


@dataclass(frozen=True)
class Begun:
    """Where a batch of answers begins.

    Attributes:
        logits: of the first answer token `[B, V]`.
        advance: runs one more token of every row.
        conditioning: positions that the decoder saw before it, row by row.
    """

    logits: Tensor
    advance: Step
    conditioning: list[int]


def own_generator(seed: int, ids: Tensor) -> np.random.Generator:
    """Random numbers that a text itself decides, so that a resumed run draws alike."""
    return np.random.default_rng([seed, *ids[:8].tolist()])

"""Data that a trained baseline exchanges with the code shared by all of them.

Letters: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sedem.engine.interface import Step
from sedem.types import Document


@dataclass(frozen=True)
class CompressedContext:
    """What a method stores for a context.

    Attributes:
        content: what the method answers from; its type is the method's own.
        stored_bytes: size of the content; None means that the content is the text itself in UTF-8.
        notes: one sentence for each part of the context that was dropped or left uncompressed.
    """

    content: Any
    stored_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContextMemory:
    """Documents and their compressed context.

    Attributes:
        documents: in the order they were given.
        token_ends: for each token, the index of the character after it in the joined text.
        compressed: what the method stores for the joined text.
    """

    documents: list[Document]
    token_ends: list[int]
    compressed: CompressedContext

    @property
    def stored_bytes(self) -> int:
        """Bytes stored to answer from."""
        if self.compressed.stored_bytes is not None:
            return self.compressed.stored_bytes
        return text_bytes(self.documents)


@dataclass(frozen=True)
class PrefillResult:
    """State of a batch after prefill.

    Attributes:
        logits: logits of the first answer token `[B, V]`.
        advance: runs one more token of every row.
        conditioning: number of positions that the decoder saw before the first answer token, row by
            row.
    """

    logits: Tensor
    advance: Step
    conditioning: list[int]


def text_bytes(documents: Sequence[Document]) -> int:
    """Size of the documents' texts in UTF-8."""
    return sum(len(document.text.encode()) for document in documents)


def generator_for(seed: int, ids: Tensor) -> np.random.Generator:
    """A random generator seeded by a text, so that a resumed run draws the same numbers."""
    return np.random.default_rng([seed, *ids[:8].tolist()])

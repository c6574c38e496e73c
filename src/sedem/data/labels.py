"""Evidence labels of blocks: from annotated spans, or from answer strings alone."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from sedem.bank.blocks import BlockRow
from sedem.data.examples import Evidence, Example
from sedem.errors import DataError
from sedem.types import Document

Labelling = Literal["evidence", "answer"]
"""What says which block holds evidence: annotated spans, or the answer strings."""


def from_evidence(blocks: Sequence[BlockRow], evidence: Sequence[Evidence]) -> list[bool]:
    """A block is positive when it overlaps an evidence span (appendix Dataset Processing)."""
    return [
        any(
            span.document == block.document and span.overlaps(block.start, block.end)
            for span in evidence
        )
        for block in blocks
    ]


def from_answers(
    blocks: Sequence[BlockRow], documents: Sequence[Document], answers: Sequence[str]
) -> list[bool]:
    """Distant supervision: a block is positive when an answer stands in it as whole words."""
    patterns = [
        re.compile(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", re.IGNORECASE)
        for answer in answers
        if answer.strip()
    ]
    # Found in the whole text: at the border of a block half a word would pass for a word.
    found = [
        (index, match.start(), match.end())
        for index, document in enumerate(documents)
        for pattern in patterns
        for match in pattern.finditer(document.text)
    ]
    return [
        any(
            index == block.document and block.start <= start and end <= block.end
            for index, start, end in found
        )
        for block in blocks
    ]


def gold_documents(example: Example, labelling: Labelling = "evidence") -> tuple[Document, ...]:
    """The documents of an example that hold evidence, in their order.

    Args:
        example: the example.
        labelling: "evidence" goes by its spans, "answer" by its answer strings.
    """
    pairs = zip(example.documents, _holds_evidence(example, labelling), strict=True)
    return tuple(document for document, gold in pairs if gold)


def some_documents(
    example: Example, count: int, labelling: Labelling = "evidence", seed: int = 0
) -> tuple[Document, ...]:
    """At most so many documents of an example, in their order: evidence, then a sample of others.

    Args:
        example: the example.
        count: how many; the first of the evidence where it is more.
        labelling: as in `gold_documents`.
        seed: with the example's id it decides which others.
    """
    holds = _holds_evidence(example, labelling)
    gold = [at for at, label in enumerate(holds) if label][:count]
    rest = [at for at, label in enumerate(holds) if not label]
    free = min(count - len(gold), len(rest))
    kept = sorted(gold + random.Random(f"{seed}:{example.id}").sample(rest, free))
    return tuple(example.documents[at] for at in kept)


def _holds_evidence(example: Example, labelling: Labelling) -> list[bool]:
    documents = example.documents
    whole = [BlockRow(i, 0, len(document.text), ()) for i, document in enumerate(documents)]
    if labelling == "evidence":
        return from_evidence(whole, example.evidence)
    return from_answers(whole, documents, example.answers)


def only_gold(example: Example) -> tuple[Document, ...]:
    """The documents of an example that hold evidence, where they alone are to be given.

    Raises:
        DataError: there is none.
    """
    documents = gold_documents(example)
    if not documents:
        raise DataError(f"example '{example.id}' has no evidence, so no gold document")
    return documents

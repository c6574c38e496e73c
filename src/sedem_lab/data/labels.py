"""Evidence labels of blocks: from annotated spans, or from answer strings alone."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from sedem.bank.blocks import BlockRow
from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.examples import Evidence, Example

Labelling = Literal["evidence", "answer"]
"""The source of labels: annotated spans, or answer strings."""


def labelling_of(example: Example, labelling: Labelling) -> Labelling:
    """The labelling of one example: by its answer strings if it has no evidence."""
    return labelling if example.evidence else "answer"


def from_evidence(blocks: Sequence[BlockRow], evidence: Sequence[Evidence]) -> list[bool]:
    """Label a block positive if it overlaps an evidence span (appendix Dataset Processing)."""
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
    """Label a block positive if it contains an answer as whole words: distant supervision."""
    patterns = [
        re.compile(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", re.IGNORECASE)
        for answer in answers
        if answer.strip()
    ]
    # Search the whole text, because a word split by a block boundary is not a whole word.
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
    """The documents of an example that contain evidence, in order."""
    pairs = zip(example.documents, _holds_evidence(example, labelling), strict=True)
    return tuple(document for document, gold in pairs if gold)


def some_documents(
    example: Example, count: int, labelling: Labelling = "evidence", seed: int = 0
) -> tuple[Document, ...]:
    """At most `count` documents of an example, in order: evidence, and a sample of others.

    Args:
        count: maximum number; if more contain evidence, the first of those are taken.
        seed: decides the sample, together with the id of the example.
    """
    holds = _holds_evidence(example, labelling)
    gold = [index for index, label in enumerate(holds) if label][:count]
    rest = [index for index, label in enumerate(holds) if not label]
    free = min(count - len(gold), len(rest))
    kept = sorted(gold + random.Random(f"{seed}:{example.id}").sample(rest, free))
    return tuple(example.documents[index] for index in kept)


def _holds_evidence(example: Example, labelling: Labelling) -> list[bool]:
    documents = example.documents
    whole = [BlockRow(i, 0, len(document.text), ()) for i, document in enumerate(documents)]
    if labelling == "evidence":
        return from_evidence(whole, example.evidence)
    return from_answers(whole, documents, example.answers)


def only_gold(example: Example) -> tuple[Document, ...]:
    """The documents of an example that contain evidence; there must be at least one.

    Raises:
        DataError: no document contains evidence.
    """
    documents = gold_documents(example)
    if not documents:
        raise DataError(f"example '{example.id}' has no evidence, so no gold document")
    return documents

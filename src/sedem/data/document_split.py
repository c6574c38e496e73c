"""A user's documents as training text and held-out text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sedem.backbone.decoder import Backbone
from sedem.data.document_questions import pieces
from sedem.errors import DataError
from sedem.types import Document

PARAGRAPHS = "\n\n"
"""Separator between joined texts."""
ENOUGH = 4
"""Minimum windows of a text; what is left after its last window is not used for training."""


def split_documents(
    documents: Sequence[Document], share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into training documents and held-out documents.

    Documents are drawn until they reach the share by number and by characters, since a single short
    one would measure little. A document that would bring them above half of the text is skipped.
    Of a single document, the last part is held out, in pieces.

    Args:
        documents: the documents; not empty.
        share: share of the documents that is held out.
        seed: decides which documents are held out.

    Raises:
        DataError: the only document is too short to split.
    """
    if len(documents) == 1:
        [document] = documents
        cut = pieces(document.text)
        if len(cut) < 2:
            raise DataError(
                f"document '{document.name}' has {len(document.text):,} characters, too few to "
                "train on one part and to measure on another; give more or longer documents"
            )
        count = max(1, round(share * len(cut)))
        halves = (cut[:-count], cut[-count:])
        training, held_out = (replace(document, text=PARAGRAPHS.join(half)) for half in halves)
        return [training], [held_out]
    lengths = [len(document.text) for document in documents]
    chosen: list[int] = []
    drawn = 0
    for index in random.Random(f"held-out:{seed}").sample(range(len(documents)), len(documents)):
        if len(chosen) >= share * len(documents) and drawn >= share * sum(lengths):
            break
        if drawn + lengths[index] <= sum(lengths) / 2 and len(chosen) < len(documents) - 1:
            chosen.append(index)
            drawn += lengths[index]
    parts: tuple[list[Document], list[Document]] = ([], [])
    for index, document in enumerate(documents):
        parts[index in chosen].append(document)
    return parts


def packed(documents: Sequence[Document], backbone: Backbone, window: int) -> list[str]:
    """Texts of documents; short ones are joined with the next, since a window never spans texts.

    Args:
        documents: the documents.
        backbone: gives the tokenizer that counts tokens.
        window: tokens of a window.
    """
    texts: list[str] = []
    long_enough = True
    for document in documents:
        if long_enough:
            texts.append(document.text)
        else:
            texts[-1] += PARAGRAPHS + document.text
        long_enough = tokens_of([texts[-1]], backbone)[0] >= ENOUGH * window
    if not long_enough and len(texts) > 1:
        last = texts.pop()
        texts[-1] += PARAGRAPHS + last
    return texts


def tokens_of(texts: Sequence[str], backbone: Backbone) -> list[int]:
    """Number of tokens in each text."""
    return [len(ids) for ids in backbone.tokenize(list(texts))["input_ids"]]

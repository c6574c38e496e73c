"""BM25 and raw text: the plain line that every selecting method is held against.

What is ranked and read are paragraphs, as for every method here that picks text: one long document
is no whole to be picked. What an answer says was stored are the documents in UTF-8; the index,
which could be made anew from them, is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sedem.backbone.decoder import Backbone
from sedem.baselines.full_context import FullContext
from sedem.baselines.paragraphs import Paragraph, cut_notes, split
from sedem.engine.device import Clock
from sedem.inference.generation import Decoding
from sedem.method.selector import Budget, resolve_budget
from sedem.types import Answer, Document

PARAGRAPH = 1024
"""Tokens of a paragraph, and half of the backbone's positions at most; longer ones are cut."""


@dataclass(frozen=True)
class TextIndex:
    """What the BM25 reader keeps.

    Attributes:
        documents: what was read.
        paragraphs: theirs, in their order.
        index: of the paragraphs; None where there are no words.
    """

    documents: list[Document]
    paragraphs: list[Paragraph]
    index: Any


class BM25(FullContext):
    """BM25 picks k paragraphs, the frozen backbone reads them as raw text, in document order.

    Args:
        backbone: the decoder.
        decoding: how answers are generated.
        k: paragraphs that are read.
    """

    def __init__(self, backbone: Backbone, decoding: Decoding, k: Budget) -> None:
        super().__init__(backbone, decoding, "bm25")
        self.k = k
        self.longest = min(PARAGRAPH, backbone.max_positions // 2)

    def read(self, documents: Sequence[Document]) -> TextIndex:  # type: ignore[override]
        """Cut the documents into paragraphs and index them.

        Raises:
            DataError: there are none, two have one name, or one is empty.
        """
        kept = super().read(documents)
        paragraphs = split(kept, self.backbone, self.longest)
        return TextIndex(kept, paragraphs, index_texts([part.text for part in paragraphs]))

    def answer(self, memory: TextIndex, question: str) -> Answer:  # type: ignore[override]
        """Answer from the k best paragraphs.

        Raises:
            ConfigError: k is not a budget.
            DataError: the question is empty or alone exceeds the backbone's positions.
        """
        clock = Clock(self.backbone.device)
        paragraphs = memory.paragraphs
        scores = bm25_scores(memory.index, len(paragraphs), question)
        count = resolve_budget(self.k, len(scores))
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        used = sorted(ranked[:count])
        # A paragraph is read as a document of its own, named by its index.
        picked = [Document(str(i), paragraphs[i].text) for i in used]
        answer = self.answer_from(
            picked, range(len(picked)), [scores[i] for i in used], question, clock
        )
        tokens = self._tokens(memory.documents)
        cut = cut_notes(memory.documents, paragraphs, self.longest, tokens, self.name)
        return replace(
            answer,
            citations=tuple(
                paragraphs[int(c.document)].cited(c.rank, c.score, c.end) for c in answer.citations
            ),
            blocks=len(paragraphs),
            cut=(*cut, *answer.cut),
            stored_bytes=sum(len(document.text.encode()) for document in memory.documents),
            context_tokens=tokens,
            ranking=tuple(paragraphs[i].span for i in ranked),
        )


def index_texts(texts: Sequence[str]) -> Any:
    """A BM25 index of some texts (bm25s with its defaults); None when it finds no word in them."""
    import bm25s

    # It tells of every index on its own logger, at a level that it sets itself.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    words = bm25s.tokenize(list(texts), return_ids=False, show_progress=False)
    if not any(words):
        return None
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return index


def bm25_scores(index: Any, count: int, question: str) -> list[float]:
    """BM25 score of every text; zero where question or texts have no words.

    Args:
        index: of the texts, as `index_texts` gives it.
        count: how many they are.
        question: what is asked.
    """
    import bm25s

    rows = bm25s.tokenize([question], return_ids=False, show_progress=False)
    words = [word for row in rows for word in row]
    if index is None or not words:
        return [0.0] * count
    return [float(score) for score in index.get_scores(words)]

"""BM25 and raw text: the reference for all selecting methods.

It ranks and reads paragraphs, like all methods here that select text; a long document is too large
to select as a whole. `stored_bytes` counts the documents in UTF-8. The index can be rebuilt from
them and is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.engine.device import Clock
from sedem.guidance import Budget
from sedem.method.selector import resolve_budget
from sedem.types import Answer, Document
from sedem_lab.baselines.full_context import FullContext, text_bytes
from sedem_lab.baselines.paragraphs import Paragraph, split, split_notes

PARAGRAPH = 1024
"""Longest paragraph in tokens, unless half of the backbone's positions is less."""


@dataclass(frozen=True)
class TextIndex:
    """Memory of the BM25 reader; without words in the paragraphs, the index is None."""

    documents: list[Document]
    paragraphs: list[Paragraph]
    index: Any


class BM25(FullContext):
    """BM25 selects k paragraphs; the frozen backbone reads them as raw text, in document order.

    Args:
        k: number of paragraphs to read, or "all".

    Raises:
        ConfigError: k is not a budget.
    """

    name = "bm25"
    has_selection_budget = True

    def __init__(self, backbone: Backbone, decoding: Decoding, k: Budget = 2) -> None:
        super().__init__(backbone, decoding)
        resolve_budget(k, 1)
        self.k = k
        self.longest = min(PARAGRAPH, backbone.max_positions // 2)

    def read(self, documents: Sequence[Document]) -> TextIndex:  # type: ignore[override]
        """Cut the documents into paragraphs and index them.

        Raises:
            DataError: there are no documents, two share a name, or one is empty.
        """
        kept = super().read(documents)
        paragraphs = split(kept, self.backbone, self.longest)
        return TextIndex(kept, paragraphs, index_texts([part.text for part in paragraphs]))

    def answer(self, memory: TextIndex, question: str) -> Answer:  # type: ignore[override]
        """Answer from the k best paragraphs.

        Raises:
            DataError: the question is empty, or it alone exceeds the backbone's positions.
        """
        clock = Clock(self.backbone.device)
        paragraphs = memory.paragraphs
        scores = bm25_scores(memory.index, len(paragraphs), question)
        count = resolve_budget(self.k, len(scores))
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        used = sorted(ranked[:count])
        # Each paragraph is read as a document whose name is the paragraph's index.
        picked = [Document(str(i), paragraphs[i].text) for i in used]
        answer = self.answer_from(picked, [scores[i] for i in used], question, clock)
        tokens = self._tokens(memory.documents)
        cut = split_notes(memory.documents, paragraphs, self.longest, tokens, self.name)
        return replace(
            answer,
            citations=tuple(
                paragraphs[int(c.document)].cited(c.rank, c.score, c.end) for c in answer.citations
            ),
            blocks=len(paragraphs),
            cut=(*cut, *answer.cut),
            stored_bytes=text_bytes(memory.documents),
            context_tokens=tokens,
            ranking=tuple(paragraphs[i].span for i in ranked),
        )


def index_texts(texts: Sequence[str]) -> Any:
    """Build a BM25 index (bm25s with its defaults); None if the texts contain no words."""
    import bm25s

    # bm25s logs every index, at a level that it sets itself.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    words = bm25s.tokenize(list(texts), return_ids=False, show_progress=False)
    if not any(words):
        return None
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return index


def bm25_scores(index: Any, count: int, question: str) -> list[float]:
    """BM25 score of every text; all zero if the question or the texts contain no words.

    Args:
        index: the index of the texts, from `index_texts`.
    """
    import bm25s

    rows = bm25s.tokenize([question], return_ids=False, show_progress=False)
    words = [word for row in rows for word in row]
    if index is None or not words:
        return [0.0] * count
    return [float(score) for score in index.get_scores(words)]

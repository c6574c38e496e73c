"""BM25 and raw text: the plain line that every selecting method is held against.

What an answer says was stored are the documents in UTF-8; the index, which could be made anew from
them, is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sedem.answering import Clock
from sedem.backbone import Backbone
from sedem.baselines.full_context import FullContext
from sedem.contracts import Answer, Document, check_documents
from sedem.generation import Decoding
from sedem.selector import Budget, resolve_budget


@dataclass(frozen=True)
class TextIndex:
    """What the BM25 reader keeps: the documents and their index, None where there are no words."""

    documents: list[Document]
    index: Any


class BM25(FullContext):
    """BM25 picks k documents, the frozen backbone reads them as raw text, in document order.

    Args:
        backbone: the decoder.
        decoding: how answers are generated.
        k: documents that are read.
    """

    def __init__(self, backbone: Backbone, decoding: Decoding, k: Budget) -> None:
        super().__init__(backbone, decoding, "bm25")
        self.k = k

    def read(self, documents: Sequence[Document]) -> TextIndex:  # type: ignore[override]
        """Index the documents."""
        check_documents(documents)
        return TextIndex(list(documents), index_texts([document.text for document in documents]))

    def answer(self, memory: TextIndex, question: str) -> Answer:  # type: ignore[override]
        """Answer from the k best documents.

        Raises:
            ConfigError: k is not a budget.
            DataError: the question is empty or alone exceeds the backbone's positions.
        """
        clock = Clock(self.backbone.device)
        scores = bm25_scores(memory, question)
        count = resolve_budget(self.k, len(scores))
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        used = sorted(ranked[:count])
        answer = self.answer_from(
            memory.documents, used, [scores[i] for i in used], question, clock
        )
        spans = [(memory.documents[i].name, 0, len(memory.documents[i].text)) for i in ranked]
        return replace(answer, ranking=tuple(spans))


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


def bm25_scores(memory: TextIndex, question: str) -> list[float]:
    """BM25 score of every document; zero where question or documents have no words."""
    import bm25s

    rows = bm25s.tokenize([question], return_ids=False, show_progress=False)
    words = [word for row in rows for word in row]
    if memory.index is None or not words:
        return [0.0] * len(memory.documents)
    return [float(score) for score in memory.index.get_scores(words)]

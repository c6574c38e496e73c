"""BM25 and raw text: the plain line that every selecting method is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sedem.answering import Clock
from sedem.backbone import Backbone
from sedem.baselines.full_context import FullContext
from sedem.contracts import Answer, Document
from sedem.generation import Decoding


@dataclass(frozen=True)
class TextIndex:
    """What the BM25 reader keeps: the documents and their index."""

    documents: list[Document]
    index: object


class BM25(FullContext):
    """BM25 picks k documents, the frozen backbone reads them as raw text, in document order.

    Args:
        backbone: the decoder.
        decoding: how answers are generated.
        k: documents that are read.
    """

    def __init__(self, backbone: Backbone, decoding: Decoding, k: int) -> None:
        super().__init__(backbone, decoding, "bm25")
        self.k = k

    def read(self, documents: Sequence[Document]) -> TextIndex:  # type: ignore[override]
        """Index the documents."""
        return TextIndex(list(documents), index_texts([document.text for document in documents]))

    def answer(self, memory: TextIndex, question: str) -> Answer:  # type: ignore[override]
        """Answer from the k best documents."""
        clock = Clock(self.backbone.device)
        scores = bm25_scores(memory.index, question)
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: self.k]
        used = sorted(best)
        return self.answer_from(memory.documents, used, [scores[i] for i in used], question, clock)


def index_texts(texts: Sequence[str]) -> object:
    """A BM25 index of some texts (bm25s with its defaults)."""
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(texts), show_progress=False), show_progress=False)
    return index


def bm25_scores(index: object, question: str) -> list[float]:
    """BM25 score of every indexed text."""
    import bm25s

    tokens = bm25s.tokenize(question, return_ids=False, show_progress=False)[0]
    return [float(score) for score in index.get_scores(tokens)]  # type: ignore[attr-defined]

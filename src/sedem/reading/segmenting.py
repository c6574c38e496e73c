"""Cut documents into segments in a separate thread, while others are encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from sedem.method.segments import Segments, segment_text
from sedem.modules import SedemModules
from sedem.types import Document


class Cutter:
    """Cuts documents one after the other in a background thread.

    Iterating gives the segments of each document in order, and raises its error, if any. Leaving
    the context drops documents that have not been cut.

    Args:
        model: its settings and its encoder's tokenizer define the cuts.
        documents: at least one.
    """

    def __init__(self, model: SedemModules, documents: Sequence[Document]) -> None:
        self._thread = ThreadPoolExecutor(1, "sedem-cutter")
        self._parts = [self._thread.submit(segments_of, model, one) for one in documents]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Segments]:
        return (part.result() for part in self._parts)

    @property
    def count(self) -> int | None:
        """Total number of segments; None while documents are being cut."""
        if not self._parts[-1].done():
            return None
        return sum(len(part.result()) for part in self._parts)


def segments_of(model: SedemModules, document: Document) -> Segments:
    """Cut a document as a model reads it.

    Raises:
        DataError: it has no tokens.
    """
    config = model.config
    cut = config.segment_length, config.segmentation, config.segment_shift
    return segment_text(document.text, model.encoder, *cut)

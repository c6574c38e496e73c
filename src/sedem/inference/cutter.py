"""Documents are cut into segments in a thread of its own, while others are encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from sedem.method.modules import SedemModules
from sedem.method.segments import Segments, segment_text
from sedem.types import Document

Item = TypeVar("Item")


class Cutter:
    """Cuts documents, one after the other in the order in which they are given.

    Leaving its context drops documents that no one has waited for.

    Args:
        model: its settings and its encoder's tokenizer cut.
    """

    def __init__(self, model: SedemModules) -> None:
        self.model = model
        self._thread = ThreadPoolExecutor(1, "sedem-cutter")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def cut(self, documents: Sequence[Document]) -> Iterator[Segments]:
        """Begin to cut some documents.

        Returns:
            The segments of each, in their order; the error of one is raised in its place.
        """
        begun = [self._thread.submit(segments_of, self.model, document) for document in documents]
        return (one.result() for one in begun)


def segments_of(model: SedemModules, document: Document) -> Segments:
    """Cut a document as a model reads it.

    Raises:
        DataError: it has no tokens.
    """
    config = model.config
    cut = config.segment_length, config.segmentation, config.segment_shift
    return segment_text(document.text, model.encoder, *cut)


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items, each once the next one has been taken.

    An error in taking one is raised after those before it have been yielded.
    """
    taken: list[Item] = []
    try:
        for item in items:
            yield from taken
            taken = [item]
    except Exception:
        yield from taken
        raise
    yield from taken

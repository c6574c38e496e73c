"""The documents of a bank: names are loaded, each text is read only when it is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import overload

from sedem.errors import UnknownDocumentError
from sedem.types import Document

Source = Callable[[str], str | None]
"""Rereads the text of a document by its name; None if it no longer exists."""

LISTED = 10
"""Number of names listed in an unknown-document error; a bank may have millions."""


def unknown_document(bank: str, name: str, known: Sequence[str]) -> UnknownDocumentError:
    """Return the error for a name that no document of a bank has.

    Args:
        bank: how the message refers to the bank.
        name: the unknown name.
        known: the names of all its documents.
    """
    listed = ", ".join(known[:LISTED]) or "none"
    more = f" and {len(known) - LISTED:,} more" if len(known) > LISTED else ""
    return UnknownDocumentError(f"{bank} has no document '{name}'; it has {listed}{more}")


class Documents(Sequence[Document]):
    """Documents in reading order.

    Attributes:
        names: their names.
    """

    names: Sequence[str]

    @abstractmethod
    def characters(self, index: int) -> int:
        """Length of a document's text."""

    @abstractmethod
    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text; the rest of the text need not be read.

        Raises:
            NoTextError: the bank does not hold it, and it cannot be read from its source.
        """

    @abstractmethod
    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text; empty if it has no pages."""

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        text = self.text(number, 0, self.characters(number))
        return Document(self.names[number], text, self.pages(number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class InMemoryDocuments(Documents):
    """Documents whose texts are in RAM.

    Args:
        documents: the documents.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = list(documents)
        self.names = [document.name for document in documents]

    def characters(self, index: int) -> int:
        """Length of a document's text."""
        return len(self._documents[index].text)

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text."""
        return self._documents[index].text[start:end]

    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text."""
        return self._documents[index].pages

"""The documents of a bank on disk: a text is read when a span of it is needed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from sedem.bank.documents import Documents, Source
from sedem.bank.store import catalog, catalog_rows
from sedem.errors import NoTextError

SOURCES = 4
"""Number of texts read from their sources that stay in RAM: an answer cites few documents."""


class StoredDocuments(Documents):
    """Documents as of one commit; every span is checked when it is read.

    Args:
        folder: the bank's folder.
        rows: the documents according to the catalog.
        stored: whether the bank holds their texts.
        source: reads texts that it does not hold; None if there is no source.
    """

    def __init__(
        self,
        folder: Path,
        rows: catalog_rows.DocumentRows,
        stored: bool = True,
        source: Source | None = None,
    ) -> None:
        self.folder = folder
        self.stored = stored
        self._source = source
        self._rows = rows
        self._source_text = lru_cache(SOURCES)(self._read_source)
        self._digests = rows.digests
        self.names = rows.names
        self._ids = rows.ids
        self._characters = rows.characters
        self._pages = rows.pages

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process keeps its own texts.
        return StoredDocuments, (self.folder, self._rows, self.stored, self._source)

    def characters(self, index: int) -> int:
        """Length of a document's text."""
        return int(self._characters[index])

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text.

        Raises:
            BankError: it is damaged, or the bank was compacted since.
            NoTextError: the bank does not hold it, and its source is missing or has changed.
        """
        if not self.stored:
            return self._source_text(index)[start:end]
        with catalog.connect(self.folder) as connection:
            number = int(self._ids[index])
            return catalog_rows.read_text(self.folder, connection, number, start, end)

    def _read_source(self, index: int) -> str:
        """Read a text from its source; its SHA-256 must be that of the text read before."""
        name = self.names[index]
        if self._source is None:
            raise NoTextError(
                f"bank '{self.folder}' holds no texts; open it with `source` to read them again"
            )
        text = self._source(name)
        if text is None or catalog.text_digest(text) != self._digests[index]:
            what = "cannot be read" if text is None else "has changed since"
            raise NoTextError(
                f"bank '{self.folder}' holds no texts, and '{name}' {what}; put the original "
                "file back in its place to see it"
            )
        return text

    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text."""
        return catalog_rows.pages_of(self._pages[index])

"""The documents of a bank on disk: a text is read when somebody asks for a span of it."""

from __future__ import annotations

from pathlib import Path

from sedem.bank.documents import Documents
from sedem.bank.store import catalog, catalog_rows


class StoredDocuments(Documents):
    """Documents as of one commit; every span that is read is checked.

    Args:
        folder: of the bank.
        rows: what the catalog says of the documents.
    """

    def __init__(self, folder: Path, rows: catalog_rows.DocumentRows) -> None:
        self.folder = folder
        self.names = rows.names
        self._ids = rows.ids
        self._characters = rows.characters
        self._pages = rows.pages

    def characters(self, index: int) -> int:
        """Length of a document's text."""
        return int(self._characters[index])

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text.

        Raises:
            BankError: it is damaged, or the bank was compacted since.
        """
        with catalog.connect(self.folder) as connection:
            number = int(self._ids[index])
            return catalog_rows.read_text(self.folder, connection, number, start, end)

    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text."""
        return catalog_rows.pages_of(self._pages[index])

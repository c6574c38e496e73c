"""Folders of banks that were deleted or moved; each is removed once no answer reads it."""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Sequence
from pathlib import Path

from sedem.bank.snapshot import Snapshot
from sedem.serve.database import Database
from sedem.serve.server_folder import ServerFolder

Readers = Sequence[weakref.ref[Snapshot]]
"""References to a bank's snapshots; those that an answer uses are alive."""


class Trash:
    """The folders that are to be removed.

    A folder is recorded in the database first, so that a server that was killed removes it at its
    next start.

    Args:
        database: the server's database.
        place: the server's folder; recorded folders are removed at once: nothing reads them yet.
    """

    def __init__(self, database: Database, place: ServerFolder) -> None:
        self.database, self.place = database, place
        self._left: list[tuple[Path, Readers]] = []
        for row in database.rows("SELECT folder FROM trash"):
            self.remove(place.bank(row["folder"]))

    @staticmethod
    def note(connection: sqlite3.Connection, folder: Path) -> None:
        """Record a folder in a transaction."""
        connection.execute("INSERT INTO trash VALUES (?)", (folder.name,))

    @staticmethod
    def keep(connection: sqlite3.Connection, folder: Path) -> None:
        """Remove a folder's record in a transaction: it is a bank now."""
        connection.execute("DELETE FROM trash WHERE folder = ?", (folder.name,))

    def leave(self, folder: Path, readers: Readers) -> None:
        """Remove a recorded folder once its readers have ended."""
        self._left.append((folder, readers))

    def empty(self) -> None:
        """Remove the folders that no answer reads any more."""
        for left in [*self._left]:
            folder, readers = left
            if all(reader() is None for reader in readers):
                self.remove(folder)
                self._left.remove(left)

    def remove(self, folder: Path) -> None:
        """Remove a recorded folder now."""
        self.place.remove(folder)
        with self.database.writing() as connection:
            self.keep(connection, folder)

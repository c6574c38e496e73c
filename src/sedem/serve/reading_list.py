"""The files of banks: those to read, those read, and those that could not be read.

A row is written together with the acknowledgement of an upload. It leaves the list only when its
document is in the bank, so a server that was killed continues where it was.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sedem.serve.database import Database
from sedem.serve.errors import bad_request
from sedem.serve.file_records import StoredFile

State = Literal["in_progress", "completed", "failed", "cancelled"]
"""State of a file in a bank, in OpenAI's terms."""
TO_READ: State = "in_progress"
_SELECT = "SELECT bank_files.*, files.bytes FROM bank_files JOIN files ON files.id = file"


@dataclass(frozen=True)
class ListedFile:
    """A file of a bank.

    Attributes:
        id: number of the row; later files have larger ones.
        bank: id of the bank.
        file: id of the file.
        name: name of the document.
        round: number of the run of files that it is read with.
        batch: id of the batch that it was added in; None if alone.
        attributes: set by the client.
        status: whether it was read.
        error: why it was not read, in one sentence.
        characters: length of its text; 0 until it was read.
        created_at: when it was added, in seconds since 1970.
        bytes: size of the file.
    """

    id: int
    bank: int
    file: str
    name: str
    round: int
    batch: str | None
    attributes: Mapping[str, Any]
    status: State
    error: str | None
    characters: int
    created_at: int
    bytes: int


@dataclass(frozen=True)
class Removal:
    """A document that must be removed from a bank."""

    id: int
    bank: int
    name: str


class ReadingList:
    """The files of all banks.

    Args:
        database: where the rows are.
        limit: maximum number of documents in a bank.
    """

    def __init__(self, database: Database, limit: int) -> None:
        self.database, self.limit = database, limit

    def add(
        self,
        connection: sqlite3.Connection,
        bank: int,
        files: Sequence[StoredFile],
        attributes: Mapping[str, Any] | None = None,
        batch: str | None = None,
    ) -> list[str]:
        """Put files on the list, in a transaction; a file already on it stays unless it failed.

        Returns:
            Names of documents that the bank has and that will be replaced.

        Raises:
            ApiError: 400, two files have the same name, or the bank would have too many documents.
        """
        names = [file.name for file in files]
        if twice := {name for name in names if names.count(name) > 1}:
            raise bad_request(
                f"2 files are named '{min(twice)}', and documents of one bank have distinct names; "
                "rename one",
                "file",
            )
        rows = self.of(bank)
        known, has = {row.name for row in rows}, {row.file: row for row in rows}
        if (count := len(known | set(names))) > self.limit:
            raise bad_request(
                f"the bank would have {count:,} documents, at most {self.limit:,} are allowed; "
                "delete some or use another bank",
                "file",
                "too_many_documents",
            )
        newest = max((row.round for row in rows), default=0)
        busy = any(row.status == TO_READ for row in rows)
        for file in files:
            before = has.get(file.id)
            if before is not None and before.status != "failed":
                continue
            connection.execute(
                "INSERT OR REPLACE INTO bank_files (bank, file, name, round, batch, attributes, "
                "status, characters, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)",
                (bank, file.id, file.name, newest if busy else newest + 1, batch,
                 json.dumps(dict(attributes or {})), TO_READ, int(time.time())),
            )  # fmt: skip
        return [name for name in names if name in known]

    def of(self, bank: int, batch: str | None = None) -> list[ListedFile]:
        """Return the files of a bank in the order in which they were added.

        Args:
            bank: id of the bank.
            batch: id of a batch, to return only its files.
        """
        return self._files(
            "bank_files.bank = ? AND (? IS NULL OR batch = ?) ORDER BY bank_files.id",
            bank,
            batch,
            batch,
        )

    def find(self, bank: int, file: str) -> ListedFile | None:
        """Return one file of a bank."""
        return next(iter(self._files("bank_files.bank = ? AND file = ?", bank, file)), None)

    def file_ids(self, bank: int) -> dict[str, str]:
        """Return the id of the file behind each document of a bank, by the document's name."""
        return {row.name: row.file for row in self.of(bank) if row.status == "completed"}

    def has_work(self, bank: int) -> bool:
        """Return whether files of a bank are to be read."""
        query = "SELECT 1 FROM bank_files WHERE bank = ? AND status = 'in_progress'"
        return self.database.row(query, bank) is not None

    def next_work(self, limit: int) -> tuple[list[ListedFile], list[Removal]]:
        """Return the next work, read in one transaction.

        Args:
            limit: maximum number of files.

        Returns:
            Files to read into one bank, in their order and with distinct names, and all documents
            that are to be removed first.
        """
        with self.database.writing():
            removals = self.removals()
            first = self._files("bank_files.status = 'in_progress' ORDER BY bank_files.id LIMIT 1")
            if not first:
                return [], removals
            rows = self._files(
                "bank_files.bank = ? AND bank_files.status = 'in_progress' "
                "ORDER BY bank_files.id LIMIT ?",
                first[0].bank,
                limit,
            )
        names: set[str] = set()
        files: list[ListedFile] = []
        for row in rows:
            if row.name in names:
                break
            names.add(row.name)
            files.append(row)
        return files, removals

    def removals(self) -> list[Removal]:
        """Return the documents that are to be removed from banks."""
        rows = self.database.rows("SELECT * FROM removals ORDER BY id")
        return [Removal(**row) for row in rows]

    def removed(self, removals: Sequence[Removal]) -> None:
        """Record that documents were removed from their banks."""
        with self.database.writing() as connection:
            connection.executemany(
                "DELETE FROM removals WHERE id = ?", [(one.id,) for one in removals]
            )

    def completed(self, characters: Mapping[int, int]) -> list[str]:
        """Record that files were read.

        Args:
            characters: length of each text, by the number of its row.

        Returns:
            Files that were uploaded for documents that have been replaced; their rows are gone.
        """
        released: list[str] = []
        with self.database.writing() as connection:
            for id, count in characters.items():
                connection.execute(
                    "UPDATE bank_files SET status = 'completed', error = NULL, characters = ? "
                    "WHERE id = ?",
                    (count, id),
                )
                released += self._supersede(connection, id, "completed", "failed")
        return released

    def failed(self, id: int, error: str) -> list[str]:
        """Record that a file could not be read; an existing document of its name stays.

        Returns:
            As in `completed`.
        """
        with self.database.writing() as connection:
            connection.execute(
                "UPDATE bank_files SET status = 'failed', error = ? WHERE id = ?", (error, id)
            )
            return self._supersede(connection, id, "failed", "failed")

    def remove(self, connection: sqlite3.Connection, bank: int, name: str) -> list[str]:
        """Remove a document and its pending files from a bank, in a transaction.

        Returns:
            As in `completed`.
        """
        files = connection.execute(
            "DELETE FROM bank_files WHERE bank = ? AND name = ? RETURNING file", (bank, name)
        ).fetchall()
        connection.execute("INSERT INTO removals (bank, name) VALUES (?, ?)", (bank, name))
        return release(connection, [row["file"] for row in files])

    def _supersede(self, connection: sqlite3.Connection, id: int, *states: State) -> list[str]:
        """Remove older rows of the same document in some states."""
        marks = ", ".join("?" * len(states))
        older = connection.execute(
            "DELETE FROM bank_files WHERE id < ? AND (bank, name) = "
            f"(SELECT bank, name FROM bank_files WHERE id = ?) AND status IN ({marks}) "
            "RETURNING file",
            (id, id, *states),
        ).fetchall()
        return release(connection, [row["file"] for row in older])

    def _files(self, condition: str, *values: object) -> list[ListedFile]:
        rows = self.database.rows(f"{_SELECT} WHERE {condition}", *values)
        return [ListedFile(**{**row, "attributes": json.loads(row["attributes"])}) for row in rows]


def release(connection: sqlite3.Connection, files: Sequence[str]) -> list[str]:
    """Remove the rows of files that were uploaded for a bank and that no bank uses any more.

    Returns:
        Their ids; their bytes must be removed once the transaction is committed.
    """
    gone: list[sqlite3.Row] = []
    for file in files:
        gone += connection.execute(
            "DELETE FROM files WHERE id = ? AND bank IS NOT NULL AND NOT EXISTS "
            "(SELECT 1 FROM bank_files WHERE file = files.id) RETURNING id",
            (file,),
        ).fetchall()
    return [row["id"] for row in gone]

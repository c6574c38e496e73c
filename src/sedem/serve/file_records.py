"""Uploaded files: their bytes are in a folder, their metadata in the database.

A file is acknowledged only once its bytes are synced under their final name and its row is
committed. File names are data; on disk a file is named by its id, which the server makes.
"""

from __future__ import annotations

import logging
import re
import secrets
import sqlite3
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sedem.data.document_formats import PARSERS
from sedem.data.documents import LISTED
from sedem.durable_files import make_folders, sync_folder
from sedem.serve.database import Database
from sedem.serve.errors import ApiError, bad_request, not_found

logger = logging.getLogger(__name__)

ID = re.compile(r"file-[0-9a-f]{24}")
NAME_CHARACTERS = 255
PURPOSES = ("assistants", "user_data")
_PARTIAL = re.compile(r"\.file-[0-9a-f]{24}\.(partial|received)")


@dataclass(frozen=True)
class StoredFile:
    """An uploaded file.

    Attributes:
        id: made by the server.
        owner: name of the key that uploaded it.
        name: the name that the client gave it.
        purpose: the purpose that the client gave it.
        bytes: its size.
        created_at: upload time, in seconds since 1970.
        bank: id of the bank that it was uploaded for; it is removed with its document there. None
            if it stays until it is deleted.
    """

    id: str
    owner: str
    name: str
    purpose: str
    bytes: int
    created_at: int
    bank: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The file as OpenAI's clients expect it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class Files:
    """The uploaded files of a server.

    Args:
        database: where their rows are.
        folder: where their bytes are.
    """

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder
        make_folders(folder)
        self._tidy()

    def path(self, id: str) -> Path:
        """Return where the bytes of a file are; `id` must be one that the server made."""
        if ID.fullmatch(id) is None:
            raise file_not_found(id)
        return self.folder / id

    def new_path(self) -> Path:
        """Return a path for the bytes of a new file; its name is the file's id."""
        return self.folder / f"file-{secrets.token_hex(12)}"

    def get(self, owner: str, id: str) -> StoredFile:
        """Return a file.

        Raises:
            ApiError: 404, there is no file of that id, or another key uploaded it.
        """
        if ID.fullmatch(id) is None:
            raise file_not_found(id)
        row = self.database.row("SELECT * FROM files WHERE id = ? AND owner = ?", id, owner)
        if row is None:
            raise file_not_found(id)
        return StoredFile(**row)

    def list(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """Return all files of a key, the oldest first."""
        rows = self.database.rows(
            "SELECT * FROM files WHERE owner = ? AND purpose = coalesce(?, purpose) "
            "ORDER BY created_at, rowid",
            owner,
            purpose,
        )
        return [StoredFile(**row) for row in rows]

    def add(self, file: StoredFile) -> StoredFile:
        """Acknowledge a file whose bytes are stored."""
        with self.database.writing() as connection:
            insert_file(connection, file)
        return file

    def forget(self, ids: Sequence[str]) -> None:
        """Remove the bytes of files that have no row."""
        for id in ids:
            self.path(id).unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove what an interrupted upload or deletion left."""
        known = {row["id"] for row in self.database.rows("SELECT id FROM files")}
        for path in self.folder.iterdir():
            left = ID.fullmatch(path.name) and path.name not in known
            if left or _PARTIAL.fullmatch(path.name):
                path.unlink()
                logger.info("removed %s: no acknowledged upload has it", path.name)
        sync_folder(self.folder)


def insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    """Add the row of a file to a transaction."""
    connection.execute(
        "INSERT INTO files VALUES (:id, :owner, :name, :purpose, :bytes, :created_at, :bank)",
        vars(file),
    )


def new_file(
    path: Path, owner: str, name: str, purpose: str, bank: int | None = None
) -> StoredFile:
    """Describe a file whose bytes are at a path from `Files.new_path`."""
    size = path.stat().st_size
    return StoredFile(path.name, owner, name, purpose, size, int(time.time()), bank)


def file_not_found(id: str) -> ApiError:
    """Return the error for a file that does not exist for a key."""
    return not_found(f"there is no file '{id[:100]}'", "file_id", "file_not_found")


def checked_name(name: str) -> str:
    """Return the name of an uploaded file as the name of a document.

    It is text to display, never a path: only its ending has a meaning, the format.
    Control characters become U+FFFD.

    Raises:
        ApiError: 400, it is empty or too long, or names a format that cannot be read.
    """
    whole = name.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    shown = "".join(
        "\ufffd" if unicodedata.category(character) in ("Cc", "Zl", "Zp") else character
        for character in unicodedata.normalize("NFC", whole)
    ).strip()
    if not shown:
        raise bad_request("an uploaded file has no name; give it one, such as report.pdf", "file")
    if len(shown) > NAME_CHARACTERS:
        raise bad_request(
            f"the file name '{shown[:40]}...' has {len(shown):,} characters, at most "
            f"{NAME_CHARACTERS} can be used; shorten it",
            "file",
        )
    if (ending := ending_of(shown)) not in PARSERS:
        what = f"of the type '{ending}'" if ending else "without an ending"
        raise bad_request(
            f"'{shown}' is {what}; {LISTED} files can be read: save it as one of them",
            "file",
            "unsupported_file",
        )
    return shown


def ending_of(name: str) -> str:
    """The ending of a file's name, as the parsers see it."""
    return Path(name).suffix.lower()

"""Uploads that are still to be read into their banks, and the last ones that were.

An upload is acknowledged once its bytes are synced in the folder `uploads` and its row is
committed. Its bytes stay until its document is in the bank or cannot be read, so a killed server
continues where it was. File names are data; on disk a file has a name that the server makes.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sqlite3
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from sedem.durable_files import make_folders, sync_folder
from sedem.reading.documents import unknown_type
from sedem.serve.database import Database, full_disk
from sedem.serve.errors import bad_request
from sedem.types import Document

logger = logging.getLogger(__name__)

NAME_CHARACTERS = 255
_FILE = re.compile(r"file-[0-9a-f]{24}")
Status = Literal["empty", "building", "ready", "failed"]
ENDED: tuple[Status, ...] = ("empty", "ready", "failed")


@dataclass(frozen=True)
class Upload:
    """A file for a bank.

    Attributes:
        id: number of its row; later uploads have larger ones.
        file: name of the file that holds its bytes until it is read.
        size: number of bytes; of characters once it is read.
        error: why it was not read, or what was left out of it or guessed, in sentences.
    """

    id: int
    bank: int
    name: str
    file: str
    size: int
    status: Literal["waiting", "read", "failed"]
    error: str | None


@dataclass(frozen=True)
class Removal:
    """A document that must be removed from a bank."""

    id: int
    bank: int
    name: str


@dataclass(frozen=True)
class Failure:
    """A file that could not be read, and the reason in one sentence."""

    filename: str
    error: str


@dataclass(frozen=True)
class Progress:
    """Progress of the files uploaded since the bank last had nothing to read.

    Attributes:
        status: "building" while files are to be read; then "ready", or "failed" if none of these
            files could be read; "empty" in a bank without files.
        files_done: files that were read or could not be read.
        characters: number of characters; for a file that is not parsed yet, its bytes.
        error: one sentence if a file could not be read.
        failed: all files that could not be read.
        notes: what was left out of files that were read, or guessed.
    """

    status: Status
    files_done: int
    files: int
    characters_done: int
    characters: int
    blocks: int
    error: str | None = None
    failed: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self, bank: str) -> dict[str, Any]:
        """Return the progress as JSON."""
        return {"object": "bank.progress", "bank": bank, **asdict(self)}


class Uploads:
    """The uploads of all banks."""

    def __init__(self, database: Database, folder: Path, limit: int) -> None:
        self.database, self.folder, self.limit = database, folder / "uploads", limit
        make_folders(self.folder)
        waiting = self._select("status = 'waiting'")
        for upload in waiting:
            earlier = folder / "files" / upload.file  # of an earlier release
            if earlier.exists():
                earlier.rename(self.folder / upload.file)
        known = {upload.file for upload in waiting}
        for path in [*self.folder.iterdir()]:
            if _FILE.fullmatch(path.name) and path.name not in known:
                path.unlink()
                logger.info("removed %s: no acknowledged upload has it", path.name)
        sync_folder(self.folder)
        for upload in waiting:
            if not self.path(upload).exists():
                logger.warning("the bytes of %s are lost", upload.file)
                self.failed(
                    upload, f"the upload '{upload.name}' is not stored any more; upload it again"
                )

    def path(self, upload: Upload) -> Path:
        """Return where the bytes of an upload are."""
        assert _FILE.fullmatch(upload.file)
        return self.folder / upload.file

    @contextmanager
    def stored(self, sources: Sequence[IO[bytes]]) -> Iterator[list[Path]]:
        """Copy files into the folder; on an error in the block, the copies are removed.

        Raises:
            FullDiskError: the disk is full.
        """
        paths: list[Path] = []
        try:
            with full_disk():
                for source in sources:
                    paths.append(self.folder / f"file-{secrets.token_hex(12)}")
                    with paths[-1].open("xb") as target:
                        shutil.copyfileobj(source, target)
                        target.flush()
                        os.fsync(target.fileno())
                sync_folder(self.folder)
            yield paths
        except BaseException:
            self.forget([path.name for path in paths])
            raise

    def forget(self, files: Sequence[str]) -> None:
        """Remove the bytes of files that have no row, or were read."""
        for file in files:
            (self.folder / file).unlink(missing_ok=True)

    def add(
        self,
        connection: sqlite3.Connection,
        bank: int,
        files: Mapping[str, Path],
        documents: Set[str],
    ) -> list[str]:
        """Record uploads in a transaction.

        Args:
            files: where the bytes are, by the name of the document.
            documents: names of the documents that the bank has.

        Returns:
            Names of documents that will be replaced.

        Raises:
            ApiError: 400, the bank would have too many documents.
        """
        waiting = {upload.name for upload in self.of(bank) if upload.status == "waiting"}
        known = documents | waiting
        if (count := len(known | set(files))) > self.limit:
            raise bad_request(
                f"the bank would have {count:,} documents, at most {self.limit:,} are allowed; "
                "delete some or use another bank",
                "file",
                "too_many_documents",
            )
        if not waiting:
            connection.execute("DELETE FROM uploads WHERE bank = ?", (bank,))
        connection.executemany(
            "INSERT INTO uploads (bank, name, file, size, status) VALUES (?, ?, ?, ?, 'waiting')",
            [(bank, name, path.name, path.stat().st_size) for name, path in files.items()],
        )
        return [name for name in files if name in known]

    def of(self, bank: int) -> list[Upload]:
        """Return the uploads since a bank last had nothing to read, the oldest first."""
        return self._select("bank = ? ORDER BY id", bank)

    def has_work(self, bank: int) -> bool:
        """Return whether files are to be read into a bank."""
        return bool(self._select("bank = ? AND status = 'waiting' LIMIT 1", bank))

    def next_work(self, limit: int) -> tuple[list[Upload], list[Removal]]:
        """Return the next work, read in one transaction.

        Returns:
            Files to read into one bank, in their order and with distinct names, and all documents
            that are to be removed first.
        """
        with self.database.writing():
            rows = self.database.rows("SELECT * FROM removals ORDER BY id")
            first = self._select("status = 'waiting' ORDER BY id LIMIT 1")
            found = first and self._select(
                "bank = ? AND status = 'waiting' ORDER BY id LIMIT ?", first[0].bank, limit
            )
        files: dict[str, Upload] = {}
        for upload in found:
            if upload.name in files:
                break
            files[upload.name] = upload
        return [*files.values()], [Removal(**row) for row in rows]

    def removed(self, removals: Sequence[Removal]) -> None:
        """Record that documents were removed from their banks."""
        with self.database.writing() as connection:
            connection.executemany(
                "DELETE FROM removals WHERE id = ?", [(one.id,) for one in removals]
            )
        self.database.empty_log()

    def read(self, documents: Mapping[Upload, Document]) -> None:
        """Record that uploads were read, with the lengths of their texts and what is to be said."""
        with self.database.writing() as connection:
            connection.executemany(
                "UPDATE uploads SET status = 'read', size = ?, error = ? WHERE id = ?",
                [
                    (len(document.text), "; ".join(document.notes) or None, upload.id)
                    for upload, document in documents.items()
                ],
            )
        self.forget([upload.file for upload in documents])

    def failed(self, upload: Upload, error: str) -> None:
        """Record that an upload could not be read; an existing document of its name stays."""
        with self.database.writing() as connection:
            connection.execute(
                "UPDATE uploads SET status = 'failed', error = ? WHERE id = ?", (error, upload.id)
            )
        self.forget([upload.file])

    def remove(self, bank: int, name: str) -> None:
        """Remove a document and its uploads from a bank."""
        with self.database.writing() as connection:
            rows = connection.execute(
                "DELETE FROM uploads WHERE bank = ? AND name = ? RETURNING file", (bank, name)
            ).fetchall()
            connection.execute("INSERT INTO removals (bank, name) VALUES (?, ?)", (bank, name))
        self.forget([row["file"] for row in rows])

    def _select(self, condition: str, *values: object) -> list[Upload]:
        rows = self.database.rows(f"SELECT * FROM uploads WHERE {condition}", *values)
        return [Upload(**row) for row in rows]


def checked_name(name: str, any_type: bool = False) -> str:
    """Return the name of an uploaded file as the name of a document.

    It is text to display, never a path: only its ending has a meaning, the format.
    Control characters become U+FFFD.

    Raises:
        ApiError: 400, it is empty or too long, or names a format that cannot be read and it may
            not be of any type.
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
    if not any_type and (why := unknown_type(shown)):
        raise bad_request(f"'{shown}' {why}", "file", "unsupported_file")
    return shown

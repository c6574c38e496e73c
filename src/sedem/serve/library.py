"""The banks and files of a server, on disk.

What clients create is in the server's folder. Banks that the operator provides are elsewhere and
are only read.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sedem.errors import ConfigError
from sedem.modules import SedemModules
from sedem.serve.bank_entry import BankEntry, Prepare, Readers, at_once, created_at
from sedem.serve.database import Database, FullDiskError, full_disk
from sedem.serve.errors import bad_request, bank_not_found, conflict, forbidden, not_found
from sedem.serve.file_records import Files, StoredFile, insert_file
from sedem.serve.keys import Key
from sedem.serve.reading_list import TO_READ, ReadingList
from sedem.serve.server_folder import ServerFolder
from sedem.serve.settings import BANK_NAME_RULE, Settings, is_bank_name

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
"""Minimum time between two checks of the operator's banks."""


class Library:
    """All banks and files of a server; threads may share it.

    Args:
        settings: where the folder is, which banks the operator provides, and limits.
        model: the model; it can answer only from banks with its fingerprint.
        prepare: called with each new snapshot of a bank before anything else sees it.

    Attributes:
        changing: held while banks are made, renamed or deleted.

    Raises:
        ConfigError: another server uses the folder, or its database cannot be used.
        BankError: a bank of the operator cannot be opened, or another model built it.
    """

    def __init__(self, settings: Settings, model: SedemModules, prepare: Prepare = at_once) -> None:
        self.settings, self.model, self.prepare = settings, model, prepare
        try:
            with full_disk():
                self.place = ServerFolder(settings.folder)
                try:
                    self._open()
                except BaseException:
                    self.place.release()
                    raise
        except FullDiskError:
            raise ConfigError(
                f"the disk of '{settings.folder}' is full; make room, or give another folder"
            ) from None

    def _open(self) -> None:
        self.database = Database(self.place.database)
        self.files = Files(self.database, self.place.files)
        self.reading = ReadingList(self.database, self.settings.max_documents)
        self.work = threading.Event()
        self.work.set()
        self._entries: dict[str, BankEntry] = {}
        self.changing = threading.RLock()
        self._refreshed = 0.0
        self._deleted: list[tuple[Path, Readers]] = []
        rows = self.database.rows("SELECT * FROM banks ORDER BY name")
        self.place.remove_others({row["folder"] for row in rows})
        for row in rows:
            self._entries[row["name"]] = self._entry(row)
        for name, path in self.settings.banks.items():
            if name in self._entries:
                raise ConfigError(
                    f"clients have made a bank '{name}' already; give '{path}' another name"
                )
            made = created_at(path)
            entry = BankEntry(None, name, name, {}, path, made, self.reading, self.prepare)
            self._entries[name] = entry
            entry.reload().check_made_by(self.model.fingerprint())
        self._check_files()

    def _entry(self, row: sqlite3.Row) -> BankEntry:
        path = self.place.bank(row["folder"])
        entry = BankEntry(
            row["id"], row["name"], row["title"], json.loads(row["metadata"]), path,
            row["created_at"], self.reading, self.prepare,
        )  # fmt: skip
        entry.refresh()
        if entry.bank is not None and entry.bank.fingerprint != self.model.fingerprint():
            entry.error = "another model built this bank; serve that model, or build it again"
        return entry

    def _check_files(self) -> None:
        """Fail files whose bytes are lost, which only happens outside of the server."""
        query = "SELECT id, file, name FROM bank_files WHERE status = ?"
        for row in self.database.rows(query, TO_READ):
            if not self.files.path(row["file"]).exists():
                logger.warning("the bytes of %s are lost", row["file"])
                self.reading.failed(
                    row["id"], f"the upload '{row['name']}' is not stored any more; upload it again"
                )

    def close(self) -> None:
        """Close the database and let another server use the folder."""
        self.database.close()
        self.place.release()

    # Banks

    def names(self, key: Key) -> list[str]:
        """Return the names of all banks that a key may see."""
        return sorted(name for name in [*self._entries] if key.may_read(name))

    def entries(self) -> list[BankEntry]:
        """Return all banks."""
        return [*self._entries.values()]

    def get(self, name: str) -> BankEntry:
        """Return a bank.

        Raises:
            ApiError: 404, there is no bank of that name.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise bank_not_found(name)
        return entry

    def writable(self, name: str) -> BankEntry:
        """Return a bank that clients may change.

        Raises:
            ApiError: 404, there is none; 403, the operator provides it.
        """
        entry = self.get(name)
        if entry.read_only:
            raise forbidden(
                f"bank '{name}' was given by the operator and is read-only; use another bank",
                "read_only_bank",
            )
        return entry

    def create(
        self,
        name: str,
        metadata: Mapping[str, str] | None = None,
        title: str | None = None,
        files: Sequence[StoredFile] = (),
    ) -> BankEntry:
        """Make a bank, and read files that were uploaded before into it.

        Raises:
            ApiError: 400, the name is invalid; 409, it is taken; or as in `ReadingList.add`.
        """
        check_bank_name(name)
        with self.changing:
            if name in self._entries:
                raise conflict(f"there is a bank '{name}' already; choose another name")
            with self.database.writing() as connection:
                entry = self._inserted(connection, name, metadata or {}, title or name)
                assert entry.id is not None
                self.reading.add(connection, entry.id, files)
            # Only now, because what is not committed does not exist.
            self._entries[name] = entry
        self.work.set()
        return entry

    def upload(self, name: str, files: Sequence[StoredFile]) -> tuple[BankEntry, list[str]]:
        """Acknowledge files for a bank, which is made if there is none; they are read later.

        Args:
            name: name of the bank.
            files: files whose bytes are stored, but not their rows.

        Returns:
            The bank, and the names of documents that will be replaced.

        Raises:
            ApiError: 400, the name is invalid; or as in `writable` and `ReadingList.add`. Then
                nothing is changed.
        """
        check_bank_name(name)
        with self.changing:
            with self.database.writing() as connection:
                entry = (
                    self.writable(name)
                    if name in self._entries
                    else self._inserted(connection, name, {}, name)
                )
                assert entry.id is not None
                files = [replace(file, bank=entry.id) for file in files]
                for file in files:
                    insert_file(connection, file)
                replaced = self.reading.add(connection, entry.id, files)
            self._entries[name] = entry
        self.work.set()
        return entry, replaced

    def _inserted(
        self, connection: sqlite3.Connection, name: str, metadata: Mapping[str, str], title: str
    ) -> BankEntry:
        folder = self.place.new_bank(name)
        row = connection.execute(
            "INSERT INTO banks (name, title, metadata, folder, created_at) VALUES (?, ?, ?, ?, ?) "
            "RETURNING *",
            (name, title, json.dumps(dict(metadata)), folder, int(time.time())),
        ).fetchone()
        return self._entry(row)

    def attach(
        self,
        name: str,
        files: Sequence[StoredFile],
        attributes: Mapping[str, str | float | bool] | None = None,
        batch: str | None = None,
    ) -> BankEntry:
        """Read files that were uploaded before into a bank; arguments as in `ReadingList.add`.

        Raises:
            ApiError: as in `writable` and `ReadingList.add`.
        """
        entry = self.writable(name)
        assert entry.id is not None
        with self.database.writing() as connection:
            self.reading.add(connection, entry.id, files, attributes, batch)
        self.work.set()
        return entry

    def rename(self, name: str, title: str | None, metadata: Mapping[str, str] | None) -> BankEntry:
        """Change the title or the metadata of a bank; None leaves it unchanged.

        Raises:
            ApiError: as in `writable`.
        """
        with self.changing:
            entry = self.writable(name)
            title = entry.title if title is None else title
            metadata = entry.metadata if metadata is None else metadata
            with self.database.writing() as connection:
                connection.execute(
                    "UPDATE banks SET title = ?, metadata = ? WHERE id = ?",
                    (title, json.dumps(dict(metadata)), entry.id),
                )
            entry.title, entry.metadata = title, metadata
        return entry

    def delete(self, name: str) -> None:
        """Delete a bank and what was uploaded for it; a build of it stops.

        Running answers finish on their snapshot; then `remove_deleted` removes its file.

        Raises:
            ApiError: as in `writable`.
        """
        with self.changing:
            entry = self.writable(name)
            with self.database.writing() as connection:
                files = connection.execute(
                    "DELETE FROM files WHERE bank = ? RETURNING id", (entry.id,)
                ).fetchall()
                connection.execute("DELETE FROM banks WHERE id = ?", (entry.id,))
            del self._entries[name]
        self._deleted.append((entry.file, entry.forget()))
        self.files.forget([row["id"] for row in files])
        self.work.set()

    def remove_document(self, name: str, document: str) -> None:
        """Remove a document from a bank, even one that is still to be read.

        Raises:
            ApiError: as in `writable`; 404, there is no such document.
        """
        entry = self.writable(name)
        assert entry.id is not None
        known = {file.name for file in self.reading.of(entry.id)}
        if entry.bank is not None:
            known.update(entry.bank.documents.names)
        if document not in known:
            raise not_found(f"bank '{name}' has no document '{document[:100]}'")
        with self.database.writing() as connection:
            released = self.reading.remove(connection, entry.id, document)
        self.files.forget(released)
        entry.remove({document})
        self.work.set()

    def delete_file(self, owner: str, id: str) -> None:
        """Delete a file and remove its documents from their banks.

        Raises:
            ApiError: 404, there is no such file, or another key uploaded it.
        """
        self.files.get(owner, id)
        with self.database.writing() as connection:
            rows = connection.execute("SELECT * FROM bank_files WHERE file = ?", (id,)).fetchall()
            released: list[str] = []
            for row in rows:
                released += self.reading.remove(connection, row["bank"], row["name"])
            connection.execute("DELETE FROM files WHERE id = ?", (id,))
        self.files.forget([id, *released])
        for row in rows:
            if (entry := self.by_id(row["bank"])) is not None:
                entry.remove({row["name"]})
        self.work.set()

    def by_id(self, id: int) -> BankEntry | None:
        """Return the bank with a row id; None if it was deleted."""
        return next((entry for entry in self.entries() if entry.id == id), None)

    # Housekeeping, in the thread that reads files

    def refresh(self) -> None:
        """Load what others have written to the operator's banks."""
        now = time.monotonic()
        if now - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed = now
        for entry in self.entries():
            if entry.read_only:
                entry.refresh()

    def remove_deleted(self) -> None:
        """Remove the files of deleted banks that no answer reads any more.

        After a kill, the next start removes them, because no row of the database names them.
        """
        for deleted in [*self._deleted]:
            file, readers = deleted
            if all(reader() is None for reader in readers):
                self.place.remove(file)
                self._deleted.remove(deleted)


def check_bank_name(name: str) -> None:
    """Refuse an invalid bank name.

    Raises:
        ApiError: 400.
    """
    if not is_bank_name(name):
        raise bad_request(f"'{name[:100]}' cannot name a bank; {BANK_NAME_RULE}", "bank")

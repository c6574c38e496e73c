"""The banks of a server, and its folder:

    folder/
      server.sqlite             banks, uploads, pending work
      uploads/file-...          uploaded bytes that are still to be read
      banks/<name>-<hex>.bank   the banks that clients made
      lock                      held by the server

Banks that the operator provides are elsewhere and are only read. Only this module makes paths from
names given by clients, and only from checked bank names.
"""

from __future__ import annotations

import logging
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping, Set
from pathlib import Path

from filelock import FileLock, Timeout

from sedem.bank.file import delete
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import ConfigError
from sedem.modules import SedemModules
from sedem.serve.bank_entry import BankEntry, Prepare, Readers, created_at
from sedem.serve.database import Database, FullDiskError, full_disk
from sedem.serve.errors import bad_request, bank_not_found, forbidden, not_found
from sedem.serve.keys import Key
from sedem.serve.settings import BANK_NAME_RULE, Settings, is_bank_name
from sedem.serve.uploads import Uploads

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
"""Minimum time between two checks of the operator's banks."""
_BANK = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}-[0-9a-f]{8}\.bank")
_OF_BANK = re.compile(rf"({_BANK.pattern})(\.partial|(\.kept|\.codes)?(-wal|-shm|-journal)?)")
"""A bank, or what lies beside one."""


class Library:
    """All banks of a server; threads may share it.

    Args:
        model: it can answer only from banks with its fingerprint.
        prepare: called with each new snapshot of a bank before anything else sees it.

    Raises:
        ConfigError: another server uses the folder, or its database is lost or cannot be used.
        BankError: a bank of the operator cannot be opened, or another model built it.
    """

    def __init__(
        self,
        settings: Settings,
        model: SedemModules,
        prepare: Prepare = lambda snapshot: None,
    ) -> None:
        self.settings, self.model, self.prepare = settings, model, prepare
        self._banks = settings.folder / "banks"
        self._entries: dict[str, BankEntry] = {}
        self._deleted: list[tuple[Path, Readers]] = []
        self._changing = threading.RLock()
        self._refreshed = 0.0
        self.work = threading.Event()
        self.work.set()
        # Any thread may release it.
        self._lock = FileLock(settings.folder / "lock", timeout=0, thread_local=False)
        try:
            with full_disk():
                make_folders(settings.folder)
                settings.folder.chmod(0o700)
                self._lock.acquire()
                try:
                    self._open()
                except BaseException:
                    self._lock.release()
                    raise
        except Timeout:
            raise ConfigError(
                f"another server uses the folder '{settings.folder}'; stop it, or give another "
                "folder"
            ) from None
        except FullDiskError:
            raise ConfigError(
                f"the disk of '{settings.folder}' is full; make room, or give another folder"
            ) from None

    def _open(self) -> None:
        folder = self.settings.folder
        make_folders(self._banks)
        database = folder / "server.sqlite"
        if not database.exists():
            # Starting over would lose what only the database could name.
            held = [*folder.glob("banks/*"), *folder.glob("uploads/*"), *folder.glob("files/*")]
            if held:
                raise ConfigError(
                    f"'{folder}' holds {len(held):,} files and banks, but not its database "
                    f"'{database.name}'; restore that from a backup, or give another folder"
                )
        self.database = Database(database)
        self.uploads = Uploads(self.database, folder, self.settings.max_documents)
        rows = self.database.rows("SELECT * FROM banks ORDER BY name")
        self._remove_others({row["folder"] for row in rows})
        for row in rows:
            self._entries[row["name"]] = self._entry(row)
        for name, path in self.settings.banks.items():
            if name in self._entries:
                raise ConfigError(
                    f"a client already created bank '{name}'; choose another name for '{path}'"
                )
            entry = BankEntry(None, name, path, created_at(path), self.uploads, self.prepare)
            self._entries[name] = entry
            entry.reload().check_made_by(self.model.fingerprint())

    def _entry(self, row: sqlite3.Row) -> BankEntry:
        path = self._banks / row["folder"]
        if not is_bank_file(path.name):
            raise ConfigError(
                f"'{row['folder']}' is not a bank's file; the server's database was changed by hand"
            )
        entry = BankEntry(
            row["id"], row["name"], path, row["created_at"], self.uploads, self.prepare
        )
        entry.refresh()
        if entry.bank is not None and entry.bank.fingerprint != self.model.fingerprint():
            entry.error = "another model built this bank; serve that model, or build it again"
        return entry

    def _remove_others(self, banks: Set[str]) -> None:
        """Remove banks that are not among the given ones: a killed server left them."""
        for path in [*self._banks.iterdir()]:
            found = _OF_BANK.fullmatch(path.name)
            if found is not None and found[1] not in banks and not path.is_dir():
                path.unlink()

    def close(self) -> None:
        """Close the database and let another server use the folder."""
        self.database.close()
        self._lock.release()

    def names(self, key: Key) -> list[str]:
        """Return the names of all banks that a key may see."""
        return sorted(name for name in [*self._entries] if key.may_read(name))

    def entries(self) -> list[BankEntry]:
        """Return all banks."""
        return [*self._entries.values()]

    def get(self, name: str) -> BankEntry:
        """Return a bank; an unknown name gets 404."""
        entry = self._entries.get(name)
        if entry is None:
            raise bank_not_found(name)
        return entry

    def by_id(self, id: int) -> BankEntry | None:
        """Return the bank with a row id; None if it was deleted."""
        return next((entry for entry in self.entries() if entry.id == id), None)

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

    def upload(self, name: str, files: Mapping[str, Path]) -> tuple[BankEntry, list[str]]:
        """Acknowledge files for a bank, which is created if it does not exist.

        Returns:
            The bank, and the names of documents that will be replaced.

        Raises:
            ApiError: 400, the name is invalid; or as in `writable` and `Uploads.add`. Then nothing
                is changed.
        """
        check_bank_name(name)
        with self._changing:
            with self.database.writing() as connection:
                if name in self._entries:
                    entry = self.writable(name)
                else:
                    # A bank of the same name may have been deleted before.
                    row = connection.execute(
                        "INSERT INTO banks (name, folder, created_at) VALUES (?, ?, ?) RETURNING *",
                        (name, f"{name}-{secrets.token_hex(4)}.bank", int(time.time())),
                    ).fetchone()
                    entry = self._entry(row)
                assert entry.id is not None
                present = set() if entry.bank is None else set(entry.bank.documents.names)
                replaced = self.uploads.add(connection, entry.id, files, present)
            # Only now, because what is not committed does not exist.
            self._entries[name] = entry
        self.work.set()
        return entry, replaced

    def delete(self, name: str) -> None:
        """Delete a bank and its uploads; a build of it stops.

        Running answers finish on their snapshot; then `remove_deleted` removes its file.

        Raises:
            ApiError: as in `writable`.
        """
        with self._changing:
            entry = self.writable(name)
            assert entry.id is not None
            uploads = self.uploads.of(entry.id)
            with self.database.writing() as connection:
                connection.execute("DELETE FROM banks WHERE id = ?", (entry.id,))
            del self._entries[name]
        self._deleted.append((entry.file, entry.forget()))
        self.uploads.forget([upload.file for upload in uploads])
        self.database.empty_log()
        self.work.set()

    def remove_document(self, name: str, document: str) -> None:
        """Remove a document from a bank, even one that is still to be read.

        Raises:
            ApiError: as in `writable`; 404, there is no such document.
        """
        entry = self.writable(name)
        assert entry.id is not None
        known = {upload.name for upload in self.uploads.of(entry.id)}
        if entry.bank is not None:
            known.update(entry.bank.documents.names)
        if document not in known:
            raise not_found(f"bank '{name}' has no document '{document[:100]}'")
        self.uploads.remove(entry.id, document)
        entry.remove({document})
        self.work.set()

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
            if any(reader() is not None for reader in readers):
                continue
            delete(file)
            sync_folder(self._banks)
            self._deleted.remove(deleted)


def is_bank_file(name: str) -> bool:
    """Return whether a name is valid for the file of a client's bank."""
    return _BANK.fullmatch(name) is not None


def check_bank_name(name: str) -> None:
    """Reject an invalid bank name, with 400."""
    if not is_bank_name(name):
        raise bad_request(f"'{name[:100]}' cannot name a bank; {BANK_NAME_RULE}", "bank")

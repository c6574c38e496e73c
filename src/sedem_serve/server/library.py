"""The banks of a server, the thread that reads uploads into them, and its folder:

    folder/
      banks/<name>-<hex>.bank        the banks that clients made
      banks/<name>-<hex>.bank.files  the files that were uploaded to each; it makes the bank exist
      uploads/file-...               uploads that are still arriving
      lock                           held by the server

Banks that the operator provides are elsewhere and are only read. Only this module makes paths from
names given by clients, and its caller has checked these. Answers run between any two batches of
segments that are read, because the engine takes turns.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from sedem.bank.file import delete, is_read
from sedem.durable_files import make_folders, sync_folder
from sedem.engine.device import step_back
from sedem.errors import ConfigError
from sedem.model import SeDeM
from sedem.reading.followed import FollowedBank, Follower
from sedem_serve.server.errors import (
    ApiError,
    FullDiskError,
    bank_not_found,
    full_disk,
)
from sedem_serve.server.keys import Key
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.served import (
    CREATED,
    FILES,
    Prepare,
    ServedBank,
    UploadBank,
    check_count,
    files_of,
)
from sedem_serve.server.settings import ServerSettings

REFRESH_SECONDS = 2.0
"""Minimum time between two checks of the operator's banks."""
DATABASE = "server.sqlite"
"""What earlier releases kept their banks and uploads in; this one would delete the banks."""
DELETED = ".deleted"
_BANK = re.compile(r"([a-z0-9][a-z0-9_-]{0,63})-[0-9a-f]{8}\.bank")
_OF_BANK = re.compile(
    rf"({_BANK.pattern})(\.partial|\.sources|\.deleted|(\.kept|\.codes)?(-wal|-shm|-journal)?)"
)
"""A bank, or what lies beside one."""


class Library(Follower):
    """All banks of a server; threads may share it. It is opened before its thread is started.

    Args:
        model: reads uploads; it can answer only from banks with its fingerprint.
        prepare: called with each new snapshot of a bank before anything else sees it.

    Raises:
        ConfigError: another server uses the folder, or it cannot be used.
        BankError: a bank of the operator cannot be opened, or another model built it.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: SeDeM,
        metrics: Metrics,
        prepare: Prepare = lambda snapshot: None,
    ) -> None:
        super().__init__(self.uploads, model.reads_into())
        self.settings, self.model, self.metrics, self.prepare = settings, model, metrics, prepare
        self._banks, self._arriving = settings.folder / "banks", settings.folder / "uploads"
        self._entries: dict[str, ServedBank] = {}
        self._deleted: list[Path] = []
        self._changing = threading.RLock()
        self._refreshed = 0.0
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
        make_folders(self._banks)
        make_folders(self._arriving)
        if (database := self.settings.folder / DATABASE).exists():
            raise ConfigError(
                f"'{database}' is of an earlier release, which kept banks in another way; give "
                "another folder, and upload their files again"
            )
        for path in self._arriving.glob("file-*"):
            path.unlink()  # it was never acknowledged
        for path in [*self._banks.iterdir()]:
            # A killed server may leave a bank that was deleted.
            found = _OF_BANK.fullmatch(path.name)
            if found is not None and not (self._banks / f"{found[1]}{FILES}").is_dir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in sorted(self._banks.glob(f"*.bank{FILES}")):
            if found := _BANK.fullmatch(path.name.removesuffix(FILES)):
                self._add(found[1], path.with_name(found[0]))
        for name, place in self.settings.banks.items():
            if name in self._entries:
                raise ConfigError(
                    f"a client already created bank '{name}'; choose another name for '{place}'"
                )
            entry = ServedBank(place, name, self.prepare, self.model.fingerprint())
            entry.newest()
            assert entry.bank is not None
            entry.bank.check_made_by(self.model.fingerprint())
            self._entries[name] = entry

    def _add(self, name: str, path: Path) -> UploadBank:
        bank = UploadBank(path, name, self.prepare, self.model.fingerprint())
        self._entries[name] = bank
        return bank

    def close(self, seconds: float | None = None) -> None:
        """Stop reading, and let another server use the folder."""
        super().close(seconds)
        self._lock.release()

    def names(self, key: Key) -> list[str]:
        """Return the names of all banks that a key may see."""
        return sorted(name for name in [*self._entries] if key.may_read(name))

    def entries(self) -> list[ServedBank]:
        """Return all banks."""
        return [*self._entries.values()]

    def uploads(self) -> list[UploadBank]:
        """Return the banks that clients made."""
        return [bank for bank in self.entries() if isinstance(bank, UploadBank)]

    def get(self, name: str) -> ServedBank:
        """Return a bank; an unknown name gets 404."""
        entry = self._entries.get(name)
        if entry is None:
            raise bank_not_found(name)
        return entry

    def writable(self, name: str) -> UploadBank:
        """Return a bank that clients may change."""
        entry = self.get(name)
        if not isinstance(entry, UploadBank):
            raise ApiError(
                403,
                f"bank '{name}' was given by the operator and is read-only; use another bank",
                code="read_only_bank",
            )
        return entry

    def upload(self, name: str, files: Mapping[str, IO[bytes]]) -> tuple[UploadBank, list[str]]:
        """Store files for a bank, which is created if it does not exist.

        Returns:
            The bank, and the names of documents that will be replaced.

        Raises:
            ApiError: 400, there are too many documents; 507, the disk is full; or as in `writable`.
                Then nothing is changed.
        """
        limit = self.settings.max_documents
        paths = {name: self._arriving / f"file-{secrets.token_hex(12)}" for name in files}
        try:
            with full_disk():
                # On the disk before the bank knows of them
                for file, path in paths.items():
                    with path.open("xb") as target:
                        shutil.copyfileobj(files[file], target)
                        target.flush()
                        os.fsync(target.fileno())
                with self._changing:
                    if name in self._entries:
                        bank = self.writable(name)
                    else:
                        check_count(len(files), limit)
                        # A bank of the same name may have been deleted before.
                        place = self._banks / f"{name}-{secrets.token_hex(4)}.bank"
                        folder = files_of(place)
                        folder.mkdir()
                        (folder / CREATED).touch()
                        sync_folder(folder)
                        sync_folder(self._banks)
                        bank = self._add(name, place)
                    replaced = bank.take(paths, limit)
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)
        self.work.set()
        return bank, replaced

    def delete(self, name: str) -> None:
        """Delete a bank and its files; a build of it stops.

        Running answers finish on their snapshot; then `turn` removes its memory.
        """
        with self._changing:
            bank = self.writable(name)
            bank.deleted = True
            bank.ended.set()
            gone = bank.path.with_name(bank.path.name + DELETED)
            bank.folder.rename(gone)
            sync_folder(self._banks)
            del self._entries[name]
        shutil.rmtree(gone)
        bank.bank = None
        self._deleted.append(bank.path)
        self.work.set()

    def remove_document(self, name: str, document: str) -> None:
        """Remove a document from a bank, even one that is still to be read."""
        if not self.writable(name).discard(document):
            raise ApiError(404, f"bank '{name}' has no document '{document[:100]}'")
        self.work.set()

    # In the thread that reads files

    def run(self) -> None:
        """Read until the end, behind answers and short texts."""
        step_back()
        super().run()

    def turn(self) -> float:
        """Read a little into each bank, after what else there is to do."""
        # What others have written to the operator's banks
        if time.monotonic() - self._refreshed > REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            for entry in self.entries():
                if entry.read_only:
                    entry.refresh()
        # Deleted banks that no answer reads any more; after a kill, the next start removes them
        for path in [*self._deleted]:
            if not is_read(path):
                delete(path)
                sync_folder(self._banks)
                self._deleted.remove(path)
        return super().turn()

    def read_some(self, bank: FollowedBank) -> float:
        """Read a little into a bank, and count it."""
        assert isinstance(bank, UploadBank)
        began, before = time.monotonic(), bank.progress()
        wait, after = super().read_some(bank), bank.progress()
        self.metrics.build_failures.inc(max(0, len(after.failed) - len(before.failed)))
        if after.files_done > before.files_done:
            self.metrics.built_blocks.inc(max(0, after.blocks - before.blocks))
            self.metrics.build_seconds.observe(time.monotonic() - began)
        return wait

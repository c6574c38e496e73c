"""One bank of the server."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sedem.bank.memory_bank import MemoryBank
from sedem.bank.snapshot import Snapshot
from sedem.bank.store.catalog import CATALOG
from sedem.bank.store.local import LocalStore
from sedem.bank.store.opening import Place, PlacedStore, is_remote, store_at
from sedem.errors import BankError
from sedem.serve.database import full_disk
from sedem.serve.progress import Failure, Progress, Status
from sedem.serve.reading_list import TO_READ, ReadingList
from sedem.serve.trash import Readers

logger = logging.getLogger(__name__)

LOCK_SECONDS = 60.0
"""How long a change of a bank waits for another; a commit takes about a second."""

Stamp = tuple[tuple[int, int, int], ...]
"""A value that changes with every commit."""


Prepare = Callable[[Snapshot], None]
"""Prepares for questions to a new version of a bank."""


def at_once(snapshot: Snapshot) -> None:
    """Do nothing, so that a new version is visible at once."""


@dataclass(eq=False)
class BankEntry:
    """A bank that can be queried.

    Attributes:
        id: id of its row; None for a bank that the operator provides.
        name: the name by which it is addressed.
        title: the name shown to people.
        metadata: the metadata that its creator attached.
        path: its folder, which does not exist until the first document was read. A bank that the
            operator provides may be in an object store.
        created_at: creation time, in seconds since 1970.
        files: the files of all banks.
        prepare: called with each new snapshot before anything else sees it.
        bank: its memory; None until the first document was read. Answers use its snapshots.
        error: why it cannot be opened, in one sentence.
        deleted: whether it was deleted; running answers finish on their snapshot.
        changing: held while documents are removed.
        live: characters read so far of the files that are being read, and the lengths of the
            parsed ones, by the numbers of their rows.
    """

    id: int | None
    name: str
    title: str
    metadata: Mapping[str, str]
    path: Place
    created_at: int
    files: ReadingList
    prepare: Prepare = at_once
    bank: MemoryBank | None = None
    error: str | None = None
    deleted: bool = False
    changing: threading.Lock = field(default_factory=threading.Lock)
    live: tuple[int, Mapping[int, int]] = (0, {})
    _snapshots: list[weakref.ref[Snapshot]] = field(default_factory=list)
    _stamp: Stamp = ()
    _reloading: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def store(self) -> PlacedStore:
        """Where the bank is kept."""
        return store_at(self.path, wait=LOCK_SECONDS)

    @property
    def folder(self) -> Path:
        """The folder of a bank that the server owns."""
        assert not self.read_only
        return Path(self.path)

    @property
    def read_only(self) -> bool:
        """Whether clients may only query it."""
        return self.id is None

    @property
    def status(self) -> Status:
        """Whether it can be queried, and whether files are being read into it."""
        if self.id is not None and self.files.has_work(self.id):
            return "building"
        if self.bank is not None and len(self.bank):
            return "ready"
        failed = self.id is not None and any(
            file.status == "failed" for file in self.files.of(self.id)
        )
        return "failed" if failed or self.error is not None else "empty"

    def file_ids(self) -> dict[str, str]:
        """Return the id of the uploaded file behind each document, by the document's name."""
        return {} if self.id is None else self.files.file_ids(self.id)

    def progress(self) -> Progress:
        """Return the progress of reading its files."""
        files = [] if self.id is None else self.files.of(self.id)
        newest = max((file.round for file in files), default=0)
        files = [file for file in files if file.round == newest]
        to_read = [file for file in files if file.status == TO_READ]
        failed = [file for file in files if file.status == "failed"]
        done, sizes = self.live
        left = sum(sizes.get(file.id, file.bytes) for file in to_read)
        read = sum(file.characters for file in files if file.status == "completed")
        status = self.status
        if status == "ready" and failed and len(failed) == len(files):
            status = "failed"
        return Progress(
            status,
            files_done=len(files) - len(to_read),
            files=len(files),
            characters_done=read + min(done, left),
            characters=read + left,
            blocks=0 if self.bank is None else len(self.bank),
            error=failed[0].error if failed else self.error,
            failed=tuple(Failure(file.file, file.name, file.error or "") for file in failed),
        )

    def refresh(self) -> None:
        """Load what was written to the bank since; cheap if nothing was.

        A bank that can no longer be opened keeps its last snapshot and sets `error`. An object
        store may be slow to answer, so questions do not wait for it.
        """
        if not is_remote(self.path):
            self._look()
        elif self._looking.acquire(blocking=False):
            threading.Thread(target=self._look_and_release, daemon=True).start()

    def _look_and_release(self) -> None:
        try:
            self._look()
        finally:
            self._looking.release()

    def _look(self) -> None:
        try:
            stamp = _stamp_of(self.store)
            same = stamp == self._stamp and (self.error is None or not is_remote(self.path))
            if same or (self.id is not None and not stamp):
                return
            self.reload()
        except BankError as error:
            if self.error is None:
                logger.warning("bank '%s' cannot be read: %s", self.name, error)
            self.error = "the bank cannot be read now; the log of the server has the reason"

    def reload(self) -> MemoryBank:
        """Open the bank, or load what was written to it since.

        Raises:
            BankError: it cannot be opened.
        """
        stamp = _stamp_of(self.store)
        with self._reloading:
            if self.bank is None:
                bank = MemoryBank.open_from(self.store)
                self.prepare(bank.snapshot())
                self.bank = bank
            else:
                self.bank.reload(self.prepare)
            self.error, self._stamp = None, stamp
            self._snapshots = [one for one in self._snapshots if one() is not None]
            self._snapshots.append(weakref.ref(self.bank.snapshot()))
            return self.bank

    def remove(self, names: set[str]) -> None:
        """Remove the given documents, as far as the bank has them.

        Raises:
            BankError: another process writes the bank.
            FullDiskError: the disk is full.
        """
        with self.changing:
            self.refresh()
            if self.bank is None or self.deleted:
                return
            if present := names.intersection(self.bank.documents.names):
                with full_disk():
                    self.store.remove(*present)
                self.refresh()

    def move(self, path: Path, bank: MemoryBank) -> Readers:
        """Switch to another folder with the same documents; `changing` must be held.

        Returns:
            The snapshots of the former folder; running answers use them to their end.
        """
        with self._reloading:
            self.prepare(bank.snapshot())
            readers = self._snapshots
            self.path, self.bank = path, bank
            del self.store  # the store of the former folder
            self._stamp = _stamp_of(self.store)
            self._snapshots = [weakref.ref(bank.snapshot())]
        return readers

    def forget(self) -> Readers:
        """Release the memory.

        Returns:
            Its snapshots; running answers use them to their end.
        """
        with self.changing, self._reloading:
            self.deleted, self.bank = True, None
            return self._snapshots


def created_at(place: Place) -> int:
    """Return when the operator's bank folder last changed; for an object store, now."""
    if is_remote(place):
        return int(time.time())
    return int(Path(place).stat().st_mtime) if Path(place).exists() else 0


def _stamp_of(store: PlacedStore) -> Stamp:
    """Return the commit in an object store, or the state of the catalog's files; may be empty."""
    if not isinstance(store, LocalStore):
        commit = store.commit()
        return ((commit.number, commit.size, int(commit.writer, 16)),)
    stamp = []
    for name in (CATALOG, f"{CATALOG}-wal"):
        try:
            found = os.stat(store.folder / name)
        except OSError:
            continue
        stamp.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamp)

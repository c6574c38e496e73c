"""One bank of the server."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

from sedem.bank.database import check_file
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import MemoryBank, Snapshot
from sedem.bank.parts import Place, Store, is_remote, store_at
from sedem.errors import BankError
from sedem.serve.database import full_disk
from sedem.serve.uploads import Failure, Progress, Status, Uploads

logger = logging.getLogger(__name__)

Stamp = list[tuple[str, int]]
"""The id and version of each file of a bank; it changes with every commit."""

Readers = Sequence[weakref.ref[Snapshot]]
"""References to a bank's snapshots; those that an answer uses are alive."""
Prepare = Callable[[Snapshot], None]
"""Prepares for questions to a new version of a bank."""

UNREADABLE = "the bank cannot be read now; the log of the server has the reason"


@dataclass(eq=False)
class BankEntry:
    """A bank that can be queried.

    Attributes:
        id: id of its row; None for a bank that the operator provides.
        name: the name by which it is addressed.
        path: its file, which does not exist until the first document was read. A bank that the
            operator provides may be in parts.
        created_at: creation time, in seconds since 1970.
        prepare: called with each new snapshot before anything else sees it.
        bank: its memory; None until the first document was read. Answers use its snapshots.
        error: why it cannot be opened, in one sentence.
        deleted: whether it was deleted; running answers finish on their snapshot.
        live: characters read so far of the files that are being read, and the lengths of the
            parsed ones, by the numbers of their rows.
    """

    id: int | None
    name: str
    path: Place
    created_at: int
    uploads: Uploads
    prepare: Prepare = lambda snapshot: None
    bank: MemoryBank | None = None
    error: str | None = None
    deleted: bool = False
    changing: threading.Lock = field(default_factory=threading.Lock)
    live: tuple[int, Mapping[int, int]] = (0, {})
    _snapshots: list[weakref.ref[Snapshot]] = field(default_factory=list)
    _inode: tuple[int, int] | None = None
    _stamp: Stamp | None = None
    _not_purged: Stamp | None = None
    _reloading: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def store(self) -> Store:
        """Where the bank is kept."""
        return store_at(self.path)

    @property
    def snapshot(self) -> Snapshot | None:
        """The bank as it is now; None until the first document was read."""
        bank = self.bank
        return None if bank is None else bank.snapshot()

    @property
    def file(self) -> Path:
        """The file of a bank that the server owns."""
        assert not self.read_only
        return Path(self.path)

    @property
    def read_only(self) -> bool:
        """Whether clients may only query it."""
        return self.id is None

    @property
    def status(self) -> Status:
        """Whether it can be queried, and whether files are being read into it."""
        if self.id is not None and self.uploads.has_work(self.id):
            return "building"
        if self.bank is not None and len(self.bank):
            return "ready"
        failed = self.id is not None and any(
            upload.status == "failed" for upload in self.uploads.of(self.id)
        )
        return "failed" if failed or self.error is not None else "empty"

    def progress(self) -> Progress:
        """Return the progress of reading its files."""
        uploads = [] if self.id is None else self.uploads.of(self.id)
        waiting = [upload for upload in uploads if upload.status == "waiting"]
        failed = [upload for upload in uploads if upload.status == "failed"]
        done, sizes = self.live
        left = sum(sizes.get(upload.id, upload.size) for upload in waiting)
        read = sum(upload.size for upload in uploads if upload.status == "read")
        status = self.status
        if status == "ready" and failed and len(failed) == len(uploads):
            status = "failed"
        return Progress(
            status,
            files_done=len(uploads) - len(waiting),
            files=len(uploads),
            characters_done=read + min(done, left),
            characters=read + left,
            blocks=0 if self.bank is None else len(self.bank),
            error=failed[0].error if failed else self.error,
            failed=tuple(Failure(upload.name, upload.error or "") for upload in failed),
            notes=tuple(one.error for one in uploads if one.status == "read" and one.error),
        )

    def refresh(self) -> None:
        """Load what was written to the bank since; cheap if nothing was.

        A bank that can no longer be opened keeps its last snapshot and sets `error`. An object
        store may be slow to answer, so questions do not wait for it.
        """
        if isinstance(self.store, BankFile):
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
            if self.id is not None and not self.store.exists():
                return
            stamp = self._newest()[1]
            # What stopped an operator's bank from being read may have ended without a commit.
            if stamp != self._stamp or (self.error is not None and self.read_only):
                self.reload()
        except BankError as error:
            if self.error is None:
                logger.warning("bank '%s' cannot be read: %s", self.name, error)
            self.error = UNREADABLE

    def _newest(self) -> tuple[Store, Stamp]:
        """Return the store of the bank that is at the path now, and its newest version.

        Raises:
            BankError: there is none, or it is damaged.
        """
        if isinstance(self.store, BankFile):
            check_file(Path(self.path), self.store)
            found = Path(self.path).stat()
            inode = found.st_dev, found.st_ino
            if self._inode not in (None, inode):
                # Another file is there now. Running answers keep the store of the former one.
                self.store, self._stamp = store_at(self.path), None
            self._inode = inode
        store = self.store
        return store, [(head.id, head.version) for head in (one.head() for one in store.files())]

    def reload(self) -> MemoryBank:
        """Open the bank, or load what was written to it since.

        Raises:
            BankError: it cannot be opened.
        """
        with self._reloading:
            store, stamp = self._newest()
            if self.bank is None or self.bank.store is not store:
                bank = MemoryBank.open_from(store)
                self.prepare(bank.snapshot())
                self.bank = bank
            else:
                self.bank.reload(self.prepare)
            self.error, self._stamp = None, stamp
            self._snapshots = [one for one in self._snapshots if one() is not None]
            self._snapshots.append(weakref.ref(self.bank.snapshot()))
            return self.bank

    def remove(self, names: set[str]) -> None:
        """Remove the given documents, as far as the bank has them or has begun to read them.

        Raises:
            BankError: another process writes the bank.
            FullDiskError: the disk is full.
        """
        with self.changing:
            self.refresh()
            if self.bank is None or self.deleted:
                return
            begun = [view.file.unfinished() for view in self.bank.snapshot().views]
            if present := names.intersection(chain(self.bank.documents.names, *begun)):
                with full_disk():
                    self.store.remove(*present)
                self.refresh()
                self.purge()

    def purge(self) -> bool:
        """Delete removed documents from a client's bank, unless a running answer reads them.

        If it fails, it is not tried again before the next change of the bank.

        Returns:
            Whether there were any.
        """
        if self.bank is None or self.error is not None or self._not_purged == self._stamp:
            return False
        try:
            return self.bank.purge()
        except (BankError, OSError) as error:
            logger.warning("removed documents stay in bank '%s' for now: %s", self.name, error)
            self._not_purged = self._stamp
            return False

    def forget(self) -> Readers:
        """Release the memory.

        Returns:
            Its snapshots; running answers use them to their end.
        """
        with self.changing, self._reloading:
            self.deleted, self.bank = True, None
            return self._snapshots


def created_at(place: Place) -> int:
    """Return when the operator's bank last changed; for an object store, now."""
    if is_remote(place):
        return int(time.time())
    return int(Path(place).stat().st_mtime) if Path(place).exists() else 0

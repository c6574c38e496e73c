"""A bank as the server knows it."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sedem.bank.memory_bank import MemoryBank
from sedem.bank.snapshot import Snapshot
from sedem.bank.store.catalog import CATALOG
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError
from sedem.serve.database import full_disk
from sedem.serve.progress import Failure, Progress, Status
from sedem.serve.reading_list import TO_READ, ReadingList

logger = logging.getLogger(__name__)

LOCK_SECONDS = 60.0
"""How long a change of a bank waits for another one; a commit takes about a second."""

Stamp = tuple[tuple[int, int, int], ...]
"""Number, size and time of the files of a catalog."""


@dataclass(eq=False)
class BankEntry:
    """A bank that can be asked.

    Attributes:
        id: of its row; None for a bank that the operator gave.
        name: by which it is addressed.
        title: what people call it.
        metadata: what its creator noted with it.
        path: its folder, which does not exist until the first document was read.
        created_at: when, in seconds since 1970.
        files: the files of all banks.
        bank: its memory; None until the first document was read. Answers use its snapshots.
        error: why it cannot be opened, in one sentence.
        deleted: whether it was deleted; answers that run end on their snapshot.
        changing: held while documents are removed.
        live: characters that were read of the files that are being read, and the lengths of those
            that were parsed, by the numbers of their rows.
    """

    id: int | None
    name: str
    title: str
    metadata: Mapping[str, str]
    path: Path
    created_at: int
    files: ReadingList
    bank: MemoryBank | None = None
    error: str | None = None
    deleted: bool = False
    changing: threading.Lock = field(default_factory=threading.Lock)
    live: tuple[int, Mapping[int, int]] = (0, {})
    _snapshots: list[weakref.ref[Snapshot]] = field(default_factory=list)
    _stamp: Stamp = ()
    _reloading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def read_only(self) -> bool:
        """Whether clients may only ask it."""
        return self.id is None

    @property
    def status(self) -> Status:
        """Whether it can be asked, and whether files are being read into it."""
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
        """Return how far the reading of its files has come."""
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
        """See what was written to the folder since; costs little if nothing was.

        A bank that cannot be opened any more keeps its last snapshot, and `error` says so.
        """
        stamp = _stamp_of(self.path)
        if stamp == self._stamp or (self.id is not None and not stamp):
            return
        try:
            self.reload()
        except BankError as error:
            if self.error is None:
                logger.warning("bank '%s' cannot be read: %s", self.name, error)
            self.error = "the bank cannot be read now; the log of the server has the reason"

    def reload(self) -> MemoryBank:
        """Open the bank, or see what was written to it since.

        Raises:
            BankError: it cannot be opened.
        """
        stamp = _stamp_of(self.path)
        with self._reloading:
            if self.bank is None:
                self.bank = MemoryBank.open(self.path)
            else:
                self.bank.reload()
            self.error, self._stamp = None, stamp
            self._snapshots = [one for one in self._snapshots if one() is not None]
            self._snapshots.append(weakref.ref(self.bank.snapshot()))
            return self.bank

    def remove(self, names: set[str]) -> None:
        """Remove those documents that the bank has.

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
                    LocalStore(self.path, wait=LOCK_SECONDS).remove(*present)
                self.refresh()

    def forget(self) -> None:
        """Let go of the memory; answers that run keep the snapshot that they use."""
        with self.changing, self._reloading:
            self.deleted, self.bank = True, None

    def in_use(self) -> bool:
        """Return whether an answer uses a snapshot of this bank, after `forget`."""
        return any(one() is not None for one in self._snapshots)


def _stamp_of(folder: Path) -> Stamp:
    """What differs if another commit was made; empty if there is no catalog."""
    stamp = []
    for name in (CATALOG, f"{CATALOG}-wal"):
        try:
            found = os.stat(folder / name)
        except OSError:
            continue
        stamp.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamp)

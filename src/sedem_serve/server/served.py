"""The banks of a server: those of the operator, and those that clients upload files to."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from sedem.bank.file import Place, is_remote
from sedem.bank.memory_bank import Snapshot
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import BankError, BankMismatchError, DataError, UnknownDocumentError
from sedem.reading.document_formats import parse_file
from sedem.reading.documents import Stamp, stamp_of
from sedem.reading.followed import FollowedBank, OpenBank, ReadInto
from sedem.types import Document
from sedem.untrusted import StoppedError
from sedem_serve.server.errors import ApiError, FullDiskError, bad_request, full_disk, is_full

logger = logging.getLogger(__name__)

Status = Literal["empty", "building", "ready", "failed"]
Prepare = Callable[[Snapshot], None]
"""Prepares for questions to a new version of a bank."""
UNREADABLE = "the bank cannot be read now; the log of the server has the reason"
FOREIGN = "another model built this bank; serve that model, or build it again"
FILES = ".files"
"""What follows the name of a bank's file in the name of the folder of its files."""
CREATED = ".created"
"""A file of that folder that is as old as the bank; those of documents do not begin with a dot."""
PIECE = 200
"""Most characters of a name on disk."""


@dataclass(frozen=True)
class Progress:
    """Progress of the files that came since the bank last had nothing to read.

    Attributes:
        status: "building" while files are to be read; then "ready", or "failed" if none of these
            files could be read; "empty" in a bank without files.
        files_done: files that were read or could not be read.
        characters: number of characters; for a file that is not parsed yet, its bytes.
        error: one sentence if a file could not be read.
        failed: all files that could not be read, each with the reason in one sentence.
        notes: what was left out of files that were read, or guessed.
    """

    status: Status
    files_done: int
    files: int
    characters_done: int
    characters: int
    blocks: int
    error: str | None = None
    failed: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self, bank: str) -> dict[str, Any]:
        """Return the progress as JSON."""
        return {"object": "bank.progress", "bank": bank, **asdict(self)}


class ServedBank(OpenBank):
    """A bank that clients can ask; the operator provides it.

    Attributes:
        read_only: whether clients may only query it.
        error: why it cannot be read, in one sentence that names no folder of the server.
        deleted: whether it was deleted; running answers finish on their snapshot.
    """

    read_only = True

    def __init__(
        self,
        place: Place,
        name: str,
        prepare: Prepare,
        fingerprint: str,
        **more: Any,
    ) -> None:
        super().__init__(place=place, name=name, **more)
        self._prepare, self._fingerprint, self._looking = prepare, fingerprint, threading.Lock()
        self.writable, self.roots = not self.read_only, ()
        self.error: str | None = None
        self.deleted = False

    @property
    def current(self) -> Snapshot | None:
        """The bank as it was loaded last; None until the first document was read."""
        return None if (bank := self.bank) is None else bank.snapshot()

    @property
    def created_at(self) -> int:
        """When it last changed, in seconds since 1970; for an object store, now."""
        if is_remote(self.place):
            return int(time.time())
        return int(Path(self.place).stat().st_mtime) if Path(self.place).exists() else 0

    def prepare(self, snapshot: Snapshot) -> None:
        """Prepare for questions to a new version, which stays hidden until this returns."""
        self._prepare(snapshot)

    def refresh(self) -> None:
        """Load what was written to it since; cheap if nothing was.

        A bank that can no longer be opened keeps its last snapshot and sets `error`. An object
        store may be slow to answer, so questions do not wait for it.
        """
        if not is_remote(self.place):
            self._refresh()
        elif not self._looking.locked():
            threading.Thread(target=self._refresh, daemon=True).start()

    def _refresh(self) -> None:
        with self._looking:
            try:
                self.newest()
                foreign = self.bank is not None and self.bank.fingerprint != self._fingerprint
                self.error = FOREIGN if foreign else None
            except BankError as error:
                if self.error is None:
                    logger.warning("bank '%s' cannot be read: %s", self.name, error)
                self.error = UNREADABLE

    def snapshot(self) -> Snapshot | None:
        """Return it as of its newest commit; None before the first one."""
        self.refresh()
        if self.error is not None:
            raise BankError(self.error)
        return self.current

    def remarks(self) -> list[str]:
        """Say what was left out of files that were read, or guessed."""
        return [*self.progress().notes]

    def progress(self) -> Progress:
        """Return the progress of reading its files."""
        blocks = 0 if self.bank is None else len(self.bank)
        status: Status = "ready" if blocks else "failed" if self.error else "empty"
        return Progress(status, 0, 0, 0, 0, blocks, self.error)

    def add(self, read: ReadInto, *documents: Document) -> None:
        """Add or replace documents; they are committed when this returns."""
        with full_disk():
            super().add(read, *documents)
        self.refresh()

    def remove(self, *documents: str) -> None:
        """Remove documents, in one commit."""
        with full_disk():
            super().remove(*documents)
        self.refresh()


class UploadBank(ServedBank, FollowedBank):
    """A bank of a client, which follows a folder of uploaded files beside it.

    An upload is a file there, and a document that is deleted is a file that is removed, so a killed
    server continues where it was. A file that cannot be read is removed; its document stays as it
    was. On disk a file has its name in a form that is no path.
    """

    read_only = False
    known_errors = (ApiError,)

    def __init__(self, place: Path, name: str, *given: Any) -> None:
        super().__init__(place, name, *given, folder=files_of(place))
        self.failures: dict[str, str] = {}
        self._read: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._before = 0
        self._unpurged: object = None
        self._next_check = math.inf  # nobody edits a file there
        created = stamp_of(self.folder / CREATED) or (0, 0)
        self._created_at = created[1] // 10**9
        self.look()

    @property
    def created_at(self) -> int:
        """When it was created, in seconds since 1970."""
        return self._created_at

    # Its files

    def take(self, files: Mapping[str, Path], limit: int) -> list[str]:
        """Move uploaded files into the folder.

        Args:
            files: where they are, by the names of their documents.
            limit: most documents of the bank.

        Returns:
            Names of documents that will be replaced.
        """
        with self._state:
            known = {*self._known(), *(self._waiting or ())}
            check_count(len(known | set(files)), limit)
            if not self._waiting:
                self.failures, self._read, self._notes = {}, {}, {}
            for name, source in files.items():
                target = self.folder / file_name(name)
                make_folders(target.parent)
                source.replace(target)
                sync_folder(target.parent)
            self.look()
            self.next_turn = 0.0
        return [name for name in files if name in known]

    def discard(self, name: str) -> bool:
        """Remove a document and its file; returns whether there was one."""
        with self._state, full_disk():
            there = name in self._known() or name in (self._waiting or ()) or name in self.failures
            self.record.save()  # so that a kill after the next line removes the document too
            self._unlink(name)
            known = self.failures, self._read, self._lengths, self._waiting or {}, self._found
            for one in known:
                one.pop(name, None)
            self._held.discard(name)
            self.next_turn = 0.0
            if Path(self.place).exists():
                with suppress(UnknownDocumentError):  # a part of it may have been read
                    self.remove(name)
            return there

    def _known(self) -> list[str]:
        snapshot = self.current
        return [] if snapshot is None else snapshot.documents.names

    def _unlink(self, name: str) -> None:
        path = self.folder / file_name(name)
        path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            sync_folder(path.parent)

    # What follows them

    def catch_up(self, read: ReadInto, *, briefly: bool = False) -> bool:
        """Read what is new, and remove what was deleted; as in `FollowedBank`."""
        try:
            return super().catch_up(read, briefly=briefly)
        except BankMismatchError as error:
            for name in [*(self._waiting or ())]:
                if name not in self.record.files:
                    self._fail(name, error)
            return False
        finally:
            self._before, self._lengths, self._live = 0, {}, 0

    def told(self, error: Exception) -> str:
        """Say what a client may know of an error, which must not name the server's folders."""
        if isinstance(error, BankMismatchError):
            return (
                f"bank '{self.name}' was built by another model; upload to a new bank, or serve "
                "the model that built it"
            )
        if is_full(error) or isinstance(error, FullDiskError):
            return "the disk of the server is full; files are read when there is room"
        if isinstance(error, (DataError, ApiError)):
            return str(error)
        return "the bank cannot be written now; the log of the server has the reason"

    def _alone(self) -> AbstractContextManager[object]:
        return nullcontext()  # the server has its folder for itself

    def _names(self) -> list[str]:
        self.refresh()
        return self._known()

    def _is_read_from_a_file(self, name: str) -> bool:
        return name in self.record.files

    def _see_lost(self, missing: Mapping[str, Path]) -> None:
        """See every missing file as deleted: the folder is the server's own."""

    def _files(self) -> dict[str, tuple[Path, Stamp]]:
        found: dict[str, tuple[Path, Stamp]] = {}
        if self.deleted:
            raise StoppedError

        def failed(error: OSError) -> None:
            raise error

        for folder, _, names in os.walk(self.folder, onerror=failed):
            for name in names:
                path = Path(folder, name)
                if name != CREATED and (stamp := stamp_of(path)) is not None:
                    found[document_name(path.relative_to(self.folder).as_posix())] = path, stamp
        return dict(sorted(found.items(), key=lambda one: one[1][1][1]))

    def _document(self, name: str, path: Path) -> Document:
        document = Document(name, *parse_file(path, name, stopped=self.ended.is_set))
        self._lengths[name] = len(document.text)
        return document

    def _committed(self, names: Iterable[str]) -> None:
        with self._state:
            for name in names:
                self._read[name] = self._lengths.pop(name, 0)
                self._before += self._read[name]
            gone = [name for name in names if name not in self._found]
            if gone:  # deleted while they were read
                self.remove(*gone)
            self.refresh()  # before nothing waits any more
            super()._committed(names)
            for name in gone:
                del self.record.files[name], self._read[name]

    def _fail(self, name: str, error: Exception) -> None:
        """Tell why a file cannot be read, and remove it, unless there is another one by now."""
        with self._state:
            path, stamp = self._found.get(name, (None, None))
            if path is not None and stamp_of(path) == stamp:
                logger.info("a file could not be read into bank '%s'", self.name)
                self.failures[name] = self.told(error)
                self.record.files.pop(name, None)
                self.record.save()
                self._unlink(name)
            self._lengths.pop(name, None)
            self._done(name)

    def purge(self) -> bool:
        """Delete removed documents, unless a running answer reads them.

        If it fails, it is not tried again before the next change of the bank.
        """
        self.refresh()
        if self.bank is None or self.error is not None:
            return False
        head = self.bank.snapshot().views[0].head
        if head == self._unpurged:
            return False
        try:
            return self.bank.purge()
        except (BankError, OSError) as error:
            logger.warning("removed documents stay in bank '%s' for now: %s", self.name, error)
            self._unpurged = head
            return False

    # What clients see

    def reading(self) -> str:
        """Say how many uploads are still to be read."""
        waiting = len(self._waiting or ())
        return f"still reading {waiting:,} files of '{self.name}'" if waiting else ""

    def unreadable(self) -> list[str]:
        """Return nothing: an upload that cannot be read is refused."""
        return []

    def changed(self, document: str) -> bool:
        """Return false: an upload is read once."""
        return False

    def progress(self) -> Progress:
        """Return the progress of reading its files."""
        with self._state:
            waiting = {
                one: self._lengths.get(one, self._found[one][1][0]) for one in self._waiting or ()
            }
            left, read = sum(waiting.values()), sum(self._read.values())
            blocks = 0 if self.bank is None else len(self.bank)
            status: Status = "building" if waiting else "ready" if blocks else "empty"
            if not waiting and (self.failures or self.error) and (not blocks or not self._read):
                status = "failed"
            done, failures = len(self._read) + len(self.failures), [*self.failures.items()]
            first = failures[0][1] if failures else None
            return Progress(
                status,
                files_done=done,
                files=done + len(waiting),
                characters_done=read + min(max(0, self._live - self._before), left),
                characters=read + left,
                blocks=blocks,
                error=first or self.error or self._trouble or None,
                failed=tuple({"filename": name, "error": why} for name, why in failures),
                notes=tuple("; ".join(notes) for notes in self._notes.values() if notes),
            )


def check_count(documents: int, limit: int) -> None:
    """Reject too many documents of a bank, with 400."""
    if documents > limit:
        raise bad_request(
            f"the bank would have {documents:,} documents, at most {limit:,} are allowed; delete "
            "some or use another bank",
            "file",
            "too_many_documents",
        )


def files_of(place: Path) -> Path:
    """Return the folder of the files of a client's bank."""
    return place.with_name(place.name + FILES)


def file_name(document: str) -> str:
    """Return the relative path of a document's file; a long name is a file in folders."""
    name = quote(document, safe=" ")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    # The last piece is whole; no name but that of a folder ends with a bare "%".
    ends = range(len(name), 0, -PIECE)
    return "%/".join(reversed([name[max(0, end - PIECE) : end] for end in ends]))


def document_name(file: str) -> str:
    """Return the name of the document of a file."""
    return unquote(file.replace("%/", ""))

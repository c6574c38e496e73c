"""A bank as of its newest commit, and a bank that follows the files that it was read from.

The folder is the queue: a file that is new or has changed waits, whatever wrote it, and what was
read of a deleted file is removed. Files of a disk that is not there were not deleted.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from sedem.durable_files import make_folders, sha256
from sedem.errors import DataError, SedemError
from sedem.reading.document_formats import told_empty
from sedem.reading.documents import (
    NOTE,
    Failed,
    LeftOut,
    Record,
    Seen,
    Stamp,
    files_in,
    read_document,
    stamp_of,
    told_left_out,
)
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, StoppedError, check_file

if TYPE_CHECKING:
    # Importing these imports torch, and the first message of a client is answered without it.
    from sedem.bank.file import Place
    from sedem.bank.memory_bank import MemoryBank, Snapshot
    from sedem.reading.building import Report

logger = logging.getLogger(__name__)

GROUP_CHARACTERS = 10_000
"""Least characters of a commit of a folder: what was read can be asked while the rest is read."""
LOOK_SECONDS, LOOK_MOST = 2.0, 10.0
"""How often a folder is compared with what was read of it, if that takes little and if it takes
long."""
LOOK_SHARE = 20
"""Looking at a large folder takes one part in so many of the time, and so does what fails."""
CHECK_SECONDS = 600.0
"""How often the content of all files is compared, which finds what keeps size and time."""

NAMED = ("not readable", "names that are not UTF-8")
"""Why files of a folder were left out that its owner may not expect."""

ReadInto = Callable[..., "Report"]
"""Reads documents into a bank: `building.build_bank` with its model and engine."""


class OpenBank:
    """A bank as of its newest commit, whichever process made it; threads may share it.

    Attributes:
        writable: whether agents may keep notes in it.
        roots: folders that the names of its documents may be relative to.
        bank: what was read of it last; None before the first commit.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name, self.writable = place, name, True
        self.roots: Sequence[str] = (os.getcwd(),)
        self.bank: MemoryBank | None = None
        self._file: tuple[int, int] | None = None
        self._opening = threading.Lock()

    def snapshot(self) -> Snapshot | None:
        """Return the bank as of its newest commit; None before the first one."""
        return self.newest()

    def newest(self) -> Snapshot | None:
        """Open what is at the bank's place now, which may be another bank; see `snapshot`."""
        from sedem.bank.memory_bank import MemoryBank

        with self._opening:
            path = Path(self.place)
            # An open file stays what it was, even when another one has its name.
            found = path.stat() if path.is_file() else None
            file = None if found is None else (found.st_dev, found.st_ino)
            if self.bank is None or file != self._file:
                bank = MemoryBank.open(self.place)
                self.prepare(bank.snapshot())
                self.bank, self._file = bank, file
            self.bank.reload(self.prepare)
            return self.bank.snapshot()

    def prepare(self, snapshot: Snapshot) -> None:
        """Prepare for questions to a new version, which stays hidden until this returns."""

    def reading(self) -> str:
        """Say what is still to be read into it, or why nothing can be; empty if nothing."""
        return ""

    def unreadable(self) -> list[str]:
        """Return one sentence for each file that could not be read."""
        return []

    def remarks(self) -> list[str]:
        """Say what was left out of documents, or guessed, when their files were read."""
        if (snapshot := self.snapshot()) is None:
            return []
        documents, told = snapshot.documents, list[str]()
        for at in range(len(documents)):
            if pages := documents.pages(at):
                characters = documents.characters(at)

                def part(place: slice, at: int = at) -> str:
                    return documents.text(at, place.start, place.stop)

                told += told_empty(documents.name(at), pages, characters, part)
        return told

    def changed(self, document: str) -> bool:
        """Whether the file of a document has changed since it was read, or is gone."""
        return False

    def add(self, reader: ReadInto, *documents: Document) -> None:
        """Add or replace documents; they are committed when this returns."""
        reader(self.place, documents)
        self.purge()

    def remove(self, *documents: str) -> None:
        """Remove documents, in one commit."""
        from sedem.bank.memory_bank import store_at

        store_at(self.place).remove(*documents)
        self.purge()

    def purge(self) -> bool:
        """Delete what was replaced or removed, unless an answer still reads it."""
        if self.bank is None:
            return False
        self.newest()
        return self.bank.purge()


class FollowedBank(OpenBank):
    """A bank that follows the files of a folder, which are only read.

    Args:
        place: file of the bank.

    Attributes:
        ended: set when nothing is to be read any more.
        next_turn: when there may be more to read, by the monotonic clock.
    """

    known_errors: tuple[type[Exception], ...] = ()
    """Errors besides sedem's whose message says everything."""

    def __init__(self, place: Path, folder: Path, name: str) -> None:
        super().__init__(place, name)
        self.path, self.folder = place, folder.resolve()
        self.roots = os.path.abspath(folder), str(self.folder)
        self.record = Record(place)
        self._found: dict[str, tuple[Path, Stamp]] = {}
        self._held: set[str] = set()
        self._waiting: dict[str, None] | None = None
        self._seen: dict[str, Seen] = {}
        self._unchecked: list[str] = []
        self._live = 0
        self._left_out: LeftOut = {}
        self._notes: dict[str, tuple[str, ...]] = {}
        self._away = self._trouble = ""
        self._next_look = self._next_check = self._next_save = self.next_turn = 0.0
        self.ended = threading.Event()
        self._state = threading.RLock()

    def newest(self) -> Snapshot | None:
        """Return what is read so far; None before the first commit."""
        from sedem.bank.memory_bank import store_at

        return super().newest() if store_at(self.place).exists() else None

    def reading(self) -> str:
        """Say how many files are still to be read, and what is wrong with the folder."""
        waiting = self.waiting
        told = f"still reading {waiting:,} files of '{self.name}'" if waiting else ""
        away = self.record.told(str(self.place), self._away, f" of '{self.name}'")
        return "; ".join(filter(None, [told, away, self._trouble]))

    @property
    def waiting(self) -> int:
        """Number of files that are still to be read."""
        if self._waiting is None:
            self.look()
        return len(self._waiting or ())

    def unreadable(self) -> list[str]:
        """Return why files could not be read."""
        return [*(one.why for one in [*self.record.failed.values()]), *self.left_out(NAMED)]

    def left_out(self, reasons: Collection[str]) -> list[str]:
        """Return a sentence on files that were left out for some reasons, if there are any."""
        found = {why: names for why, names in self._left_out.items() if why in reasons}
        return [f"files of '{self.name}' were not read{told_left_out(found)}"] if found else []

    def remarks(self) -> list[str]:
        """Return pages without text, and what was said of the files that this process read."""
        told = (note for notes in [*self._notes.values()] for note in notes)
        return list(dict.fromkeys([*super().remarks(), *told]))

    def changed(self, document: str) -> bool:
        """Whether a file is another one now than when it was read, or is gone."""
        seen = self.record.files.get(document)
        stamp = None if seen is None else seen[:2]
        return not document.endswith(NOTE) and stamp_of(self.folder / document) != stamp

    # Following

    def read_some(self, read: ReadInto) -> float:
        """Read a little, unless it is too early; return the seconds until there may be more to do.

        An error is told, and it is tried again.
        """
        began = time.monotonic()
        if began < self.next_turn:
            return self.next_turn - began
        try:
            more = self.catch_up(read, briefly=True)
            self._trouble, wait = "", 0.0 if more else max(0.0, self._next_look - time.monotonic())
        except StoppedError:
            wait = LOOK_MOST
        except Exception as error:
            told, wait = self.told(error), _pause(time.monotonic() - began)
            if told != self._trouble:
                known = isinstance(error, (SedemError, OSError, *self.known_errors))
                why = f": {error}" if known else ""
                logger.warning("reading files of '%s' failed%s", self.name, why, exc_info=not known)
            self._trouble = told
        self.next_turn = time.monotonic() + wait
        return wait

    def told(self, error: Exception) -> str:
        """Say that an error keeps the files from being read."""
        return f"'{self.name}' cannot be read into its bank: {error}"

    def catch_up(self, read: ReadInto, *, briefly: bool = False) -> bool:
        """Read what is new or changed, and remove what was deleted.

        Of several processes, one reads and the others see what it commits.

        Args:
            briefly: return soon, even if not all is read.

        Returns:
            Whether there is more to do now.

        Raises:
            StoppedError: `ended` was set.
            SedemError: the bank cannot be written, or another model made it.
        """
        make_folders(self.path.parent, 0o700)
        self.look()
        until = time.monotonic() + (LOOK_SECONDS if briefly else math.inf)
        try:
            with self._alone():
                self._read_waiting(read, until)
                self._check(until)
                self._read_waiting(read, until)
                self._remove_deleted()
                self.purge()
                return bool(self._waiting or self._unchecked)
        except Timeout:
            self.record.load()
            self.look()
            return False

    def _alone(self) -> AbstractContextManager[object]:
        return FileLock(f"{self.path}.lock", timeout=0)

    def look(self) -> None:
        """Compare the folder with what was read of it.

        What is new comes first, so that it need not wait for what is still to be read.
        """
        names = self._names()
        with self._state:
            began = time.monotonic()
            if self._away:
                self.record.lost = set()  # a whole folder comes back at once, files do not
            self._found = self._files()
            wait = _pause(time.monotonic() - began)
            self._held = {name for name in names if self._is_read_from_a_file(name)}
            known = {name: seen[:2] for name, seen in self.record.files.items()}
            known = {name: stamp for name, stamp in known.items() if name in self._held}
            known |= {name: one[:2] for name, one in self.record.failed.items()}
            order = {name: place for place, name in enumerate(self._waiting or ())}
            different = [name for name, (_, at) in self._found.items() if known.get(name) != at]
            different.sort(key=lambda name: order.get(name, -1))
            self._waiting = dict.fromkeys(different)
            self._see_lost({one: self.folder / one for one in self._held - self._found.keys()})
            self._next_look = time.monotonic() + wait

    def _names(self) -> list[str]:
        """Return the documents of the bank, also those that were only begun."""
        snapshot = self.newest()
        if snapshot is None:
            return []
        return [*snapshot.documents.names, *chain(*(v.file.unfinished() for v in snapshot.views))]

    def _is_read_from_a_file(self, name: str) -> bool:
        return not name.endswith(NOTE)

    def _see_lost(self, missing: Mapping[str, Path]) -> None:
        if self._away:
            self.record.lost = set(missing)
        else:
            there = {stamp for _, stamp in self._found.values()}
            self.record.keep_lost(missing, len(self._held), there)

    def _files(self) -> dict[str, tuple[Path, Stamp]]:
        """Return all files that can be read, by the names of their documents."""
        left_out: LeftOut = {}
        try:
            # Else a folder that cannot be listed looks like an empty one.
            with os.scandir(self.folder) as entries:
                self._away = "" if any(entries) else f"the folder of '{self.name}' is empty"
            paths = files_in([self.folder], left_out=left_out)
        except OSError as error:
            self._away = f"the folder of '{self.name}' cannot be read: {error.strerror or error}"
            return {}
        except DataError:
            return {}  # there is none
        finally:
            self._left_out = left_out
        stamps = {
            path.relative_to(self.folder).as_posix(): (path, stamp_of(path)) for path in paths
        }
        return {name: (path, at) for name, (path, at) in stamps.items() if at is not None}

    def _read_waiting(self, read: ReadInto, until: float) -> None:
        def progress(done: int) -> None:
            if self.ended.is_set():
                raise StoppedError
            self._live = done
            if time.monotonic() > self._next_look:
                self.look()  # so that what comes while a long document is read is told

        documents, self._live = self._documents(until), 0
        if (first := next(documents, None)) is not None:
            read(
                self.place,
                chain([first], documents),
                progress,
                committed=self._committed,
                failed=self._fail,
                commit=GROUP_CHARACTERS,
            )

    def _documents(self, until: float) -> Iterator[Document]:
        """Read the files that wait, until there is none or it is time to return."""
        tried = set[str]()
        while not tried or time.monotonic() < until:
            if self.ended.is_set():
                raise StoppedError
            with self._state:
                name = next((one for one in self._waiting or () if one not in tried), None)
                if name is None:
                    return
                path, stamp = self._found[name]
            tried.add(name)
            self.record.failed.pop(name, None)
            before = self.record.files.get(name)
            try:
                self._seen[name] = Seen(*stamp, _digest(path), str(path))
                if before and name in self._held and before.sha256 == self._seen[name].sha256:
                    self._committed([name])  # it was only touched
                    continue
                document = self._document(name, path)
            except (DataError, OSError) as error:
                self._fail(name, error)
            else:
                self._notes[name] = document.notes
                yield document

    def _document(self, name: str, path: Path) -> Document:
        return replace(read_document(path, stopped=self.ended.is_set), name=name)

    def _committed(self, names: Iterable[str]) -> None:
        """See that documents are in the bank."""
        with self._state:
            for name in names:
                self.record.files[name] = self._seen.pop(name)
                self._done(name)
            began = time.monotonic()
            if began > self._next_save:
                self.record.save()
                self._next_save = began + LOOK_SHARE * (time.monotonic() - began)

    def _fail(self, name: str, error: Exception) -> None:
        """See that a file cannot be read, unless it is gone meanwhile."""
        with self._state:
            if name in self._found and (stamp := stamp_of(self._found[name][0])) is not None:
                # Access to a file may be given without changing it.
                at = 0.0 if isinstance(error, OSError) else time.time()
                self.record.failed[name] = Failed(*stamp, str(error), at)
            self._done(name)

    def _done(self, name: str) -> None:
        if self._waiting is not None:
            self._waiting.pop(name, None)

    def _check(self, until: float) -> None:
        """Let files wait whose content has changed although their size and time have not."""
        if not self._unchecked and time.monotonic() > self._next_check:
            self._unchecked = [*self._found]
            self._next_check = time.monotonic() + CHECK_SECONDS
        changed = False
        while self._unchecked and time.monotonic() < until:
            if self.ended.is_set():
                raise StoppedError
            name = self._unchecked.pop()
            path, stamp = self._found.get(name, (Path(), None))
            seen = self.record.files.get(name)
            with suppress(DataError, OSError):
                if seen and seen[:2] == stamp and _digest(path) != seen.sha256:
                    changed = self.record.files.pop(name) is seen
        if changed:
            self.look()

    def _remove_deleted(self) -> None:
        with self._state:
            gone = [
                one for one in self._held if one not in self._found and one not in self.record.lost
            ]
            if gone:
                self.remove(*gone)
            stays = self.record.lost.union(self._found)
            files, failed = self.record.files, self.record.failed
            self.record.files = {name: seen for name, seen in files.items() if name in stays}
            self.record.failed = {name: one for name, one in failed.items() if name in stays}
            self._notes = {name: notes for name, notes in self._notes.items() if name in stays}
            if not self._away:
                self.record.save()


class Follower:
    """Reads what changes in folders into their banks, in the background, a little of each in turn.

    Args:
        banks: returns the banks; only those that follow a folder are read.
        read: reads documents into a bank.

    Attributes:
        work: set when there is something to do at once.
    """

    def __init__(self, banks: Callable[[], Iterable[OpenBank]], read: ReadInto) -> None:
        self.banks, self.read = banks, read
        self.work, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self.run, name="sedem-follower", daemon=True)

    def start(self) -> None:
        """Start, or continue what a killed process has left."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current batch of segments; what was committed is kept.

        This does not block.
        """
        self._ended.set()
        for bank in self._followed():
            bank.ended.set()
        self.work.set()

    def close(self, seconds: float | None = None) -> None:
        """Stop, and wait until the thread has ended, at most so many seconds."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def run(self) -> None:
        """Read until the end; the thread does this."""
        while not self._ended.is_set():
            self.work.clear()
            self.work.wait(self.turn())

    def turn(self) -> float:
        """Read a little into each bank; return the seconds until there may be more to do."""
        wait = LOOK_SECONDS
        for bank in self._followed():
            if not self._ended.is_set():
                wait = min(wait, self.read_some(bank))
        return wait

    def read_some(self, bank: FollowedBank) -> float:
        """Read a little into a bank; as `FollowedBank.read_some`."""
        return bank.read_some(self.read)

    def _followed(self) -> list[FollowedBank]:
        return [bank for bank in self.banks() if isinstance(bank, FollowedBank)]


def _pause(spent: float) -> float:
    return min(max(LOOK_SECONDS, LOOK_SHARE * spent), LOOK_MOST)


def _digest(path: Path) -> str:
    check_file(path, DataError, DOCUMENT_BYTES)
    return sha256(path)

"""The banks that tools use: one that was built, or a folder that is read into one.

A bank is seen as of its newest commit, whichever process made it. The files of a folder are only
read: its bank is elsewhere, holds the notes of agents too, and follows the files in the background.
A file that somebody deletes is forgotten; files of a disk that is not there are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from filelock import FileLock, Timeout

from sedem.durable_files import atomic_write, create_private, make_folders
from sedem.errors import DataError, NoTextError, SedemError
from sedem.reading.document_formats import told_empty
from sedem.reading.documents import files_in, read_document
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, StoppedError, exists, is_folder, read_json

if TYPE_CHECKING:
    # Importing these imports torch, and the first message of a client is answered without it.
    from sedem.bank.memory_bank import MemoryBank, Snapshot
    from sedem.bank.parts import Place
    from sedem.model import SeDeM

NOTE = ".note"
"""Ending of the name of a note; no file of such a name is read, so the two are never confused."""
PARTS = "bank.json"
"""File of a folder that is a bank in parts, `bank.parts.MANIFEST`."""
GROUP_CHARACTERS = 10_000
"""Least characters of a commit of a folder: what was read can be asked while the rest is read."""
LOOK_SECONDS = 2.0
"""How often a folder is compared with what was read of it."""
LOOK_SHARE = 20
"""Looking at a large folder takes at most one part in so many of the time; so does what fails."""
STOP_SECONDS = 10.0
"""How long the end of a process waits for a batch that is being read."""

Stamp = tuple[int, int]
"""Size and time of the last change of a file."""


class ToolBank(Protocol):
    """A bank that tools use; threads may share it."""

    name: str
    writable: bool
    roots: Sequence[str]
    """Folders that the names of its documents may be relative to."""

    def snapshot(self) -> Snapshot | None:
        """Return it as of its newest commit; None before the first one.

        Raises:
            BankError: it is damaged, or it cannot be read.
        """

    def reading(self) -> str:
        """Say what is still to be read into it, or why nothing can be; empty if nothing."""

    def unreadable(self) -> list[str]:
        """Return one sentence for each file that could not be read."""

    def remarks(self) -> list[str]:
        """Say what was left out of documents, or guessed, when their files were read."""

    def changed(self, document: str) -> bool:
        """Whether the file of a document has changed since it was read, or is gone."""

    def add(self, model: SeDeM, document: Document) -> None:
        """Add or replace a document; it is committed when this returns."""

    def remove(self, document: str) -> None:
        """Remove a document."""


class BuiltBank:
    """A bank that was built, in one file or in parts."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name, self.writable = place, name, True
        self.roots: Sequence[str] = (os.getcwd(),)
        self._bank: MemoryBank | None = None
        self._file: tuple[int, int] | None = None
        self._opening = threading.Lock()

    def snapshot(self) -> Snapshot | None:
        """Return the bank as of its newest commit, even if another bank is at its place now."""
        from sedem.bank.memory_bank import MemoryBank
        from sedem.reading.documents import source_text

        with self._opening:
            file = self._inode()
            if self._bank is None or file != self._file:
                self._bank = MemoryBank.open(self.place, source=source_text)
                self._file = file
            self._bank.reload()
            return self._bank.snapshot()

    def _inode(self) -> tuple[int, int] | None:
        # An open file stays what it was, even when another one has its name.
        path = Path(self.place)
        if not path.is_file():
            return None
        found = path.stat()
        return found.st_dev, found.st_ino

    def reading(self) -> str:
        """Return nothing: the bank is all there is."""
        return ""

    def remarks(self) -> list[str]:
        """Return what a bank shows by itself: pages without text."""
        snapshot = self.snapshot()
        if snapshot is None:
            return []
        return [
            told for index in range(len(snapshot.documents)) for told in _empty(snapshot, index)
        ]

    def unreadable(self) -> list[str]:
        """Return nothing: the files were read when the bank was built."""
        return []

    def changed(self, document: str) -> bool:
        """Return false: the bank does not follow the files that it was built from."""
        return False

    def add(
        self, model: SeDeM, *documents: Document, progress: Callable[[int], None] | None = None
    ) -> None:
        """Add or replace documents."""
        from sedem.reading.building import build_bank

        build_bank(model, model.engine, self.place, documents, progress, source=model.source)
        self._purge()

    def remove(self, document: str) -> None:
        """Remove a document."""
        from sedem.bank.parts import store_at

        store_at(self.place).remove(document)
        self._purge()

    def _purge(self) -> None:
        """Delete what was replaced or removed, unless an answer still reads it."""
        if self._bank is not None:
            self.snapshot()
            self._bank.purge()


class FolderBank(BuiltBank):
    """A folder of documents, whose bank is a file elsewhere.

    Args:
        home: where the banks of folders are kept.
        model: name of the model that reads it; each model has a bank of its own.
    """

    def __init__(self, folder: Path, home: Path, model: str, name: str) -> None:
        self.folder = folder.resolve()
        digest = hashlib.sha256(f"{self.folder}\n{model}".encode()).hexdigest()[:12]
        self.path = home / f"{name}-{digest}.bank"
        super().__init__(self.path, name)
        self.roots = os.path.abspath(folder), str(self.folder)
        self._load()
        self._failed: dict[str, tuple[Stamp, str]] = {}
        self._notes: dict[str, tuple[str, ...]] = {}
        self._waiting: list[str] | None = None
        self._away = self._trouble = ""
        self._next_look = 0.0

    def snapshot(self) -> Snapshot | None:
        """Return what is read so far; None before the first commit."""
        from sedem.bank.parts import store_at

        return super().snapshot() if store_at(self.path).exists() else None

    def reading(self) -> str:
        """Say how many files are still to be read, and what is wrong with the folder."""
        if self._waiting is None:
            self._look()
        waiting = len(self._waiting or ())
        told = f"still reading {waiting:,} files of '{self.name}'" if waiting else ""
        away = self._away
        if self._lost:
            count = f"{len(self._lost):,} files of '{self.name}'"
            away = (
                f"{away or f'{count} are missing all at once'}; what was read of {count} is kept "
                f"until they are back; if you deleted them, run sedem bank rm '{self.path}' NAME"
            )
        return "; ".join(filter(None, [told, away, self._trouble]))

    def unreadable(self) -> list[str]:
        """Return why files could not be read."""
        return [why for _, why in [*self._failed.values()]]

    def remarks(self) -> list[str]:
        """Return pages without text, and what was said of the files that this process read."""
        told = (note for notes in [*self._notes.values()] for note in notes)
        return list(dict.fromkeys([*super().remarks(), *told]))

    def changed(self, document: str) -> bool:
        """Whether a file is another one now than when it was read, or is gone."""
        stamp = self._read.get(document)
        return not document.endswith(NOTE) and _stamp(self.folder / document) != stamp

    def follow(self, model: SeDeM, stop: threading.Event) -> None:
        """Read the folder, and then what changes in it, until `stop` is set."""
        while not stop.is_set():
            began = time.monotonic()
            try:
                self.catch_up(model, stop, briefly=True)
                self._trouble, wait = "", self._next_look - time.monotonic()
            except StoppedError:
                return
            except (SedemError, OSError) as error:
                self._trouble = f"'{self.name}' cannot be read into its bank: {error}"
                wait = max(LOOK_SECONDS, LOOK_SHARE * (time.monotonic() - began))
            stop.wait(max(0.0, wait))

    def catch_up(self, model: SeDeM, stop: threading.Event, *, briefly: bool = False) -> None:
        """Read what is new or changed, and remove what was deleted.

        Of several processes, one reads and the others see what it commits.

        Args:
            briefly: return when the folder is to be looked at again, even if not all is read.

        Raises:
            StoppedError: `stop` was set.
            SedemError: the bank cannot be written, or another model made it.
        """
        make_folders(self.path.parent, 0o700)
        found = self._look()
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=0):
                self._read_changes(model, stop, found, briefly)
                self._remove_deleted(found)
                self._purge()
        except Timeout:
            self._load()
            self._look()

    def _read_changes(
        self, model: SeDeM, stop: threading.Event, found: Mapping[str, Stamp], briefly: bool
    ) -> None:
        def check(_: int) -> None:
            if stop.is_set():
                raise StoppedError

        def commit(group: Mapping[str, Document]) -> None:
            check(0)
            try:
                self.add(model, *group.values(), progress=check)
            except DataError as error:
                # One that cannot be read does not stop the others.
                for name, document in group.items():
                    if len(group) > 1:
                        commit({name: document})
                    else:
                        self._failed[name] = found[name], str(error)
            else:
                self._save({**self._read, **{name: found[name] for name in group}})

        different = [*(self._waiting or ())]
        group: dict[str, Document] = {}
        for number, name in enumerate(different, start=1):
            self._failed.pop(name, None)
            try:
                read = read_document(self.folder / name)
                group[name] = Document(name, read.text, read.pages)
                self._notes[name] = read.notes
            except (DataError, OSError) as error:
                if _stamp(self.folder / name) is not None:  # or it is gone meanwhile
                    self._failed[name] = found[name], str(error)
            size = sum(len(document.text) for document in group.values())
            if group and (size >= GROUP_CHARACTERS or number == len(different)):
                commit(group)
                group = {}
            self._waiting = [*group, *different[number:]]
            if briefly and not group and time.monotonic() > self._next_look:
                return

    def _remove_deleted(self, found: Mapping[str, Stamp]) -> None:
        for name in self._held():
            if name not in found and name not in self._lost:
                self.remove(name)
        stays = self._lost.union(found)
        self._save({name: stamp for name, stamp in self._read.items() if name in stays})
        self._failed = {name: why for name, why in self._failed.items() if name in stays}
        self._notes = {name: notes for name, notes in self._notes.items() if name in stays}

    def _held(self) -> list[str]:
        """Return the documents that were read from files, also those that were only begun."""
        snapshot = self.snapshot()
        if snapshot is None:
            return []
        begun = (view.file.unfinished() for view in snapshot.views)
        names = chain(snapshot.documents.names, *begun)
        return [name for name in names if not name.endswith(NOTE)]

    def _look(self) -> dict[str, Stamp]:
        """Return the stamps of all files that can be read, and see what is to be read and is lost.

        What is new comes first, so that it need not wait for what is still to be read.
        """
        began, before = time.monotonic(), self._lasting()
        found, held = self._files(), self._held()
        known = {name: self._read[name] for name in held if name in self._read}
        known |= {name: stamp for name, (stamp, _) in self._failed.items()}
        order = {name: place for place, name in enumerate(self._waiting or ())}
        different = [name for name, stamp in found.items() if known.get(name) != stamp]
        self._waiting = sorted(different, key=lambda name: order.get(name, -1))
        self._lost = self._lost_of(held, found, before)
        now = time.monotonic()
        self._next_look = now + max(LOOK_SECONDS, LOOK_SHARE * (now - began))
        return found

    def _files(self) -> dict[str, Stamp]:
        """Return the stamps of all files that can be read, by the names of their documents."""
        try:
            # Else a folder that cannot be listed looks like an empty one.
            with os.scandir(self.folder) as entries:
                self._away = "" if any(entries) else f"the folder of '{self.name}' is empty"
            paths = files_in([self.folder])
        except OSError as error:
            self._away = f"the folder of '{self.name}' cannot be read: {error.strerror or error}"
            return {}
        except DataError:
            return {}  # there is none
        stamps = {path.relative_to(self.folder).as_posix(): _stamp(path) for path in paths}
        return {name: stamp for name, stamp in stamps.items() if stamp is not None}

    def _lasting(self) -> set[str]:
        """Return what is lost until it is back: a whole folder comes back at once, files do not."""
        return set() if self._away else {*self._lost}

    def _lost_of(
        self, held: Sequence[str], found: Mapping[str, Stamp], before: set[str]
    ) -> set[str]:
        """Return the documents whose files are missing without having been deleted, it seems.

        They are all that are missing if the folder cannot be read or is empty, or if most are; and
        those behind a link or in an inner folder that is so. A file that was moved is not lost.
        """
        there = set(found.values())
        missing = [name for name in held if name not in found]
        if self._away:
            return set(missing)
        gone = [
            name
            for name in missing
            if self._read.get(name) not in there and not exists(self.folder / name)
        ]
        if len(gone) > 1 and 2 * len(gone) > len(held):
            return set(gone)
        folders = {name: _nearest(self.folder / name) for name in gone}
        count = Counter(folders.values())
        lost = {one for one in count if one[1] is None or (one[1] == 0 and count[one] > 1)}
        return {name for name in gone if name in before or folders[name] in lost}

    def _load(self) -> None:
        read, lost = dict[str, Stamp](), set[str]()
        try:
            stored = read_json(self.path.with_suffix(".json"), DataError, DOCUMENT_BYTES)
            read = {str(name): (int(size), int(at)) for name, (size, at) in stored["read"].items()}
            lost = {str(name) for name in stored["lost"]}
        except (OSError, DataError, AttributeError, KeyError, TypeError, ValueError):
            pass  # then every file is compared with the bank
        self._saved = self._read, self._lost = read, lost

    def _save(self, stamps: dict[str, Stamp]) -> None:
        stored = stamps, self._lasting()
        if stored != self._saved:
            with atomic_write(self.path.with_suffix(".json")) as beside:
                create_private(beside)
                listed = {"read": stamps, "lost": sorted(stored[1])}
                beside.write_text(json.dumps(listed), encoding="utf-8")
            self._saved = stored
        self._read = stamps


def _nearest(path: Path) -> tuple[Path, int | None]:
    """Return the nearest folder of a missing file that is there, and how much it holds.

    That is None if the file may be out of reach: behind a link, or in a folder without a list.
    """
    for folder in [] if path.is_symlink() else path.parents:
        try:
            return folder, len(os.listdir(folder))
        except FileNotFoundError:
            continue
        except OSError:
            break
    return path, None


def _empty(snapshot: Snapshot, index: int) -> tuple[str, ...]:
    """Name the pages of a document that have no text."""
    documents = snapshot.documents
    pages, characters = documents.pages(index), documents.characters(index)

    def part(place: slice) -> str:
        return documents.text(index, place.start, place.stop)

    try:
        return told_empty(documents.name(index), pages, characters, part) if pages else ()
    except NoTextError:  # its file is gone
        return ()


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def banks_at(places: Sequence[str], home: Path, model: str) -> list[BuiltBank]:
    """Return the banks at some places, with distinct names.

    Raises:
        DataError: a place does not exist.
    """
    banks: list[BuiltBank] = []
    for place in places:
        stem = os.path.basename(os.path.abspath(place)).removesuffix(".bank") or "folder"
        taken = {bank.name for bank in banks}
        numbered = (f"{stem}-{number}" for number in count(2))
        name = next(name for name in chain([stem], numbered) if name not in taken)
        path = Path(place).expanduser()
        if "://" in place:
            banks.append(BuiltBank(place, name))
        elif path.is_file() or exists(path / PARTS):
            banks.append(BuiltBank(path, name))
        else:
            folder = FolderBank(path, home.expanduser(), model, name)
            if not is_folder(path) and not folder.path.exists():
                raise DataError(f"there is no bank and no folder '{place}'; give one that exists")
            banks.append(folder)
    return banks


@contextmanager
def following(banks: Sequence[BuiltBank], model: SeDeM) -> Iterator[None]:
    """Read the folders among some banks in the background until the block ends."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=bank.follow, args=(model, stop), name="sedem-folder", daemon=True)
        for bank in banks
        if isinstance(bank, FolderBank)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(STOP_SECONDS)

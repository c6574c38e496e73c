"""A bank in parts, for many machines and object stores; docs/bank-format.md.

It is a folder, or a place in an object store, of part files and one manifest that lists them. A
part is a bank of its own that never changes, so readers need no lock. A document is in one part. To
replace or remove it, its part is written again without it.

Parts are published first, then the manifest is replaced, but only if nobody else has done so since
it was read; otherwise the change is made again, on top of the other one. What a killed writer has
published is no part of the bank. All of it may come from anybody, so every field is checked.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import apsw
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sedem.bank import database
from sedem.bank.blocks import Head, Meta, fits
from sedem.bank.buckets import Bucket, Folder, Tag, writing
from sedem.bank.database import FOLDED_BEFORE, FORMAT
from sedem.bank.file import (
    MANIFEST,
    BankFile,
    Compacted,
    Place,
    already_there,
    delete,
    is_remote,
    unknown_document,
)
from sedem.config import explain
from sedem.durable_files import sha256
from sedem.errors import BankError, ConfigError, DamagedBankError
from sedem.untrusted import CACHE, cache_folder

KEEP = timedelta(days=1)
"""How long files stay that the manifest does not list: some are published before their commit."""
_PART = re.compile(r"[0-9a-f]{64}\.bank")
BUDGET = "SEDEM_CACHE_BYTES"
"""The variable with the bytes of parts to keep in the cache."""
_SETTINGS = ConfigDict(frozen=True, extra="forbid", strict=True)


class Entry(BaseModel):
    """What a manifest says of a part, so that opening a bank reads no part."""

    model_config = _SETTINGS

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(gt=0, le=2**50)]
    head: Head
    meta: Meta
    format: Annotated[int, Field(ge=FOLDED_BEFORE, le=FORMAT)] = FOLDED_BEFORE

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.sha256}.bank"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not fits(self.head, self.meta, self.bytes):
            raise ValueError(f"part '{self.name}' cannot hold what it is said to hold")
        return self


class Manifest(BaseModel):
    """A bank in parts as of one commit; an empty bank has an empty part."""

    model_config = _SETTINGS

    format: Literal[1] = 1
    commit: Annotated[int, Field(ge=1, le=2**53)] = 1
    parts: Annotated[tuple[Entry, ...], Field(min_length=1, max_length=100_000)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({part.sha256 for part in self.parts}) < len(self.parts):
            raise ValueError("a part is listed twice")
        metas = [replace(part.meta, made_by={}) for part in self.parts]
        if any(meta != metas[0] for meta in metas):
            raise ValueError("parts differ in their model, or in how they store memory")
        return self


class PartFile(BankFile):
    """A part in its folder, or in the cache; what its entry says is not read from the file.

    A part in an object store is downloaded to the cache when it is first read, or if it is damaged.
    """

    may_change = False  # its name is its digest

    def __init__(self, bucket: Folder | Bucket, entry: Entry) -> None:
        folder = bucket.path if isinstance(bucket, Folder) else cache_folder("banks")
        super().__init__(folder / entry.name)
        # Unlike the file of a bank, a part may not be a link, which could lead anywhere.
        self.path = self.place = folder / entry.name
        self.name = f"{bucket}/{entry.name}"
        self.bucket, self.entry = bucket, entry

    def __reduce__(self) -> tuple[Any, ...]:
        return PartFile, (self.bucket, self.entry)

    def head(self) -> Head:
        """Return its only version."""
        return self.entry.head

    def meta(self) -> Meta:
        """Return the bank-wide metadata; the index of words of an older release cannot be used."""
        words = self.entry.meta.words and self.entry.format == FORMAT
        return replace(self.entry.meta, words=words)

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Yield a connection that may only read; see `BankFile.reading`."""
        try:
            with super().reading() as connection:
                yield connection
        except DamagedBankError:
            if isinstance(self.bucket, Folder) or not self.place.exists():
                raise
            delete(self.place)
            raise DamagedBankError(
                f"the copy of '{self}' in the cache was damaged and is deleted; try again to "
                "download it, and restore the part if that fails too"
            ) from None
        finally:
            # A bank may have more parts than a process may open, and the cache may delete this one.
            self.close()

    def _taken(self) -> apsw.Connection:
        if isinstance(self.bucket, Bucket):
            if not self._is_whole():
                self._download(self.bucket)
            with suppress(OSError):
                os.utime(self.place)
        if not self._is_whole():
            raise DamagedBankError(
                f"part '{self}' is missing or damaged; open the bank again if it was compacted, or "
                "restore the part"
            )
        # Another process may have deleted the copy, and downloaded it again.
        self._inode = None
        try:
            return super()._taken()
        except BankError as error:
            # It could be opened before it was published.
            raise DamagedBankError(str(error)) from None

    def _is_whole(self) -> bool:
        with suppress(OSError):
            found = self.place.lstat()
            return stat.S_ISREG(found.st_mode) and found.st_size == self.entry.bytes
        return False

    def _download(self, bucket: Bucket) -> None:
        partial = self.place.with_name(f"{self.place.name}.{uuid.uuid4()}")
        with writing(partial.parent, f"set {CACHE} to a writable folder on another disk"):
            partial.parent.mkdir(parents=True, exist_ok=True)
            # The least recently used parts make room; who reads one has it open.
            budget, files = os.environ.get(BUDGET), []
            if budget and not budget.isdecimal():
                raise ConfigError(
                    f"{BUDGET} is '{budget}'; give a number of bytes, such as 100000000000"
                )
            for path in partial.parent.glob("*.bank*") if budget else ():
                with suppress(FileNotFoundError):
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
            room = int(budget or 0) - sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if room < self.entry.bytes:
                    delete(path)
                    room += size
            try:
                found = bucket.download(self.entry.name, partial, self.entry.bytes)
                if found == self.entry.sha256:
                    partial.replace(self.place)
            finally:
                partial.unlink(missing_ok=True)


class Parts:
    """The store of a bank in parts; threads may share it.

    Every method raises a BankError if the bank is missing or damaged, or the store cannot be used.
    Changes also raise one if other writers come first for `WAIT` seconds.
    """

    def __init__(self, place: Place) -> None:
        self.bucket = Bucket(str(place)) if is_remote(place) else Folder(Path(place))
        self._files: dict[str, PartFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own connections, its own cache and its own working folder.
        return Parts, (str(self),)

    def __str__(self) -> str:
        return str(self.bucket)

    def exists(self) -> bool:
        """Whether there is a bank."""
        return self.bucket.load(MANIFEST) is not None

    def manifest(self) -> Manifest:
        """Return the newest manifest."""
        return self._newest()[0]

    def _newest(self) -> tuple[Manifest, Tag]:
        if (found := self.bucket.load(MANIFEST)) is None:
            raise BankError(
                f"bank '{self}' does not exist; create it with 'sedem build {self} FILE...'"
            )
        with _valid(self):
            return Manifest.model_validate_json(found[0]), found[1]

    def files(self) -> list[PartFile]:
        """Return the parts; those that have not changed are the same objects as before."""
        self._files = {entry.sha256: self._file(entry) for entry in self.manifest().parts}
        return [*self._files.values()]

    def _file(self, entry: Entry) -> PartFile:
        known = self._files.get(entry.sha256)
        return known if known and known.entry == entry else PartFile(self.bucket, entry)

    def meta(self) -> Meta:
        """Return the bank-wide metadata."""
        return self.manifest().parts[0].meta

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each document's text by name; every part is read."""
        return {name: digest for file in self.files() for name, digest in file.digests().items()}

    # Changes

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[BankFile]:
        """Yield a file for documents; the bank appears with them when the block ends."""
        if self.exists():
            raise already_there(self)
        with self.temporary() as path:
            with self._file_at(path).creating(meta) as file:
                yield file
            self.start([self.publish(file)])

    @contextmanager
    def adding(self) -> Iterator[BankFile]:
        """Yield a file for documents, which are added in one commit when the block ends."""
        with self.temporary() as path:
            with self._file_at(path).creating(self.meta()) as file:
                yield file
            self._add(file)

    @contextmanager
    def building(self, new: Meta) -> Iterator[BankFile]:
        """Yield a file for the documents of a build, which become a part when the block ends.

        If it does not end, the next build on this machine goes on with the file. A new bank gets
        the metadata `new`.
        """
        meta, path = self.meta() if self.exists() else new, self.work / "build" / "part.bank"
        with writing(self.work):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.work / "build.lock", database.WAIT):
                file = self._file_at(path)
                if file.exists() and file.meta() != meta:
                    delete(path)
                if not file.exists():
                    with file.creating(meta):
                        pass
                yield file
                self._add(file)
                file.close()
                delete(path)
        except Timeout:
            raise self._busy() from None

    def _add(self, file: BankFile) -> None:
        """Make a file a part, without documents that the bank has with the same text."""
        known = self.digests() if (is_old := self.exists()) else {}
        file.remove(*(name for name, one in file.digests().items() if one == known.get(name)))
        file.compact()
        if not is_old:
            self.start([self.publish(file)])
        elif file.head().documents:
            self.commit([self.publish(file)], file.digests())

    @property
    def work(self) -> Path:
        """Folder of files that this machine writes.

        Raises:
            BankError: a link in it, which a stranger may have put there, leads elsewhere.
        """
        if isinstance(self.bucket, Folder):
            work = self.bucket.path / ".work"
            # `os.walk` passes over what another writer deletes meanwhile.
            inside = (Path(at, one) for at, *names in os.walk(work) for one in chain(*names))
            for path in chain([work], inside):
                if path.is_symlink():
                    raise BankError(f"'{path}' is a link, which could lead anywhere; remove it")
            return work
        return cache_folder("banks") / "work" / hashlib.sha256(str(self).encode()).hexdigest()

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Yield a path in a new folder, which is deleted at the end."""
        folder = self.work / uuid.uuid4().hex
        try:
            with writing(self.work):
                folder.mkdir(parents=True)
                yield folder / "part.bank"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _file_at(self, path: Path) -> BankFile:
        file = BankFile(path)
        # Messages are about the bank, not about the file that becomes a part of it.
        file.name = str(self)
        return file

    def remove(self, *names: str) -> None:
        """Remove documents in one commit; see `BankFile.remove`."""
        known = self.digests()
        for name in names:
            if name not in known:
                raise unknown_document(f"'{self}'", name, [*known])
        self.commit([], names)

    def publish(self, file: BankFile) -> Entry:
        """Upload a bank as a part, on any machine, and return its entry for the manifest.

        If no commit lists the part, `compact` deletes it.
        """
        with self.temporary() as path:
            # Without the log beside it.
            size = file.copy_to(path)
            head, meta = BankFile(path).head(), BankFile(path).meta()
            with _valid(file):
                entry = Entry(sha256=sha256(path), bytes=size, head=head, meta=meta, format=FORMAT)
            self.bucket.upload(entry.name, path)
            if isinstance(self.bucket, Bucket):
                path.replace(self._file(entry).place)
        return entry

    def start(self, parts: Sequence[Entry]) -> None:
        """Create the bank of published parts, unless a bank exists there."""
        if not self._replace(tuple(parts), 1, None):
            raise already_there(self)

    def _replace(self, parts: tuple[Entry, ...], commit: int, tag: Tag) -> bool:
        """Write a manifest if the one there still has a tag; returns whether it did."""
        with _valid(self):
            new = Manifest(commit=commit, parts=parts)
        return self.bucket.replace(MANIFEST, new.model_dump_json().encode(), tag)

    def commit(self, add: Sequence[Entry], replacing: Collection[str] = ()) -> None:
        """Add published parts in one commit, and remove documents from the other parts.

        The bank may have the parts already, and need not have the documents.
        """
        until, pause = time.monotonic() + database.WAIT, 0.02
        while True:
            now, tag = self._newest()
            left = [self._without(one, replacing) for one in now.parts if one not in add]
            parts = tuple(one for one in (*left, *add) if one.head.documents)
            # A bank without documents keeps a part, which has its metadata.
            parts = parts or (*left, *add)[:1]
            if parts == now.parts:
                return
            if self._replace(parts, now.commit + 1, tag):
                return
            if time.monotonic() > until:
                raise self._busy()
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, 1.0)

    def _without(self, entry: Entry, names: Collection[str]) -> Entry:
        """Return a part without some documents, which is a new one if it has any of them."""
        file = self._file(entry)
        if not names or not (found := file.digests().keys() & {*names}):
            return entry
        with self.temporary() as path:
            file.copy_to(path)
            rest = BankFile(path)
            rest.remove(*found)
            rest.compact()
            return self.publish(rest)

    def _busy(self) -> BankError:
        return BankError(
            f"bank '{self}' is being written by another process; wait until it is done"
        )

    def compact(self, keep: timedelta = KEEP) -> Compacted:
        """Delete files that the bank does not need; answers do not change.

        Who has opened an earlier commit may have to open the bank again.

        Args:
            keep: younger files stay. Less than the default is safe only if nobody else writes.
        """
        oldest = datetime.now(UTC) - keep
        # Listed first: what is committed after that is in the manifest.
        parts = [one for one in self.bucket.entries() if _PART.fullmatch(one[0])]
        named = {entry.name for entry in self.manifest().parts}
        gone = {name: n for name, n, changed in parts if name not in named and changed <= oldest}
        self.bucket.delete(gone)
        for folder in self.work.glob("*/"):
            with suppress(FileNotFoundError):
                if folder.stat().st_mtime <= oldest.timestamp():
                    shutil.rmtree(folder)
        before = sum(size for _, size, _ in parts)
        return Compacted(before, before - sum(gone.values()))


@contextmanager
def _valid(bank: object) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise BankError(
            f"the manifest of bank '{bank}' is damaged: {explain(error, MANIFEST)}; "
            "restore it, or use the sedem that wrote it"
        ) from None


Store = BankFile | Parts

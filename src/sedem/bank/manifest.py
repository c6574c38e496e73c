"""The manifest of a bank in parts, and the files that it lists; docs/bank-format.md.

The manifest is one small JSON file. It has everything that is known of a part without its file, so
opening a bank reads nothing else. It may come from anybody: every field is checked here.

A part in an object store is downloaded to SHA256.bank in the cache when it is first read. Nothing
in the cache is essential: what is missing is downloaded again.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import apsw
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sedem.bank.blocks import MOST_SLOT_TOKENS
from sedem.bank.buckets import Bucket, Folder, writing
from sedem.bank.file import BankFile, delete
from sedem.bank.rows import Head, Meta
from sedem.durable_files import sha256
from sedem.errors import BankError, ConfigError, DamagedBankError
from sedem.quantization import DTYPES, vector_bytes
from sedem.validation import explain

MANIFEST = "bank.json"
"""Names the parts of a bank, in its folder."""
PARTS = 100_000
"""Maximum number of parts."""
CACHE, BUDGET = "SEDEM_CACHE", "SEDEM_CACHE_BYTES"
"""The environment variables with the folder of caches and the bytes to keep there."""
PART_NAME = re.compile(r"[0-9a-f]{16}\.bank")

_Name = Annotated[str, Field(pattern=rf"^{PART_NAME.pattern}$")]
_SETTINGS = ConfigDict(frozen=True, extra="forbid", strict=True)


class Entry(BaseModel):
    """What a manifest says of a part, which is named by the first 16 digits of its SHA-256."""

    model_config = _SETTINGS

    name: _Name
    bytes: Annotated[int, Field(gt=0, le=2**50)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    head: Head
    meta: Meta

    @classmethod
    def of(cls, path: Path, head: Head, meta: Meta) -> Entry:
        """Return the entry of a file, which is read whole."""
        digest, size = sha256(path), path.stat().st_size
        name = f"{digest[:16]}.bank"
        try:
            return cls(name=name, bytes=size, sha256=digest, head=head, meta=meta)
        except ValidationError as error:
            raise BankError(f"{explain(error, f'bank {path}', cls)}; restore it") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        head, meta = self.head, self.meta
        if not self.sha256.startswith(self.name[:16]):
            raise ValueError(f"part '{self.name}' is not named by its SHA-256")
        # A count that the file has no room for would allocate more than the bank can fill.
        if not (
            meta.dtype in DTYPES
            and 1 <= meta.slots < 2**16
            and 1 <= meta.width < 2**20
            and 0 <= head.version < 2**62
            and 0 <= head.documents <= self.bytes
            and 0 <= head.blocks * meta.slots * vector_bytes(meta.width, meta.dtype) <= self.bytes
            and 0 <= head.tokens <= head.blocks * meta.slots * MOST_SLOT_TOKENS
        ):
            raise ValueError(f"part '{self.name}' cannot hold what it is said to hold")
        return self


class Manifest(BaseModel):
    """A bank in parts as of one commit.

    Attributes:
        parts: its parts, in reading order; at least one, which may be empty.
        dropped: names of parts that only earlier commits listed, and when they were dropped, in
            seconds since 1970. Their files stay for those who opened an earlier manifest.
    """

    model_config = _SETTINGS

    format: Literal[1] = 1
    commit: Annotated[int, Field(ge=1, le=2**53)] = 1
    parts: Annotated[tuple[Entry, ...], Field(min_length=1, max_length=PARTS)]
    dropped: dict[_Name, Annotated[int, Field(ge=0, le=2**53)]] = {}

    @classmethod
    def parse(cls, content: bytes, place: str) -> Manifest:
        """Return the manifest with some content; `place` is the bank, for messages."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise BankError(
                f"the manifest of bank '{place}' is damaged: {explain(error, MANIFEST, cls)}; "
                "restore it, or use the sedem that wrote it"
            ) from None

    @classmethod
    def of(
        cls, parts: Sequence[Entry], before: Manifest | None = None, keep: timedelta | None = None
    ) -> Manifest:
        """Return the manifest that replaces another, without parts that were dropped `keep` ago."""
        names, now, commit, dropped = {part.name for part in parts}, int(time.time()), 1, {}
        if before is not None:
            forget = 0.0 if keep is None else now - keep.total_seconds()
            dropped = {name: at for name, at in before.dropped.items() if at > forget}
            dropped |= {part.name: now for part in before.parts}
            dropped, commit = (
                {n: at for n, at in dropped.items() if n not in names},
                before.commit + 1,
            )
        try:
            return cls(commit=commit, parts=tuple(parts), dropped=dropped)
        except ValidationError as error:
            raise BankError(f"{explain(error, MANIFEST, cls)}; the bank is unchanged") from None

    def content(self) -> bytes:
        """Return the content of its file."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError("a part is listed twice")
        metas = [replace(part.meta, made_by={}) for part in self.parts]
        if any(meta != metas[0] for meta in metas):
            raise ValueError("parts differ in their model, or in how they store memory")
        return self


class PartFile(BankFile):
    """A part in its folder, or in the cache; what its entry says is not read from the file."""

    def __init__(self, bucket: Folder | Bucket, entry: Entry) -> None:
        if isinstance(bucket, Folder):
            path = bucket.path / entry.name
        else:
            path = cache_folder() / f"{entry.sha256}.bank"
        super().__init__(path)
        # Unlike the file of a bank, a part may not be a link, which could lead anywhere.
        self.path = self.place = path
        self.name = f"{bucket}/{entry.name}"
        self.bucket, self.entry = bucket, entry

    def __reduce__(self) -> tuple[Any, ...]:
        return PartFile, (self.bucket, self.entry)

    def head(self) -> Head:
        """Return its only version."""
        return self.entry.head

    def meta(self) -> Meta:
        """Return the bank-wide metadata."""
        return self.entry.meta

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
        is_whole = False
        with suppress(OSError):
            found = self.place.lstat()
            is_whole = stat.S_ISREG(found.st_mode) and found.st_size == self.entry.bytes
        if isinstance(self.bucket, Bucket):
            if not is_whole:
                self._download(self.bucket)
            with suppress(OSError):
                os.utime(self.place)
        elif not is_whole:
            raise self._damaged("it is not a regular file of its size")
        # Another process may have deleted the copy, and downloaded it again.
        self._inode = None
        try:
            return super()._taken()
        except BankError as error:
            # It could be opened before it was published.
            raise DamagedBankError(str(error)) from None

    def _download(self, bucket: Bucket) -> None:
        name, partial = self.entry.name, self.place.with_name(f"{self.place.name}.{uuid.uuid4()}")
        with writing(partial.parent, f"set {CACHE} to a writable folder on another disk"):
            partial.parent.mkdir(parents=True, exist_ok=True)
            _make_room(self.entry.bytes)
            try:
                is_whole = bucket.size(name) == self.entry.bytes
                if not is_whole or bucket.download(name, partial) != self.entry.sha256:
                    raise self._damaged("its size or SHA-256 differs")
                partial.replace(self.place)
            finally:
                partial.unlink(missing_ok=True)

    def _damaged(self, reason: str) -> DamagedBankError:
        advice = "open the bank again if it was compacted, or restore the part"
        return DamagedBankError(f"part '{self}' is missing or damaged ({reason}); {advice}")


def cache_folder() -> Path:
    """Return the folder of downloaded parts, of all banks."""
    if given := os.environ.get(CACHE):
        return Path(given).expanduser().resolve() / "banks"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).resolve() / "sedem" / "banks"


def _make_room(size: int) -> None:
    """Delete the least recently used parts until some bytes fit; readers have them open."""
    budget = os.environ.get(BUDGET, "")
    if budget and not budget.isdecimal():
        raise ConfigError(f"{BUDGET} is '{budget}'; give a number of bytes, such as 100000000000")
    files = []
    for path in cache_folder().glob("*.bank*"):
        with suppress(FileNotFoundError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    held = sum(each for _, each, _ in files)
    for _, each, path in sorted(files):
        if budget and held + size > int(budget):
            delete(path)
            held -= each


@contextmanager
def temporary(work: Path) -> Iterator[Path]:
    """Yield a path in a new folder, which is deleted at the end."""
    folder = work / uuid.uuid4().hex
    try:
        with writing(work):
            folder.mkdir(parents=True)
            yield folder / "part.bank"
    finally:
        shutil.rmtree(folder, ignore_errors=True)

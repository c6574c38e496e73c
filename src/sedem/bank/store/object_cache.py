"""The local disk cache of a bank in an object store.

    CACHE/NNNN.../                   one folder for each place
      shards/SHA256.safetensors      memory that was read; evicted by last use
      commits/NUMBER-WRITER/         the catalog as of one commit, while it may be in use
      work/RANDOM/                   files of one process

Nothing in it is essential: what is missing is downloaded again. Commit and work folders contain the
locks of the processes that use them, so that others can remove unused folders.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sedem.bank.store import catalog
from sedem.bank.store.catalog import CATALOG, ShardRow
from sedem.bank.store.object_bucket import Bucket
from sedem.bank.store.object_commits import (
    PART,
    Commit,
    is_digest,
    part_digests,
    part_name,
    shard_name,
)
from sedem.durable_files import bytes_text, sha256
from sedem.errors import BankError

VARIABLE = "SEDEM_CACHE"
"""The environment variable that names the folder of caches."""
FREE = 2**30
"""Bytes that a cache leaves free on its disk."""
_IN_USE = "IN_USE"


class Held:
    """A folder of the cache that is not removed while this object exists.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: Path, lock: IO[bytes]) -> None:
        self.folder = folder
        self._lock = lock


class Cache:
    """Files of one bank on local disk.

    Args:
        bucket: where the bank is.
        root: folder of caches; None means that of `SEDEM_CACHE`, or ~/.cache/sedem.
        limit: bytes of shards to keep; None means all disk space but `FREE`.
    """

    def __init__(self, bucket: Bucket, root: Path | None = None, limit: int | None = None) -> None:
        self.bucket = bucket
        self.limit = limit
        self._root = root
        digest = hashlib.sha256(bucket.url.encode()).hexdigest()
        self.folder = (root or default_root()) / digest[:32]
        self.shards, self._commits = self.folder / "shards", self.folder / "commits"
        self._work = self.folder / "work"
        self._own: Held | None = None
        self._fetching = threading.Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[Bucket, Path | None, int | None]]:
        # Another process, perhaps on another machine, keeps its own files.
        return Cache, (self.bucket, self._root, self.limit)

    # Folders

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Yield an empty folder that is removed at the end."""
        folder = self.work() / uuid.uuid4().hex
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def work(self) -> Path:
        """Return the folder of this process's files; it is removed with this object.

        Raises:
            BankError: it cannot be written.
        """
        if self._own is None:
            try:
                for place in (self.shards, self._commits, self._work):
                    place.mkdir(parents=True, exist_ok=True)
                self._own = _new(self._work / uuid.uuid4().hex)
            except OSError as error:
                raise BankError(
                    f"the cache '{self.folder}' cannot be written ({error}); set {VARIABLE} to "
                    "a writable folder"
                ) from None
            weakref.finalize(self, shutil.rmtree, self._own.folder, True)
            for left in self._work.iterdir():
                _clear(left)
        return self._own.folder

    # Catalogs

    def catalog(self, commit: Commit, sources: Sequence[Path] = ()) -> Held:
        """Return a folder that holds the catalog as of one commit.

        Args:
            commit: the commit.
            sources: other catalogs of the bank; parts that they share with the commit are copied
                from them.

        Raises:
            BankError: a part is missing or damaged, or the disk is full.
        """
        folder = self._folder(commit)
        self.work()
        while True:
            if (held := _hold(folder)) is not None:
                return held
            with self.temporary() as made:
                (made / _IN_USE).touch()
                others = [path / CATALOG for path in self._commits.iterdir()]
                self.write_catalog(commit, made / CATALOG, [*sources, *sorted(others)[-1:]])
                with suppress(OSError):  # another process was faster
                    made.rename(folder)

    def write_catalog(self, commit: Commit, path: Path, sources: Sequence[Path] = ()) -> None:
        """Write the catalog of a commit into a new file; arguments and errors as in `catalog`."""
        with _files(sources) as known, path.open("xb") as file:
            for index, digest in enumerate(commit.parts):
                size = min(PART, commit.size - index * PART)
                for other in known:
                    content = os.pread(other.fileno(), size, index * PART)
                    if hashlib.sha256(content).hexdigest() == digest:
                        break
                else:
                    content = self.bucket.read(part_name(digest), PART) or b""
                if hashlib.sha256(content).hexdigest() != digest:
                    what = "damaged (its SHA-256 differs)" if content else "missing"
                    raise BankError(
                        f"catalog part '{self.bucket.url}/{part_name(digest)}' is {what}; "
                        "restore it, or open the bank again if it was compacted"
                    )
                file.write(content)
        with catalog.connect(path.parent, alone=True) as connection:
            # Another schema may hold a view that never ends.
            if catalog.has_foreign_schema(connection):
                raise BankError(
                    f"the catalog of '{self.bucket.url}' has other tables than those of a bank; "
                    "restore it or build the bank again"
                )

    def drop_if_not(self, commit: Commit) -> bool:
        """Remove the catalog of a commit if it does not match; returns whether it was removed.

        Its users find another one in its place.
        """
        folder = self._folder(commit)
        with suppress(OSError):
            if part_digests(folder / CATALOG) == commit.parts:
                return False
            folder.rename(self.work() / uuid.uuid4().hex)
            return True
        return False

    def forget_catalogs(self, keep: Commit) -> None:
        """Remove unused catalogs of other commits."""
        for folder in self._commits.iterdir():
            if folder != self._folder(keep):
                _clear(folder)

    def _folder(self, commit: Commit) -> Path:
        return self._commits / f"{commit.number:012d}-{commit.writer}"

    # Shards

    def shard(self, row: ShardRow) -> Path:
        """Return the path of a shard's file, which may not exist.

        Raises:
            BankError: the row has no valid SHA-256.
        """
        if not is_digest(row.sha256):
            raise BankError(
                f"the catalog of '{self.bucket.url}' is damaged: shard '{row.file}' has no SHA-256"
            )
        return self.shards / f"{row.sha256}.safetensors"

    def fetch(self, row: ShardRow) -> Path:
        """Download a shard unless it is cached; the download is verified by its checksum.

        Raises:
            BankError: it is missing or damaged, or the disk is full.
        """
        path = self.shard(row)
        with self._fetching:
            if path.exists():
                return path
            with self.temporary() as folder:
                self._make_room(row.size)
                self.download(row, folder / path.name)
                (folder / path.name).replace(path)
        return path

    def download(self, row: ShardRow, path: Path) -> None:
        """Download a shard to a new file; errors as in `fetch`."""
        name = shard_name(row.sha256)
        try:
            found = self.bucket.download(name, path)
        except OSError as error:
            raise BankError(
                f"'{self.bucket.url}/{name}' cannot be written to '{path.parent}' ({error}); make "
                "room"
            ) from None
        if found is None:
            raise BankError(
                f"shard '{self.bucket.url}/{name}' is missing; open the bank again if it was "
                "compacted, or restore the object"
            )
        if found != row.sha256:
            raise BankError(
                f"shard '{self.bucket.url}/{name}' is damaged (its SHA-256 differs); restore the "
                "object"
            )

    def adopt(self, row: ShardRow, path: Path) -> None:
        """Move a file that this process has uploaded into the cache as a shard."""
        self._make_room(0)
        path.replace(self.shard(row))

    def drop_if_damaged(self, row: ShardRow) -> bool:
        """Remove a cached shard if it is damaged; returns False if it is intact."""
        path = self.shard(row)
        with self._fetching, suppress(FileNotFoundError):
            if sha256(path) == row.sha256:
                return False
            path.unlink()
        return True

    def _make_room(self, size: int) -> None:
        """Remove the least recently used shards until some bytes fit; mapped ones stay usable."""
        files = []
        for path in self.shards.iterdir():
            with suppress(FileNotFoundError):
                found = path.stat()
                files.append((max(found.st_atime_ns, found.st_mtime_ns), found.st_size, path))
        held = sum(each for _, each, _ in files)
        free = shutil.disk_usage(self.shards).free
        for _, each, path in sorted(files):
            fits = self.limit is None or held + size <= self.limit
            if fits and free >= size + FREE:
                return
            path.unlink(missing_ok=True)
            held, free = held - each, free + each
        if free < size:
            raise BankError(
                f"a shard of {bytes_text(size)} does not fit on the disk of the cache "
                f"'{self.folder}', which has {bytes_text(free)} free; make room, or set "
                f"{VARIABLE} to a folder on another disk"
            )


def default_root() -> Path:
    """Folder of the caches of all banks."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser() / "banks"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sedem" / "banks"


@contextmanager
def renamed(folder: Path, url: str) -> Iterator[None]:
    """Rewrite bank errors that name a folder so that they name the bank's URL."""
    try:
        yield
    except BankError as error:
        text = str(error).replace(str(folder), url)
        raise type(error)(text) from error.__cause__


def _new(folder: Path) -> Held:
    """Make a folder and hold it."""
    folder.mkdir()
    (folder / _IN_USE).touch()
    held = _hold(folder)
    assert held is not None
    return held


def _hold(folder: Path) -> Held | None:
    """Hold a folder; None if there is none, or it is about to be removed."""
    try:
        lock = (folder / _IN_USE).open("rb")
    except OSError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    with suppress(OSError):
        if os.path.samestat((folder / _IN_USE).stat(), os.fstat(lock.fileno())):
            return Held(folder, lock)
    lock.close()
    return None


def _clear(folder: Path) -> None:
    """Remove a folder if nobody holds it."""
    try:
        lock = (folder / _IN_USE).open("rb")
    except OSError:
        return
    with lock, suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first, so that no process finds only a part of it.
        gone = folder.with_name(f".{uuid.uuid4().hex}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _files(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Open the files that exist."""
    found: list[IO[bytes]] = []
    try:
        for path in paths:
            with suppress(OSError):
                found.append(path.open("rb"))
        yield found
    finally:
        for file in found:
            file.close()


Fetch = Callable[[ShardRow], object]
"""Makes the file of a shard available."""

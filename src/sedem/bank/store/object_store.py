"""A bank in an object store: immutable objects, and commits that are created once.

The local store makes a change on a copy of the catalog on local disk. Then new shards and the
changed parts of the catalog are uploaded under the names of their SHA-256, and one object that
names them is created: the commit. Anything that a crash leaves before that is not part of the bank.

Of two writers that start from the same commit, one creates the next; the other repeats its change
on top of it. Readers keep the commit that they have opened.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from sedem.bank.blocks import Blocks
from sedem.bank.documents import Source
from sedem.bank.store import object_commits, object_writing
from sedem.bank.store.backup import shard_rows
from sedem.bank.store.catalog import CATALOG, ShardRow
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.compaction import Compacted, compact
from sedem.bank.store.folder_lock import already_there, being_written
from sedem.bank.store.interface import Contents, Meta
from sedem.bank.store.local import LocalStore
from sedem.bank.store.object_bucket import Bucket
from sedem.bank.store.object_cache import Cache, Held, renamed
from sedem.bank.store.object_commits import Commit, LostRaceError
from sedem.bank.store.object_garbage import KEEP, collect
from sedem.bank.store.object_shard import CachedCommit, CachedDocuments
from sedem.bank.store.shard import SHARDS, Check
from sedem.bank.store.verify import Damage, examine
from sedem.durable_files import link
from sedem.errors import BankError
from sedem.quantization import Quantized
from sedem.types import Document

T = TypeVar("T")
ATTEMPTS = 10
"""Minimum number of attempts at a change while other writers come first."""


class ObjectStore:
    """The store of a bank in an object store; see `interface.Store`.

    Threads may share it; their changes are made one at a time.

    Args:
        url: the bank's place, such as "s3://bucket/folder".
        cache: folder of caches on local disk; None means that of `SEDEM_CACHE`.
        check: when a block's checksum is verified, as in `LocalStore`.
        source: reads texts that the bank does not hold; None if there is no such source.
        wait: seconds for which a change is retried if other writers come first.
        limit: bytes of shards that the cache keeps; None means what the disk has room for.

    Raises:
        ConfigError: obstore is not installed.
        BankError: the URL is not a place that can hold a bank.
    """

    def __init__(
        self,
        url: str,
        cache: Path | None = None,
        check: Check = "once",
        source: Source | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> None:
        self._arguments = (url, cache, check, source, wait, limit)
        self.bucket = Bucket(url)
        self.url = self.bucket.url
        self.cache = Cache(self.bucket, cache, limit)
        self.check: Check = check
        self.source, self.wait = source, wait
        self._changing = threading.RLock()
        self._newest: tuple[Commit, str] | None = None
        self._copy: tuple[Commit, Path] | None = None

    def __str__(self) -> str:
        """Where the bank is."""
        return self.url

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process keeps its own files and makes its own changes.
        return ObjectStore, self._arguments

    def exists(self) -> bool:
        """Whether there is a bank.

        Raises:
            BankError: the store cannot be used.
        """
        return self._look() is not None

    def commit(self) -> Commit:
        """Return the newest commit.

        Raises:
            BankError: there is no bank, or the store cannot be used.
        """
        found = self._look()
        if found is None:
            raise BankError(
                f"there is no bank '{self.url}'; make one with 'sedem build {self.url} FILE...'"
            )
        return found

    # Writing

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[LocalStore]:
        """Create the bank; it appears, complete, when the block ends without an error.

        Yields:
            The store of the unfinished bank, in a folder of the cache.

        Raises:
            BankError: a bank exists already, or it cannot be written.
        """
        with self.appearing() as folder, renamed(folder, self.url):
            with LocalStore(folder / "bank").creating(meta) as unfinished:
                yield unfinished
            self.publish(folder / "bank")

    @contextmanager
    def appearing(self) -> Iterator[Path]:
        """Yield an empty cache folder, whose bank will be published as the first commit.

        Raises:
            BankError: a bank exists already, or one was made meanwhile.
        """
        if self.exists():
            raise already_there(self.url)
        with self.cache.temporary() as folder:
            try:
                yield folder
            except LostRaceError:
                raise already_there(self.url) from None

    def publish(self, folder: Path, path_of: Callable[[ShardRow], Path] | None = None) -> None:
        """Make the bank in a folder the first commit; see `object_writing.publish`."""
        object_writing.publish(self.cache, None, folder, path_of)

    def append(
        self,
        fingerprint: str,
        documents: Sequence[Document],
        blocks: Blocks,
        memory_NJD: Quantized,
    ) -> None:
        """Add documents and their blocks in one commit; see `interface.Store.append`."""
        self.changing(lambda local: local.append(fingerprint, documents, blocks, memory_NJD))

    def remove(self, name: str, *more: str) -> None:
        """Remove documents and their blocks in one commit; see `LocalStore.remove`."""
        self.changing(lambda local: local.remove(name, *more))

    def compact(self, keep: timedelta = KEEP) -> Compacted:
        """Free the space of removed documents, merge small shards, and remove garbage.

        Objects that an earlier commit names are removed `keep` after that commit was replaced;
        readers can use it until then. Objects that no commit names, which a killed writer leaves,
        are removed when they are older than `keep`.

        Args:
            keep: longer than any commit takes; shorter only if no other process uses the bank.

        Raises:
            BankError: other writers come first repeatedly, or a block is damaged.
        """

        def action(local: LocalStore) -> Compacted:
            def fetch(row: ShardRow) -> None:
                link(self.cache.fetch(row), local.folder / SHARDS / row.file)

            with local.writing():
                return compact(local.folder, fetch)

        with self._changing:
            before = self.size()
            report = self.changing(action)
            collect(self.bucket, self.commit(), keep)
            return Compacted(before, self.size(), report.shards_before, report.shards_after)

    def changing(self, action: Callable[[LocalStore], T]) -> T:
        """Run a function that changes the bank, and commit its changes.

        Args:
            action: called with the store of a folder that has the newest catalog and no shards;
                called again, on a newer catalog, if another writer came first.

        Returns:
            What the function returned.

        Raises:
            BankError: other writers come first repeatedly, or the store cannot be used.
        """
        until = time.monotonic() + self.wait
        with self._changing:
            attempt = 0
            while True:
                base, folder = self._working_copy()
                # If the function fails, its copy is not used again.
                self._copy = None
                with renamed(folder, self.url):
                    result = action(LocalStore(folder))
                    try:
                        commit = object_writing.publish(self.cache, base, folder)
                        self._copy = commit, folder
                        return result
                    except LostRaceError:
                        attempt += 1
                        if attempt >= ATTEMPTS and time.monotonic() > until:
                            raise being_written(self.url) from None
                        time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 6)))

    # Reading

    def open(self, known: Contents | None = None) -> Contents:
        """Read the catalog of the newest commit; shards are downloaded when they are first used.

        Raises:
            BankError: there is no bank, its catalog is damaged, or the store cannot be used.
        """
        while True:
            commit = self.commit()
            if known is not None and isinstance(known.documents, CachedDocuments):
                if known.documents.commit == commit:
                    return known
            else:
                known = None
            try:
                held = self._catalog(commit)
                opened = CachedCommit(self.cache, commit, held, self.check, self.source)
                with renamed(held.folder, self.url):
                    contents = opened.contents(known)
            except BankError:
                # It may be damaged in the cache, or was removed from the store during the download.
                if not self.cache.drop_if_not(commit) and self.commit() == commit:
                    raise
                continue
            self.cache.forget_catalogs(keep=commit)
            return contents

    @contextmanager
    def at_hand(self) -> Iterator[Path]:
        """Yield a folder with the newest catalog, for reading."""
        held = self._catalog(self.commit())
        with renamed(held.folder, self.url):
            yield held.folder

    def meta(self) -> Meta:
        """Return the bank-wide metadata; see `LocalStore.meta`."""
        with self.at_hand() as folder:
            return LocalStore(folder).meta()

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each document's text by name; see `LocalStore.digests`."""
        with self.at_hand() as folder:
            return LocalStore(folder).digests()

    def is_whole(self, shard: StoredShard) -> bool:
        """Whether a shard's object exists with its size; its content cannot have changed."""
        return self.bucket.size(object_commits.shard_name(shard.row.sha256)) == shard.row.size

    def verify(self) -> list[str]:
        """Download every object of the bank and compare it with its checksum.

        Returns:
            One sentence for each defect; empty if there is none.

        Raises:
            BankError: there is no bank, or the store cannot be used.
        """
        return self.examine().problems

    def examine(self) -> Damage:
        """Download every object of the bank, a shard at a time; see `verify`."""
        commit = self.commit()
        with self.cache.temporary() as folder, renamed(folder, self.url):
            (folder / SHARDS).mkdir()
            try:
                self.cache.write_catalog(commit, folder / CATALOG)
            except BankError as error:
                return Damage([str(error)], [], catalog=True)

            @contextmanager
            def at_hand(shard: StoredShard) -> Iterator[None]:
                path = folder / SHARDS / shard.row.file
                self.bucket.download(object_commits.shard_name(shard.row.sha256), path)
                yield
                path.unlink(missing_ok=True)

            return examine(folder, at_hand)

    @contextmanager
    def as_folder(self) -> Iterator[Path]:
        """Yield a folder that holds the complete bank as of its newest commit.

        Raises:
            BankError: a part of it is missing or damaged, or the disk is full.
        """
        with self.cache.temporary() as folder, renamed(folder, self.url):
            with self.at_hand() as held:
                shutil.copyfile(held / CATALOG, folder / CATALOG)
            (folder / SHARDS).mkdir()
            for row in shard_rows(folder)[0]:
                link(self.cache.fetch(row), folder / SHARDS / row.file)
            yield folder

    def _look(self) -> Commit | None:
        with self._changing:
            self._newest = object_commits.newest(self.bucket, self._newest)
            return None if self._newest is None else self._newest[0]

    def _catalog(self, commit: Commit) -> Held:
        with self._changing:
            copy = [] if self._copy is None else [self._copy[1] / CATALOG]
            return self.cache.catalog(commit, copy)

    def _working_copy(self) -> tuple[Commit, Path]:
        """Return the newest commit, and a folder with its catalog that may be changed."""
        commit = self.commit()
        if self._copy is not None and self._copy[0] == commit:
            return self._copy
        folder = self.cache.work() / "changing"
        held = self._catalog(commit)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / SHARDS).mkdir(parents=True)
        shutil.copyfile(held.folder / CATALOG, folder / CATALOG)
        return commit, folder

    def size(self) -> int:
        """Bytes of the newest catalog and its shards."""
        commit = self.commit()
        with self.at_hand() as folder:
            return commit.size + sum(row.size for row in shard_rows(folder)[0])

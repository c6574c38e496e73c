"""Shards and documents of a bank in an object store, read through the cache on local disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sedem.bank.documents import Source
from sedem.bank.store.catalog_rows import DocumentRows, StoredShard
from sedem.bank.store.interface import Contents, Meta
from sedem.bank.store.local import LocalStore
from sedem.bank.store.object_cache import Cache, Held, renamed
from sedem.bank.store.object_commits import Commit
from sedem.bank.store.shard import Check, Identity, Maps, Shard
from sedem.bank.store.stored_documents import StoredDocuments
from sedem.bank.store.tensor_files import Vectors
from sedem.errors import BankError
from sedem.quantization import Quantized

T = TypeVar("T")


class CachedShard(Shard):
    """A shard that is downloaded when it is first used.

    Args:
        cache: the bank's cache.
        stored: the shard according to the catalog.
        width: D, according to the catalog.
        dtype: type of the stored slots, according to the catalog.
        maps: the mapped files of the bank.
        check: when checksums are verified.
    """

    def __init__(
        self,
        cache: Cache,
        stored: StoredShard,
        width: int,
        dtype: str,
        maps: Maps,
        check: Check = "once",
    ) -> None:
        super().__init__(cache.shards, stored, width, dtype, maps, check)
        self.path = cache.shard(stored.row)
        self._cache = cache

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The cache may be in another place in this process.
        self.path = self._cache.shard(self.stored.row)

    def take(self, rows: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of some rows; see `Shard.take`."""
        return self._mended(lambda: super(CachedShard, self).take(rows))

    def whole(self) -> Vectors:
        """Return the memory of every row of the file; see `Shard.whole`."""
        return self._mended(super().whole)

    def renew(self) -> Identity:
        """Download the file if it is missing, and drop a replaced one; see `Shard.renew`."""
        self._cache.fetch(self.stored.row)
        return super().renew()

    def _mended(self, use: Callable[[], T]) -> T:
        """Use the file; if it is damaged in the cache, download it again."""
        try:
            return use()
        except BankError:
            if not self._cache.drop_if_damaged(self.stored.row):
                raise
        self.maps.drop(self)
        return use()


class CachedDocuments(StoredDocuments):
    """Documents as of one commit, whose catalog is in the cache.

    Attributes:
        commit: the commit.
    """

    def __init__(
        self,
        cache: Cache,
        held: Held,
        commit: Commit,
        rows: DocumentRows,
        stored: bool,
        source: Source | None,
    ) -> None:
        super().__init__(held.folder, rows, stored, source)
        self.commit = commit
        self._cache, self._held = cache, held

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process holds the catalog itself, or downloads it.
        return _documents, (self._cache, self.commit, self._rows, self.stored, self._source)

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text; see `StoredDocuments.text`."""
        with renamed(self.folder, self._cache.bucket.url):
            return super().text(index, start, end)


def _documents(
    cache: Cache, commit: Commit, rows: DocumentRows, stored: bool, source: Source | None
) -> CachedDocuments:
    return CachedDocuments(cache, cache.catalog(commit), commit, rows, stored, source)


class CachedCommit(LocalStore):
    """The catalog of one commit in the cache; its shards are downloaded when they are used.

    Args:
        cache: the bank's cache.
        commit: the commit.
        held: the folder of its catalog.
        check: when checksums are verified.
        source: reads texts that the bank does not hold.
    """

    def __init__(
        self,
        cache: Cache,
        commit: Commit,
        held: Held,
        check: Check = "once",
        source: Source | None = None,
    ) -> None:
        super().__init__(held.folder, check, source)
        self._cache, self._commit, self._held = cache, commit, held

    def contents(self, known: Contents | None = None) -> Contents:
        """Read the catalog as `open` does, without looking for shards."""
        return self._read(known)[0]

    def _documents(self, rows: DocumentRows, meta: Meta) -> StoredDocuments:
        what = self._cache, self._held, self._commit
        return CachedDocuments(*what, rows, meta.texts, self.source)

    def _piece(self, stored: StoredShard, meta: Meta, maps: Maps) -> Shard:
        width = meta.made_by["width"]
        return CachedShard(self._cache, stored, width, meta.dtype, maps, self.check)

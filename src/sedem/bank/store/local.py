"""A bank on local disk: sealed shards and a catalog. docs/bank-format.md describes every byte.

    bank/
      catalog.sqlite            documents, blocks, shards, fingerprint
      shards/000001.safetensors memory [n, J, D], never changed once written
      LOCK                      held by the process that writes

A commit writes a shard atomically and then runs one SQLite transaction. That transaction is the
only commit point: anything that a crash leaves behind before it is not part of the bank.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from filelock import FileLock

from sedem.bank.blocks import Blocks
from sedem.bank.documents import Source, unknown_document
from sedem.bank.store import catalog, catalog_rows, document_rows, leftovers, verify
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.checksums import State
from sedem.bank.store.compaction import Compacted, compact
from sedem.bank.store.folder_lock import LOCK, check_absent, clear_folder, write_errors
from sedem.bank.store.interface import Contents, Meta, check_fingerprint
from sedem.bank.store.repair import Repaired, repair
from sedem.bank.store.salvage import Salvaged, salvage
from sedem.bank.store.shard import SHARDS, Check, Maps, Shard, check_finite, checksum, write_shard
from sedem.bank.store.stored_documents import StoredDocuments
from sedem.bank.store.verify import Damage
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import BankError
from sedem.quantization import Quantized
from sedem.types import Document

T = TypeVar("T")


class LocalStore:
    """The store of a bank in a folder; see `interface.Store`.

    Args:
        folder: the bank's folder; it need not exist yet.
        check: when a block's checksum is verified: on its first use ("once"), or on every use,
            together with the file's size and identity ("always").
        source: reads texts that the bank does not hold; None if there is no such source.
        wait: seconds to wait for another writer before giving up.
    """

    def __init__(
        self, folder: Path, check: Check = "once", source: Source | None = None, wait: float = 0
    ) -> None:
        self.folder, self.source = folder, source
        self.check: Check = check
        self._lock = FileLock(folder / LOCK, timeout=wait)

    def __str__(self) -> str:
        """Where the bank is."""
        return str(self.folder)

    def exists(self) -> bool:
        """Whether something exists there; `open` refuses it if it is not a bank."""
        return self.folder.exists()

    @contextmanager
    def at_hand(self) -> Iterator[Path]:
        """Yield the folder of the catalog, for reading."""
        yield self.folder

    def changing(self, action: Callable[[LocalStore], T]) -> T:
        """Run a function that changes the bank; the function takes the lock itself."""
        return action(self)

    def is_whole(self, shard: StoredShard) -> bool:
        """Whether a shard exists and is unchanged; see `verify.is_whole`."""
        return verify.is_whole(self.folder, shard)

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[LocalStore]:
        """Create the bank; it appears, complete, when the block ends without an error.

        Yields:
            The store of the unfinished bank, in a folder next to this one.

        Raises:
            BankError: something exists there, another process creates it, or writing fails.
        """
        with self.appearing() as unfinished:
            (unfinished.folder / SHARDS).mkdir()
            catalog.create(unfinished.folder, meta)
            yield unfinished

    @contextmanager
    def appearing(self) -> Iterator[LocalStore]:
        """Fill a hidden folder that becomes the bank when the block ends without an error.

        Yields:
            The store of that folder, which is empty and next to this one.

        Raises:
            BankError: something exists there, another process creates it, or writing fails.
        """
        with self.hidden() as unfinished:
            yield unfinished
            sync_folder(unfinished.folder)
            unfinished.folder.rename(self.folder)
            sync_folder(self.folder.parent)

    @contextmanager
    def hidden(self) -> Iterator[LocalStore]:
        """Yield an empty hidden folder next to this one, and hold its lock.

        Raises:
            BankError: this bank exists, another process creates it, or writing fails.
        """
        check_absent(self.folder)
        unfinished = LocalStore(self.folder.with_name(f".{self.folder.name}.partial"))
        with write_errors(self.folder):
            make_folders(unfinished.folder)
            with unfinished._locked():
                # The process that held the lock may have finished: its folder is now the bank.
                check_absent(self.folder)
                clear_folder(unfinished.folder)
                yield unfinished

    def append(
        self,
        fingerprint: str,
        documents: Sequence[Document],
        blocks: Blocks,
        memory_NJD: Quantized,
        *,
        again: bool = False,
    ) -> None:
        """Add documents and their blocks in one commit; see `interface.Store.append`.

        With `again`, also those it already has with the same text, because their memory is damaged.
        """
        with self.writing(), catalog.connect(self.folder) as connection:
            meta, state = catalog_rows.read_meta(self.folder, connection)
            check_fingerprint(str(self.folder), meta.fingerprint, fingerprint)
            changed = [
                index
                for index, document in enumerate(documents)
                if again
                or catalog.stored_digest(connection, document.name)
                != catalog.text_digest(document.text)
            ]
            if not changed:
                return
            if len(changed) < len(documents):
                kept = np.flatnonzero(np.isin(blocks.documents, changed))
                blocks, memory_NJD = blocks.take(kept), memory_NJD[kept.tolist()]
                places = np.searchsorted(changed, blocks.documents)
                blocks = blocks.of_documents(places.astype(np.int64))
                documents = [documents[index] for index in changed]
            stored_NJD = memory_NJD.cast(meta.dtype)
            shard, checksums = self.write_blocks(connection, documents, blocks, stored_NJD)
            with connection:
                rows = (documents, blocks, checksums)
                state = document_rows.insert(connection, state, shard, *rows, meta.texts)
                catalog.write_state(connection, state.committed())

    def write_blocks(
        self,
        connection: sqlite3.Connection,
        documents: Sequence[Document],
        blocks: Blocks,
        stored_NJD: Quantized,
        name: str | None = None,
    ) -> tuple[catalog.ShardRow, list[int]]:
        """Write a shard; returns its row and its checksums.

        Args:
            connection: connection to the catalog, whose lock is held.
            documents: the documents of the blocks.
            blocks: one for each row; `documents` are indices.
            stored_NJD: their memory, in the bank's type.
            name: file name; None means the next one, which no table names yet.

        Raises:
            BankError: memory holds infinities or NaN.
        """
        check_finite(documents, blocks, stored_NJD)
        checksums = [checksum(stored_NJD[row]) for row in range(len(blocks))]
        name = name or f"{catalog.newest_shard(connection) + 1:06d}.safetensors"
        size, digest = write_shard(self.folder / SHARDS, name, stored_NJD)
        return catalog.ShardRow(name, len(blocks), size, digest), checksums

    def remove(self, name: str, *more: str) -> None:
        """Remove documents and their blocks from the catalog; `compact` frees their bytes.

        Raises:
            BankError: no document has one of the names, or another process writes the bank. Then
                none is removed.
        """
        with self.writing(), catalog.connect(self.folder) as connection, connection:
            _, state = catalog_rows.read_meta(self.folder, connection)
            for one in dict.fromkeys((name, *more)):
                after = document_rows.delete(connection, state, one)
                if after is state:
                    known = catalog.document_names(connection)
                    raise unknown_document(f"'{self.folder}'", one, known)
                state = after
            catalog.write_state(connection, state.committed())

    def compact(self) -> Compacted:
        """Free the space of removed documents and merge small shards.

        The bank's answers do not change. A reader that opened it before keeps what is mapped; for
        the rest it must open the bank again.

        Raises:
            BankError: another process writes the bank, or a block is damaged; it is unchanged.
        """
        with self.writing():
            return compact(self.folder)

    def salvage(self) -> Salvaged:
        """Replace a damaged catalog with a new one of everything that can be read from it.

        Documents whose memory it cannot locate then count as damaged; `repair` drops them.

        Raises:
            BankError: another process writes the bank, or too little can be read.
        """
        catalog.check_is_bank(self.folder)
        with write_errors(self.folder), self._locked():
            return salvage(self.folder)

    def repair(self) -> Repaired:
        """Set damaged files aside, keep their intact blocks, drop documents that lost a part.

        Raises:
            BankError: another process writes the bank, or too little of its catalog can be read.
        """
        before = self.salvage()
        with self.writing():
            return repair(self.folder, before)

    def open(self, known: Contents | None = None) -> Contents:
        """Read the catalog; shards are opened when they are first used.

        Raises:
            BankError: there is no bank, or its catalog is damaged or of an unknown format.
        """
        while True:
            contents, state = self._read(known)
            try:
                # Shards without a block of the bank, such as unfinished parts, may be missing.
                for number in np.flatnonzero(np.bincount(contents.places[:, 0])).tolist():
                    piece = contents.pieces[number]
                    if isinstance(piece, Shard):
                        piece.renew()
                return contents
            except BankError:
                # A shard that was compacted away in the meantime is not damage.
                with catalog.connect(self.folder) as connection:
                    if catalog_rows.read_meta(self.folder, connection)[1] == state:
                        raise

    def _read(self, known: Contents | None) -> tuple[Contents, State]:
        """Return what the catalog says, and its state at that time."""
        before = {p.stored.id: p for p in known.pieces if isinstance(p, Shard)} if known else {}
        with catalog.connect(self.folder) as connection:
            # One transaction, so that another process's commit is seen as a whole or not at all.
            connection.execute("BEGIN")
            meta, state = catalog_rows.read_meta(self.folder, connection)
            documents = catalog_rows.read_documents(self.folder, connection, state)
            stored = catalog_rows.read_shards(
                self.folder, connection, state, {n: p.stored for n, p in before.items()}
            )
        stored, blocks, places_N2 = catalog_rows.live_blocks(self.folder, documents, stored)
        maps = next((p.maps for p in before.values()), None) or Maps()
        shards = [self._shard(one, meta, maps, before.get(one.id)) for one in stored]
        return Contents(meta, self._documents(documents, meta), blocks, shards, places_N2), state

    def meta(self) -> Meta:
        """Return the bank-wide metadata; its shards may be damaged.

        Raises:
            BankError: there is no bank, or its catalog is damaged.
        """
        with catalog.connect(self.folder) as connection:
            return catalog_rows.read_meta(self.folder, connection)[0]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each document's text by name; errors as in `meta`."""
        with catalog.connect(self.folder) as connection:
            _, state = catalog_rows.read_meta(self.folder, connection)
            documents = catalog_rows.read_documents(self.folder, connection, state)
        return dict(zip(documents.names, documents.digests, strict=True))

    def verify(self) -> list[str]:
        """Read every byte and compare it with its checksum; see `interface.Store.verify`."""
        return self.examine().problems

    def examine(self) -> Damage:
        """Read every byte of the bank; see `verify.examine`."""
        return verify.examine(self.folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the only process that may write; clear leftovers of others.

        Raises:
            BankError: another process holds it, or the bank cannot be written.
            DamagedCatalogError: a page of its catalog is damaged.
        """
        catalog.check_is_bank(self.folder)
        with write_errors(self.folder), self._locked():
            with catalog.connect(self.folder) as connection:
                catalog.check_pages(self.folder, connection)
                leftovers.clear(self.folder, connection)
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if (self.folder / LOCK).is_symlink():
            raise BankError(f"'{self.folder / LOCK}' is a link and may point elsewhere; remove it")
        with self._lock:
            yield

    def _shard(self, stored: StoredShard, meta: Meta, maps: Maps, before: Shard | None) -> Shard:
        """Return the piece of a shard; one that was opened before stays open."""
        if before is None or before.stored.crc32 != stored.crc32:
            return self._piece(stored, meta, maps)
        before.stored = stored
        return before

    def _piece(self, stored: StoredShard, meta: Meta, maps: Maps) -> Shard:
        width, folder = meta.made_by["width"], self.folder / SHARDS
        return Shard(folder, stored, width, meta.dtype, maps, self.check)

    def _documents(self, rows: catalog_rows.DocumentRows, meta: Meta) -> StoredDocuments:
        return StoredDocuments(self.folder, rows, meta.texts, self.source)

"""A bank on local disk: sealed shards and a catalog. docs/bank-format.md describes every byte.

    bank/
      catalog.sqlite            documents, blocks, shards, fingerprint
      shards/000001.safetensors memory [n, J, D], never changed once written
      LOCK                      held by the process that writes

A commit writes a shard atomically and then runs one SQLite transaction. That transaction is the
only commit point: whatever a crash leaves behind before it is not part of the bank.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from sedem.bank.blocks import Blocks
from sedem.bank.store import catalog, catalog_rows, verify
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.interface import Contents, Meta, check_fingerprint
from sedem.bank.store.shard import SHARDS, Check, Maps, Shard, check_size, checksum, write_shard
from sedem.bank.store.stored_documents import StoredDocuments
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import BankError
from sedem.quantization import Quantized
from sedem.types import Document

LOCK = "LOCK"


class LocalStore:
    """The store of a bank in a folder; see `interface.Store`.

    Args:
        folder: the bank's folder; it need not exist yet.
        check: when a block's checksum is compared: when it is first used ("once"), or whenever it
            is used, together with the file's size and place ("always").
    """

    def __init__(self, folder: Path, check: Check = "once") -> None:
        self.folder = folder
        self.check: Check = check
        self._lock = FileLock(folder / LOCK, timeout=0)

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[LocalStore]:
        """Create the bank; it appears, complete, when the block ends without an error.

        Yields:
            The store of the unfinished bank, in a folder beside this one.

        Raises:
            BankError: something exists there, another process creates it, or writing fails.
        """
        _check_absent(self.folder)
        unfinished = LocalStore(self.folder.with_name(f".{self.folder.name}.partial"))
        with write_errors(self.folder):
            make_folders(unfinished.folder)
            with unfinished._locked():
                # The process that held the lock may have finished: its folder is now the bank.
                _check_absent(self.folder)
                unfinished._start_empty(meta)
                yield unfinished
                sync_folder(unfinished.folder)
                unfinished.folder.rename(self.folder)
                sync_folder(self.folder.parent)

    def append(
        self, fingerprint: str, documents: Sequence[Document], blocks: Blocks, memory_NJD: Quantized
    ) -> None:
        """Add documents and their blocks in one commit; see `interface.Store.append`."""
        with self.writing(), catalog.connect(self.folder) as connection:
            meta, state = catalog_rows.read_meta(self.folder, connection)
            check_fingerprint(str(self.folder), meta.fingerprint, fingerprint)
            changed = [
                index
                for index, document in enumerate(documents)
                if catalog.stored_digest(connection, document.name)
                != catalog.text_digest(document.text)
            ]
            if not changed:
                return
            if len(changed) < len(documents):
                rows = np.flatnonzero(np.isin(blocks.documents, changed))
                blocks, memory_NJD = blocks.take(rows), memory_NJD[rows.tolist()]
                places = np.searchsorted(changed, blocks.documents)
                blocks = blocks.of_documents(places.astype(np.int64))
                documents = [documents[index] for index in changed]
            stored_NJD = memory_NJD.cast(meta.dtype)
            _check_finite(documents, blocks, stored_NJD)
            checksums = [checksum(stored_NJD[row]) for row in range(len(blocks))]
            name = f"{catalog.newest_shard(connection) + 1:06d}.safetensors"
            size, digest = write_shard(self.folder / SHARDS, name, stored_NJD)
            shard = catalog.ShardRow(name, len(blocks), size, digest)
            with connection:
                state = catalog.insert(connection, state, shard, documents, blocks, checksums)
                catalog.write_state(connection, state)

    def remove(self, name: str) -> None:
        """Remove a document and its blocks from the catalog; `compact` gives their bytes back.

        Raises:
            BankError: no document has that name, or another process writes the bank.
        """
        with self.writing(), catalog.connect(self.folder) as connection, connection:
            _, state = catalog_rows.read_meta(self.folder, connection)
            after = catalog.delete(connection, state, name)
            if after is state:
                known = ", ".join(catalog.document_names(connection))
                raise BankError(
                    f"'{self.folder}' has no document '{name}'; it has {known or 'none'}"
                )
            catalog.write_state(connection, after)

    def open(self, known: Contents | None = None) -> Contents:
        """Read the catalog; shards are opened when they are first used.

        Raises:
            BankError: there is no bank, or its catalog is damaged or of an unknown format.
        """
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
        for shard in shards:
            check_size(shard.path, shard.stored.row.size)
        texts = StoredDocuments(self.folder, documents)
        return Contents(meta, texts, blocks, shards, places_N2)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each document's text by name.

        Raises:
            BankError: there is no bank, or its catalog is damaged.
        """
        with catalog.connect(self.folder) as connection:
            _, state = catalog_rows.read_meta(self.folder, connection)
            documents = catalog_rows.read_documents(self.folder, connection, state)
        return dict(zip(documents.names, documents.digests, strict=True))

    def verify(self) -> list[str]:
        """Read every byte of the bank and compare it with its checksum.

        Returns:
            One sentence for each defect; empty if there is none.

        Raises:
            BankError: there is no bank, or its catalog cannot be opened.
        """
        return verify.examine(self.folder).problems

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the one process that may write.

        Raises:
            BankError: another process holds it, or the bank cannot be written.
        """
        catalog.check_is_bank(self.folder)
        with write_errors(self.folder), self._locked():
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if (self.folder / LOCK).is_symlink():
            raise BankError(
                f"'{self.folder / LOCK}' is a link, so it may lie in another place; remove it"
            )
        with self._lock:
            yield

    def _shard(self, stored: StoredShard, meta: Meta, maps: Maps, before: Shard | None) -> Shard:
        """The piece of a shard; one that was opened before stays open."""
        width = meta.made_by["width"]
        folder = self.folder / SHARDS
        if before is None or before.stored.crc32 != stored.crc32:
            return Shard(folder, stored, width, meta.dtype, maps, self.check)
        before.stored = stored
        return before

    def _start_empty(self, meta: Meta) -> None:
        """Make a bank without documents; files of a killed process are removed."""
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        (self.folder / SHARDS).mkdir()
        catalog.create(self.folder, meta)


def _check_finite(documents: Sequence[Document], blocks: Blocks, memory_NJD: Quantized) -> None:
    """Refuse memory with infinite numbers, or with what is not a number."""
    if memory_NJD.is_finite():
        return
    row = next(row for row in range(len(blocks)) if not memory_NJD[row].is_finite())
    block = blocks[row]
    raise BankError(
        f"the memory of characters {block.start:,} to {block.end:,} of document "
        f"'{documents[block.document].name}' holds infinite numbers or none at all; read it with a "
        "backbone in another type, such as float32"
    )


def _check_absent(folder: Path) -> None:
    if folder.exists():
        raise BankError(f"'{folder}' exists already; choose another name or append to it")


@contextmanager
def write_errors(bank: Path) -> Iterator[None]:
    """Raise errors of the lock, the file system and safetensors as `BankError`."""
    try:
        yield
    except Timeout:
        raise BankError(
            f"bank '{bank}' is being written by another process; wait until it is done"
        ) from None
    except (OSError, SafetensorError) as error:
        raise BankError(f"bank '{bank}' cannot be written ({error}); it is unchanged") from None

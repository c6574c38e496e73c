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

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from sedem.bank.blocks import BlockRow
from sedem.bank.store import catalog
from sedem.bank.store.interface import Contents, Meta, check_fingerprint
from sedem.bank.store.shard import Shard, check_size, checksum, write_shard
from sedem.durable_files import sha256, sync_folder
from sedem.errors import BankError
from sedem.quantization import Quantized

SHARDS = "shards"
LOCK = "LOCK"


class LocalStore:
    """The store of a bank in a folder; see `interface.Store`.

    Args:
        folder: the bank's folder; it need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        with _write_errors(self.folder):
            unfinished.folder.mkdir(parents=True, exist_ok=True)
            with unfinished._lock:
                # The process that held the lock may have finished: its folder is now the bank.
                _check_absent(self.folder)
                unfinished._start_empty(meta)
                yield unfinished
                sync_folder(unfinished.folder)
                unfinished.folder.rename(self.folder)
                sync_folder(self.folder.parent)

    def append(
        self,
        fingerprint: str,
        documents: Sequence[tuple[str, str]],
        blocks: Sequence[BlockRow],
        memory_NJD: Quantized,
    ) -> None:
        """Add documents and their blocks in one commit; see `interface.Store.append`."""
        with self.writing(), catalog.connect(self.folder) as connection:
            meta = catalog.read_meta(self.folder, connection)
            check_fingerprint(str(self.folder), meta.fingerprint, fingerprint)
            stored_NJD = memory_NJD.cast(meta.dtype)
            checksums = [checksum(stored_NJD[row]) for row in range(len(blocks))]
            name = f"{catalog.newest_shard(connection) + 1:06d}.safetensors"
            size, digest = write_shard(self.folder / SHARDS, name, stored_NJD)
            shard = catalog.ShardRow(name, len(blocks), size, digest)
            with connection:
                catalog.insert(connection, shard, documents, blocks, checksums)

    def remove(self, name: str) -> None:
        """Remove a document and its blocks from the catalog; the shard keeps their bytes.

        Raises:
            BankError: no document has that name, or another process writes the bank.
        """
        with self.writing(), catalog.connect(self.folder) as connection, connection:
            if not catalog.delete(connection, name):
                known = ", ".join(catalog.document_names(connection))
                raise BankError(
                    f"'{self.folder}' has no document '{name}'; it has {known or 'none'}"
                )

    def open(self) -> Contents:
        """Read the catalog; shards are mapped when they are first used.

        Raises:
            BankError: there is no bank, or its catalog is damaged or of an unknown format.
        """
        with catalog.connect(self.folder) as connection:
            # One transaction, so that another process's commit is seen as a whole or not at all.
            connection.execute("BEGIN")
            meta = catalog.read_meta(self.folder, connection)
            rows = catalog.read_rows(self.folder, connection)
        slots = len(rows.blocks[0].slot_tokens) if rows.blocks else 0
        shards = []
        for shard in rows.shards:
            path = self.folder / SHARDS / shard.file
            check_size(path, shard.size)
            shards.append(Shard(path, (slots, meta.made_by["width"]), meta.dtype))
        places = []
        for number, row, crc32 in rows.places:
            places.append((number, len(shards[number])))
            shards[number].add(row, crc32)
        return Contents(meta, rows.documents, rows.blocks, [*shards], places)

    def verify(self) -> list[str]:
        """Read every byte of the bank and compare it with the catalog.

        Returns:
            One sentence for each defect; empty if there is none.

        Raises:
            BankError: there is no bank, or its catalog cannot be read.
        """
        with catalog.connect(self.folder) as connection:
            catalog.read_meta(self.folder, connection)
            integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
            shards = catalog.read_shards(self.folder, connection)
            documents = connection.execute("SELECT name, text, sha256 FROM documents").fetchall()
        problems = [] if integrity == "ok" else [f"the catalog is damaged: {integrity}"]
        for document, text, digest in documents:
            if not isinstance(text, str) or catalog.text_digest(text) != digest:
                problems.append(
                    f"the text of document '{document}' is damaged (its SHA-256 differs)"
                )
        for shard in shards.values():
            path = self.folder / SHARDS / shard.file
            if not path.is_file():
                problems.append(f"shard '{shard.file}' is missing")
            elif sha256(path) != shard.sha256:
                problems.append(f"shard '{shard.file}' is damaged (its SHA-256 differs)")
        return problems

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the one process that may write.

        Raises:
            BankError: another process holds it, or the bank cannot be written.
        """
        catalog.check_is_bank(self.folder)
        with _write_errors(self.folder), self._lock:
            yield

    def _start_empty(self, meta: Meta) -> None:
        """Make a bank without documents; files of a killed process are removed."""
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        (self.folder / SHARDS).mkdir()
        catalog.create(self.folder, meta)


def _check_absent(folder: Path) -> None:
    if folder.exists():
        raise BankError(f"'{folder}' exists already; choose another name or append to it")


@contextmanager
def _write_errors(bank: Path) -> Iterator[None]:
    """Raise errors of the lock, the file system and safetensors as `BankError`."""
    try:
        yield
    except Timeout:
        raise BankError(
            f"bank '{bank}' is being written by another process; wait until it is done"
        ) from None
    except (OSError, SafetensorError) as error:
        raise BankError(f"bank '{bank}' cannot be written ({error}); it is unchanged") from None

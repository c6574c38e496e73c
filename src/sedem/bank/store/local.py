"""A bank on disk: sealed shards and a catalog. docs/bank-format.md describes every byte.

    bank/
      catalog.sqlite            documents, blocks, shards, fingerprint
      shards/000001.safetensors memory [n, J, D], never changed once written
      LOCK                      held by the one writer

A commit writes the shard under a temporary name, syncs it, renames it, syncs the folder and then
runs one SQLite transaction. That transaction is the only commit point: whatever a crash leaves
behind before it is not part of the bank.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import hashlib
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
    """A bank in a folder of the local disk.

    Args:
        folder: of the bank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK, timeout=0)

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[LocalStore]:
        """Make the bank; it appears, whole, when the block ends without an error.

        Yields:
            The unfinished bank, in a folder of its own, to append to.

        Raises:
            BankError: it exists already, another process makes it, or it cannot be written.
        """
        _refuse_existing(self.folder)
        unfinished = LocalStore(self.folder.with_name(f".{self.folder.name}.partial"))
        with _refusals_told(self.folder):
            unfinished.folder.mkdir(parents=True, exist_ok=True)
            with unfinished._lock:
                # The process that held the lock may have finished: its folder is now the bank.
                _refuse_existing(self.folder)
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
        """Add documents and their blocks in one commit; a document of the same name is replaced."""
        with self.writing(), catalog.connect(self.folder) as connection:
            meta = catalog.read_meta(self.folder, connection)
            check_fingerprint(str(self.folder), meta.fingerprint, fingerprint)
            stored_NJD = memory_NJD.cast(meta.dtype)
            (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM shards").fetchone()
            name = f"{newest + 1:06d}.safetensors"
            size, digest = write_shard(self.folder / SHARDS, name, stored_NJD)
            with connection:
                shard = connection.execute(
                    "INSERT INTO shards (file, blocks, bytes, sha256) VALUES (?, ?, ?, ?)",
                    (name, len(blocks), size, digest),
                ).lastrowid
                ids = []
                for document, text in documents:
                    connection.execute("DELETE FROM documents WHERE name = ?", (document,))
                    cursor = connection.execute(
                        "INSERT INTO documents (name, text, sha256) VALUES (?, ?, ?)",
                        (document, text, _text_digest(text)),
                    )
                    ids.append(cursor.lastrowid)
                connection.executemany(
                    'INSERT INTO blocks (document, shard, row, start, "end", slot_tokens, crc32) '
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            ids[block.document],
                            shard,
                            row,
                            block.start,
                            block.end,
                            bytes(block.slot_tokens),
                            checksum(stored_NJD[row]),
                        )
                        for row, block in enumerate(blocks)
                    ],
                )

    def remove(self, name: str) -> None:
        """Take a document and its blocks out of the catalog; its space is not given back.

        Raises:
            BankError: no document has that name, or another process writes the bank.
        """
        with self.writing(), catalog.connect(self.folder) as connection, connection:
            gone = connection.execute("DELETE FROM documents WHERE name = ?", (name,)).rowcount
            if not gone:
                known = [row[0] for row in connection.execute("SELECT name FROM documents")]
                raise BankError(
                    f"'{self.folder}' has no document '{name}'; it has {', '.join(known) or 'none'}"
                )

    def open(self) -> Contents:
        """Read a catalog; shards are mapped when they are first touched.

        Raises:
            BankError: there is no bank, or its catalog is damaged or of another version.
        """
        with catalog.connect(self.folder) as connection:
            # One transaction: what another process commits meanwhile is seen wholly or not at all.
            connection.execute("BEGIN")
            meta = catalog.read_meta(self.folder, connection)
            documents = connection.execute(
                "SELECT id, name, text FROM documents ORDER BY id"
            ).fetchall()
            shards = connection.execute("SELECT id, file, bytes FROM shards ORDER BY id").fetchall()
            rows = connection.execute(
                'SELECT document, shard, row, start, "end", slot_tokens, crc32 '
                "FROM blocks ORDER BY id"
            ).fetchall()
        document_index = {row[0]: index for index, row in enumerate(documents)}
        shard_index = {row[0]: index for index, row in enumerate(shards)}
        opened = [Shard(self.folder / SHARDS / file) for _, file, _ in shards]
        for shard, (_, _, size) in zip(opened, shards, strict=True):
            check_size(shard.path, size)
        blocks, places = [], []
        for document, shard_id, row, start, end, slot_tokens, crc in rows:
            shard = opened[shard_index[shard_id]]
            places.append((shard_index[shard_id], len(shard)))
            shard.add(row, crc)
            blocks.append(BlockRow(document_index[document], start, end, tuple(slot_tokens)))
        return Contents(
            meta,
            [(name, text) for _, name, text in documents],
            blocks,
            [*opened],
            places,
        )

    def verify(self) -> list[str]:
        """Read every byte of a bank and compare it with the catalog.

        Returns:
            One sentence for each thing that is wrong; empty when all is well.

        Raises:
            BankError: there is no bank, or its catalog cannot be read.
        """
        with catalog.connect(self.folder) as connection:
            catalog.read_meta(self.folder, connection)
            intact = connection.execute("PRAGMA integrity_check").fetchone()[0]
            shards = connection.execute("SELECT file, sha256 FROM shards ORDER BY id").fetchall()
            documents = connection.execute("SELECT name, text, sha256 FROM documents").fetchall()
        problems = [] if intact == "ok" else [f"the catalog is damaged: {intact}"]
        for document, text, digest in documents:
            if _text_digest(text) != digest:
                problems.append(
                    f"the text of document '{document}' is damaged (its SHA-256 differs)"
                )
        for file, digest in shards:
            path = self.folder / SHARDS / file
            if not path.is_file():
                problems.append(f"shard '{file}' is missing")
            elif sha256(path) != digest:
                problems.append(f"shard '{file}' is damaged (its SHA-256 differs)")
        return problems

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one process that writes the bank.

        Raises:
            BankError: another process is, or the bank cannot be written.
        """
        catalog.check_is_bank(self.folder)
        with _refusals_told(self.folder), self._lock:
            yield

    def _start_empty(self, meta: Meta) -> None:
        """Make the folder a bank without documents, whatever a killed process left in it."""
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        (self.folder / SHARDS).mkdir()
        catalog.create(self.folder, meta)


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise BankError(f"'{folder}' exists already; choose another name or append to it")


@contextmanager
def _refusals_told(bank: Path) -> Iterator[None]:
    """What the system refuses a writer, in words."""
    try:
        yield
    except Timeout:
        raise BankError(
            f"bank '{bank}' is being written by another process; wait until it is done"
        ) from None
    except (OSError, SafetensorError) as error:
        raise BankError(f"bank '{bank}' cannot be written ({error}); it is as it was") from None

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

import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sedem.errors import BankError, BankMismatchError

SCHEMA_VERSION = 1
CATALOG = "catalog.sqlite"
SHARDS = "shards"
LOCK = "LOCK"
MEMORY = "memory"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE shards (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL UNIQUE, blocks INTEGER NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL
);
CREATE TABLE documents (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, text TEXT NOT NULL
);
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY,
    document INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    shard INTEGER NOT NULL REFERENCES shards (id), row INTEGER NOT NULL,
    start INTEGER NOT NULL, "end" INTEGER NOT NULL,
    slot_tokens BLOB NOT NULL, crc32 INTEGER NOT NULL
);
CREATE INDEX blocks_document ON blocks (document);
"""


@dataclass(frozen=True)
class BlockRow:
    """One block beside its memory.

    Attributes:
        document: index of its document.
        start: first character of its span.
        end: character after its span.
        slot_tokens: real tokens behind each of its J slots.
    """

    document: int
    start: int
    end: int
    slot_tokens: tuple[int, ...]


class Shard:
    """A sealed shard, memory-mapped; each block's checksum is verified when it is first touched."""

    def __init__(self, path: Path, rows: list[int], checksums: list[int]) -> None:
        self.path = path
        self.rows = rows
        self.checksums = checksums
        self._verified = [False] * len(rows)
        self._memory: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> Tensor:
        """Memory `[n, J, D]` of some of this shard's live blocks.

        Raises:
            BankError: the shard is missing or damaged.
        """
        memory = self._open()
        for index in indices:
            if not self._verified[index]:
                if checksum(memory[self.rows[index]]) != self.checksums[index]:
                    raise BankError(
                        f"block {self.rows[index]} of '{self.path}' is damaged (its checksum "
                        "differs); restore the file or build the bank again"
                    )
                self._verified[index] = True
        return memory[[self.rows[index] for index in indices]]

    def _open(self) -> Tensor:
        if self._memory is None:
            try:
                with safe_open(self.path, framework="pt") as file:
                    self._memory = file.get_tensor(MEMORY)
            except FileNotFoundError:
                raise BankError(f"shard '{self.path}' is missing; restore it") from None
            except (SafetensorError, OSError) as error:
                raise BankError(f"shard '{self.path}' is damaged ({error}); restore it") from None
        return self._memory


@dataclass(frozen=True)
class Contents:
    """Everything a catalog says, and the shards it names."""

    fingerprint: str
    made_by: dict[str, Any]
    documents: list[tuple[str, str]]
    blocks: list[BlockRow]
    shards: list[Shard]
    places: list[tuple[int, int]]


def checksum(block_JD: Tensor) -> int:
    """CRC-32 of a block's bytes."""
    return zlib.crc32(block_JD.contiguous().view(torch.uint8).numpy().data)


@contextmanager
def creating(folder: Path, fingerprint: str, made_by: dict[str, Any]) -> Iterator[Path]:
    """Make a bank; it appears under its name, whole, when the block ends without an error.

    Yields:
        The folder in which it is being made, already a bank without documents.

    Raises:
        BankError: something is there already.
    """
    if folder.exists():
        raise BankError(f"'{folder}' exists already; choose another name or append to it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / SHARDS).mkdir(parents=True)
    (unfinished / CATALOG).touch()
    with _connect(unfinished) as connection:
        connection.executescript(_SCHEMA)
        connection.executemany(
            "INSERT INTO meta VALUES (?, ?)",
            [
                ("schema_version", str(SCHEMA_VERSION)),
                ("fingerprint", fingerprint),
                ("made_by", json.dumps(made_by)),
            ],
        )
    yield unfinished
    _sync_folder(unfinished)
    unfinished.rename(folder)
    _sync_folder(folder.parent)


def append(
    folder: Path,
    fingerprint: str,
    documents: Sequence[tuple[str, str]],
    blocks: Sequence[BlockRow],
    memory_NJD: Tensor,
) -> None:
    """Add documents and their blocks in one commit; a document of the same name is replaced.

    Args:
        folder: the bank.
        fingerprint: of the model that made the memory.
        documents: names and texts.
        blocks: their blocks; `document` counts within `documents`.
        memory_NJD: the blocks' memory, in the same order.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: another process writes it, or it is damaged.
    """
    with _writing(folder), _connect(folder) as connection:
        check_fingerprint(str(folder), _meta(folder, connection)["fingerprint"], fingerprint)
        (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM shards").fetchone()
        name = f"{newest + 1:06d}.safetensors"
        size, digest = _write_shard(folder / SHARDS, name, memory_NJD)
        with connection:
            shard = connection.execute(
                "INSERT INTO shards (file, blocks, bytes, sha256) VALUES (?, ?, ?, ?)",
                (name, len(blocks), size, digest),
            ).lastrowid
            ids = []
            for document in documents:
                connection.execute("DELETE FROM documents WHERE name = ?", document[:1])
                cursor = connection.execute(
                    "INSERT INTO documents (name, text) VALUES (?, ?)", document
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
                        checksum(memory_NJD[row]),
                    )
                    for row, block in enumerate(blocks)
                ],
            )


def remove(folder: Path, name: str) -> None:
    """Take a document and its blocks out of the catalog; its space is not given back.

    Raises:
        BankError: no document has that name, or another process writes the bank.
    """
    with _writing(folder), _connect(folder) as connection, connection:
        gone = connection.execute("DELETE FROM documents WHERE name = ?", (name,)).rowcount
        if not gone:
            known = [row[0] for row in connection.execute("SELECT name FROM documents")]
            raise BankError(
                f"'{folder}' has no document '{name}'; it has {', '.join(known) or 'none'}"
            )


def load(folder: Path) -> Contents:
    """Read a catalog; shards are mapped when they are first touched.

    Raises:
        BankError: there is no bank, or its catalog is damaged or of another version.
    """
    with _connect(folder) as connection:
        meta = _meta(folder, connection)
        documents = connection.execute(
            "SELECT id, name, text FROM documents ORDER BY id"
        ).fetchall()
        shards = connection.execute("SELECT id, file, bytes FROM shards ORDER BY id").fetchall()
        rows = connection.execute(
            'SELECT document, shard, row, start, "end", slot_tokens, crc32 FROM blocks ORDER BY id'
        ).fetchall()
    document_index = {row[0]: index for index, row in enumerate(documents)}
    shard_index = {row[0]: index for index, row in enumerate(shards)}
    opened = [Shard(folder / SHARDS / file, [], []) for _, file, _ in shards]
    for shard, (_, _, size) in zip(opened, shards, strict=True):
        _check_size(shard.path, size)
    blocks, places = [], []
    for document, shard_id, row, start, end, slot_tokens, crc in rows:
        shard = opened[shard_index[shard_id]]
        places.append((shard_index[shard_id], len(shard)))
        shard.rows.append(row)
        shard.checksums.append(crc)
        shard._verified.append(False)
        blocks.append(BlockRow(document_index[document], start, end, tuple(slot_tokens)))
    return Contents(
        meta["fingerprint"],
        json.loads(meta["made_by"]),
        [(name, text) for _, name, text in documents],
        blocks,
        opened,
        places,
    )


def verify(folder: Path) -> list[str]:
    """Read every byte of a bank and compare it with the catalog.

    Returns:
        One sentence for each thing that is wrong; empty when all is well.

    Raises:
        BankError: there is no bank, or its catalog cannot be read.
    """
    with _connect(folder) as connection:
        _meta(folder, connection)
        intact = connection.execute("PRAGMA integrity_check").fetchone()[0]
        shards = connection.execute("SELECT file, sha256 FROM shards ORDER BY id").fetchall()
    problems = [] if intact == "ok" else [f"the catalog is damaged: {intact}"]
    for file, digest in shards:
        path = folder / SHARDS / file
        if not path.is_file():
            problems.append(f"shard '{file}' is missing")
        elif _sha256(path) != digest:
            problems.append(f"shard '{file}' is damaged (its SHA-256 differs)")
    return problems


def check_fingerprint(bank: str, has: str, needs: str) -> None:
    """Refuse memory of another model.

    Raises:
        BankMismatchError: the fingerprints differ; both are named.
    """
    if has != needs:
        raise BankMismatchError(
            f"bank '{bank}' was built by model {has[:12]}, this model is {needs[:12]}; "
            "memory means nothing to another model: use the one that built it, or build it again "
            "with 'sedem build'"
        )


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise BankError(f"shard '{path}' is missing; restore it or build the bank again")
    if path.stat().st_size != size:
        raise BankError(
            f"shard '{path}' has {path.stat().st_size} bytes, {size} are needed; restore it or "
            "build the bank again"
        )


def _write_shard(folder: Path, name: str, memory_NJD: Tensor) -> tuple[int, str]:
    temporary = folder / f".{name}.partial"
    save_file({MEMORY: memory_NJD.contiguous()}, temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    size, digest = temporary.stat().st_size, _sha256(temporary)
    # A shard of this number that the catalog does not know was left by a crash.
    temporary.replace(folder / name)
    _sync_folder(folder)
    return size, digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    _check_is_bank(folder)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BankError(
                f"bank '{folder}' is being written by another process; wait until it is done"
            ) from None
        yield


@contextmanager
def _connect(folder: Path) -> Iterator[sqlite3.Connection]:
    _check_is_bank(folder)
    try:
        with closing(sqlite3.connect(folder / CATALOG)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            yield connection
            connection.commit()
    except sqlite3.DatabaseError as error:
        raise BankError(
            f"the catalog of bank '{folder}' cannot be used ({error}); restore it or build again"
        ) from None


def _check_is_bank(folder: Path) -> None:
    if not folder.exists():
        raise BankError(
            f"there is no bank '{folder}'; make one with 'sedem build {folder} FILE...'"
        )
    if not (folder / CATALOG).is_file():
        raise BankError(f"'{folder}' is not a bank: it holds no {CATALOG}")


def _meta(folder: Path, connection: sqlite3.Connection) -> dict[str, str]:
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if meta.get("schema_version") != str(SCHEMA_VERSION):
        raise BankError(
            f"bank '{folder}' has format {meta.get('schema_version')}, this sedem reads "
            f"{SCHEMA_VERSION}; use the sedem that wrote it or build it again"
        )
    return meta

"""catalog.sqlite: the tables of a bank, and the statements that write and read them.

A catalog may come from anybody, so `read_rows` checks what the other modules rely on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sedem.bank.blocks import BlockRow
from sedem.bank.store.interface import Meta
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, DTYPES

CATALOG = "catalog.sqlite"
PLAIN, SCALED = "1", "2"
"""Formats. A sedem that knows only the first would read slots without their scales."""

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE shards (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL UNIQUE, blocks INTEGER NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL
);
CREATE TABLE documents (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, text TEXT NOT NULL, sha256 TEXT NOT NULL
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

_SHARD_FILE = re.compile(r"\d{6,}\.safetensors")


@dataclass(frozen=True)
class ShardRow:
    """A shard as the catalog lists it.

    Attributes:
        file: its name in the folder of shards.
        blocks: rows of the file.
        size: bytes of the file.
        sha256: of the file.
    """

    file: str
    blocks: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Rows:
    """The tables of a bank, as of one commit.

    Attributes:
        documents: names and texts, in reading order.
        shards: all shards, the oldest first.
        blocks: the span behind each block, in reading order.
        places: index into `shards`, row of that shard and CRC-32 of each block's memory.
    """

    documents: list[tuple[str, str]]
    shards: list[ShardRow]
    blocks: list[BlockRow]
    places: list[tuple[int, int, int]]


def create(folder: Path, meta: Meta) -> None:
    """Make the catalog of a bank without documents."""
    (folder / CATALOG).touch()
    entries = {
        "schema_version": PLAIN,
        "fingerprint": meta.fingerprint,
        "made_by": json.dumps(meta.made_by),
    }
    if meta.dtype != BFLOAT16:
        entries |= {"schema_version": SCALED, "dtype": meta.dtype}
    with connect(folder) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_TABLES)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", entries.items())


def read_meta(folder: Path, connection: sqlite3.Connection) -> Meta:
    """Return what holds for the bank as a whole.

    Raises:
        BankError: the format is unknown, or an entry is missing or malformed.
    """
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if meta.get("schema_version") not in (PLAIN, SCALED):
        raise BankError(
            f"bank '{folder}' has format {meta.get('schema_version')}, this sedem reads "
            f"{PLAIN} and {SCALED}; use the sedem that wrote it or build it again"
        )
    needed = {"fingerprint", "made_by"} | ({"dtype"} if meta["schema_version"] == SCALED else set())
    if missing := needed - meta.keys():
        raise BankError(
            f"the catalog of bank '{folder}' lacks its {min(missing)}; restore it or build again"
        )
    dtype = meta.get("dtype", BFLOAT16)
    if dtype not in DTYPES:
        raise BankError(
            f"bank '{folder}' stores its slots as '{dtype}', this sedem reads "
            f"{', '.join(DTYPES)}; use the sedem that wrote it or build it again"
        )
    if not isinstance(meta["fingerprint"], str):
        raise _damaged(folder, "its fingerprint is not text")
    return Meta(meta["fingerprint"], _made_by(folder, meta["made_by"]), dtype)


def insert(
    connection: sqlite3.Connection,
    shard: ShardRow,
    documents: Sequence[tuple[str, str]],
    blocks: Sequence[BlockRow],
    checksums: Sequence[int],
) -> None:
    """Add a shard with its documents and blocks; each replaces a document of its name.

    Args:
        connection: inside a transaction.
        shard: the file that holds the blocks' memory, row by row.
        documents: names and texts.
        blocks: one for each row; `document` is an index into `documents`.
        checksums: CRC-32 of each row.
    """
    shard_id = connection.execute(
        "INSERT INTO shards (file, blocks, bytes, sha256) VALUES (?, ?, ?, ?)",
        (shard.file, shard.blocks, shard.size, shard.sha256),
    ).lastrowid
    document_ids = []
    for name, text in documents:
        delete(connection, name)
        cursor = connection.execute(
            "INSERT INTO documents (name, text, sha256) VALUES (?, ?, ?)",
            (name, text, text_digest(text)),
        )
        document_ids.append(cursor.lastrowid)
    connection.executemany(
        'INSERT INTO blocks (document, shard, row, start, "end", slot_tokens, crc32) '
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (
                document_ids[block.document],
                shard_id,
                row,
                block.start,
                block.end,
                bytes(block.slot_tokens),
                checksum,
            )
            for row, (block, checksum) in enumerate(zip(blocks, checksums, strict=True))
        ],
    )


def delete(connection: sqlite3.Connection, name: str) -> bool:
    """Remove a document and its blocks; returns whether there was one of that name."""
    return connection.execute("DELETE FROM documents WHERE name = ?", (name,)).rowcount > 0


def newest_shard(connection: sqlite3.Connection) -> int:
    """Return the number of the newest shard; 0 without one."""
    (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM shards").fetchone()
    return int(newest)


def document_names(connection: sqlite3.Connection) -> list[str]:
    """Return the names of all documents, in reading order."""
    return [row[0] for row in connection.execute("SELECT name FROM documents ORDER BY id")]


def read_shards(folder: Path, connection: sqlite3.Connection) -> dict[int, ShardRow]:
    """Return all shards by id, the oldest first.

    Raises:
        BankError: the name of a shard is not one that sedem gives.
    """
    rows = connection.execute("SELECT id, file, blocks, bytes, sha256 FROM shards ORDER BY id")
    shards = {number: ShardRow(*entries) for number, *entries in rows}
    for shard in shards.values():
        # A name with a path in it could lead out of the bank.
        if not _SHARD_FILE.fullmatch(str(shard.file)):
            raise _damaged(folder, f"it names a shard {shard.file!a}")
    return shards


def read_rows(folder: Path, connection: sqlite3.Connection) -> Rows:
    """Return documents, shards and blocks.

    Raises:
        BankError: they contradict each other.
    """
    documents = connection.execute("SELECT id, name, text FROM documents ORDER BY id").fetchall()
    shards = read_shards(folder, connection)
    rows = connection.execute(
        'SELECT id, document, shard, row, start, "end", slot_tokens, crc32 FROM blocks ORDER BY id'
    ).fetchall()
    if not all(isinstance(value, str) for _, *values in documents for value in values):
        raise _damaged(folder, "the name or text of a document is not text")
    document_index = {document_id: index for index, (document_id, _, _) in enumerate(documents)}
    shard_index = {shard_id: index for index, shard_id in enumerate(shards)}
    lengths = [len(text) for _, _, text in documents]
    slots = len(rows[0][6]) if rows and isinstance(rows[0][6], bytes) else 0
    blocks, places = [], []
    for block_id, document_id, shard_id, row, start, end, slot_tokens, crc32 in rows:
        document, shard = document_index.get(document_id), shard_index.get(shard_id)
        if document is None or shard is None:
            raise _damaged(folder, f"block {block_id} has no document or no shard")
        if not all(isinstance(value, int) for value in (row, start, end, crc32)) or row < 0:
            raise _damaged(folder, f"block {block_id} has a malformed number")
        if not 0 <= start <= end <= lengths[document]:
            raise _damaged(folder, f"block {block_id} lies outside its document's text")
        if not isinstance(slot_tokens, bytes) or len(slot_tokens) != slots or not slots:
            raise _damaged(folder, f"block {block_id} has another number of slots")
        blocks.append(BlockRow(document, start, end, tuple(slot_tokens)))
        places.append((shard, row, crc32))
    return Rows(
        [(name, text) for _, name, text in documents], list(shards.values()), blocks, places
    )


def text_digest(text: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def connect(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the catalog of a bank.

    Raises:
        BankError: there is no bank, or its catalog cannot be used.
    """
    check_is_bank(folder)
    try:
        with closing(sqlite3.connect(_uri(folder), uri=True)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            yield connection
            connection.commit()
    except sqlite3.OperationalError as error:
        # A full disk, a lock or a missing permission: the bank is unchanged.
        raise BankError(f"the catalog of bank '{folder}' cannot be used now ({error})") from None
    except sqlite3.DatabaseError as error:
        raise BankError(
            f"the catalog of bank '{folder}' cannot be used ({error}); restore it or build again"
        ) from None


def check_is_bank(folder: Path) -> None:
    """Refuse a folder that is not a bank.

    Raises:
        BankError: it does not exist, or has no catalog.
    """
    if not folder.exists():
        raise BankError(
            f"there is no bank '{folder}'; make one with 'sedem build {folder} FILE...'"
        )
    if not (folder / CATALOG).is_file():
        raise BankError(f"'{folder}' is not a bank: it holds no {CATALOG}")


def _made_by(folder: Path, text: str | bytes) -> dict[str, Any]:
    try:
        made_by = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        made_by = None
    if not isinstance(made_by, dict):
        raise _damaged(folder, "its made_by is not a JSON object")
    width = made_by.get("width")
    if not isinstance(width, int) or width < 1:
        raise _damaged(folder, f"its made_by has the width {width!a}, not a whole number above 0")
    return made_by


def _damaged(folder: Path, reason: str) -> BankError:
    return BankError(
        f"the catalog of bank '{folder}' is damaged: {reason}; restore it or build again"
    )


def _uri(folder: Path) -> str:
    """Return the catalog's address for SQLite, read-only where the folder cannot be written."""
    uri = (folder / CATALOG).absolute().as_uri()
    if os.access(folder, os.W_OK):
        return f"{uri}?mode=rw"
    has_log = (folder / f"{CATALOG}-wal").exists()
    return f"{uri}?mode=ro{'' if has_log else '&immutable=1'}"

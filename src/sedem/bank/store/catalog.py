"""catalog.sqlite: the tables of a bank, and the statements that write them.

Every row has a checksum over its other columns, and `meta` has the number of rows of each table and
the sum of their checksums, so a row that was changed, lost or brought back is detected on reading
(`catalog_rows`). docs/bank-format.md describes the tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks
from sedem.bank.store.checksums import State, Sum, row_checksum
from sedem.bank.store.interface import Meta
from sedem.bank.store.tensor_files import reading
from sedem.errors import BankError, DamagedCatalogError, first_line

CATALOG = "catalog.sqlite"
FORMATS = {True: "3", False: "4"}
"""A bank's format by whether it stores texts; without them its table of texts is empty."""
TEXT_PIECE = 2**20
"""Characters of text per row, so that reading a span needs only the rows that contain it."""
STATE = "state"
WAIT = 5.0
"""Seconds that an access to the catalog waits for other processes."""
CHECKED = 2**23
"""Largest catalog, in bytes, whose pages a writer checks first; this takes about 7 ms."""
TABLES = ("documents", "shards", "texts")

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc32 INTEGER NOT NULL);
CREATE TABLE shards (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL UNIQUE, blocks INTEGER NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, crc32 INTEGER NOT NULL,
    documents BLOB NOT NULL, spans BLOB NOT NULL, slot_tokens BLOB NOT NULL, checksums BLOB NOT NULL
);
CREATE TABLE documents (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, characters INTEGER NOT NULL,
    sha256 TEXT NOT NULL, removed INTEGER NOT NULL, pages BLOB NOT NULL, crc32 INTEGER NOT NULL
);
CREATE INDEX documents_name ON documents (name);
CREATE TABLE texts (
    id INTEGER PRIMARY KEY, document INTEGER NOT NULL REFERENCES documents (id),
    start INTEGER NOT NULL, crc32 INTEGER NOT NULL, text TEXT NOT NULL
);
CREATE INDEX texts_place ON texts (document, start);
"""


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


# Writing


@contextmanager
def creating(folder: Path) -> Iterator[sqlite3.Connection]:
    """Make a catalog with empty tables and open it."""
    (folder / CATALOG).touch()
    with connect(folder, alone=True) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_TABLES)
        yield connection


def create(folder: Path, meta: Meta) -> None:
    """Make the catalog of a bank without documents."""
    with creating(folder) as connection:
        for key, value in {
            "schema_version": FORMATS[meta.texts],
            "fingerprint": meta.fingerprint,
            "made_by": json.dumps(meta.made_by),
            "dtype": meta.dtype,
        }.items():
            write_meta(connection, key, value)
        write_state(connection, State(0, dict.fromkeys(TABLES, Sum())))


def shard_columns(
    blocks: Blocks, checksums: Sequence[int] | NDArray[np.uint32]
) -> tuple[bytes, bytes, bytes, bytes]:
    """Return a shard's columns: document ids, spans, slot tokens and checksums of its blocks.

    Args:
        blocks: one per row of the file; `documents` are ids.
        checksums: CRC-32 of each row.
    """
    return (
        blocks.documents.astype("<i8").tobytes(),
        np.stack([blocks.starts, blocks.ends], 1).astype("<i8").tobytes(),
        blocks.slot_tokens.tobytes(),
        np.array(checksums, "<u4").tobytes(),
    )


def insert_shard(connection: sqlite3.Connection, shard: ShardRow, columns: Sequence[bytes]) -> int:
    """Add the row of a shard; returns its checksum.

    Args:
        connection: inside a transaction.
        shard: the file.
        columns: as returned by `shard_columns`.
    """
    row = (shard.file, shard.blocks, shard.size, shard.sha256)
    number = connection.execute(
        "INSERT INTO shards (file, blocks, bytes, sha256, crc32, documents, spans, slot_tokens, "
        "checksums) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)",
        (*row, *columns),
    ).lastrowid
    assert number is not None
    return replace_shard(connection, number, shard, columns)


def replace_shard(
    connection: sqlite3.Connection, number: int, shard: ShardRow, columns: Sequence[bytes]
) -> int:
    """Change the row of a shard.

    Args:
        connection: inside a transaction.
        number: id of the shard.
        shard: the file.
        columns: as returned by `shard_columns`.

    Returns:
        The row's new checksum.
    """
    row = (shard.file, shard.blocks, shard.size, shard.sha256)
    crc = row_checksum(number, *row, *columns)
    connection.execute(
        "UPDATE shards SET file = ?, blocks = ?, bytes = ?, sha256 = ?, documents = ?, spans = ?, "
        "slot_tokens = ?, checksums = ?, crc32 = ? WHERE id = ?",
        (*row, *columns, crc, number),
    )
    return crc


def forget_removed(connection: sqlite3.Connection) -> None:
    """Delete documents marked as removed or unfinished, and their texts."""
    connection.execute(
        "DELETE FROM texts WHERE document NOT IN (SELECT id FROM documents WHERE removed = 0)"
    )
    connection.execute("DELETE FROM documents WHERE removed <> 0")


def recounted(connection: sqlite3.Connection, state: State) -> State:
    """Return the state with the current sums of the tables."""
    sums = {
        table: Sum().plus(crc for (crc,) in connection.execute(f"SELECT crc32 FROM {table}"))
        for table in TABLES
    }
    return State(state.commit, sums)


def shard_files(connection: sqlite3.Connection) -> set[str]:
    """Return the names of the files of all shards."""
    return {file for (file,) in connection.execute("SELECT file FROM shards")}


def stored_digest(connection: sqlite3.Connection, name: str) -> str | None:
    """Return the SHA-256 of a document's text; None if no document has that name."""
    row = connection.execute(
        "SELECT sha256 FROM documents WHERE name = ? AND removed = 0", (name,)
    ).fetchone()
    return None if row is None else str(row[0])


def newest_shard(connection: sqlite3.Connection) -> int:
    """Return the highest shard number ever used; 0 if there is none."""
    # SQLite's own counter has no checksum; if it were too low, a name in use would be reused.
    (newest,) = connection.execute(
        "SELECT max((SELECT ifnull(max(id), 0) FROM shards), "
        "(SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'shards'))"
    ).fetchone()
    return int(newest)


def document_names(connection: sqlite3.Connection) -> list[str]:
    """Return the names of all documents, in reading order."""
    rows = connection.execute("SELECT name FROM documents WHERE removed = 0 ORDER BY id")
    return [row[0] for row in rows]


def write_state(connection: sqlite3.Connection, state: State) -> None:
    """Write the state after a change; every transaction ends with this."""
    sums = {table: [one.count, one.total] for table, one in state.sums.items()}
    write_meta(connection, STATE, json.dumps({"commit": state.commit, **sums}))


def write_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Write a bank-wide entry."""
    row = (key, value, row_checksum(key, value))
    connection.execute("INSERT OR REPLACE INTO meta (key, value, crc32) VALUES (?, ?, ?)", row)


def text_digest(text: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(text.encode()).hexdigest()


# Opening


def has_foreign_schema(connection: sqlite3.Connection) -> bool:
    """Whether a catalog's tables, views or triggers differ from those that `create` makes."""
    listed = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    with closing(sqlite3.connect(":memory:")) as own:
        own.executescript(_TABLES)
        return connection.execute(listed).fetchall() != own.execute(listed).fetchall()


@contextmanager
def connect(folder: Path, *, alone: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the catalog of a bank.

    Args:
        folder: the bank's folder.
        alone: lock out other processes, so that no file has to be mapped. This is also done where
            files cannot be mapped.

    Raises:
        BankError: there is no bank, or its catalog cannot be used.
        DamagedCatalogError: the part of the catalog that is read is damaged.
    """
    check_is_bank(folder)
    try:
        with closing(_opened(_uri(folder), alone or reading())) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            yield connection
            connection.commit()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if not isinstance(error, sqlite3.OperationalError) or _tells_damage(error):
            raise DamagedCatalogError(
                f"the catalog of bank '{folder}' cannot be used ({error}); restore it, or keep "
                "what can be read of it with 'sedem bank verify --repair'"
            ) from None
        # A full disk, a lock or a missing permission: the bank is unchanged.
        log = not os.access(folder, os.W_OK) and (folder / f"{CATALOG}-wal").exists()
        way_out = (
            "; copy it to a local disk, or open it once where it may be written" if log else ""
        )
        raise BankError(
            f"the catalog of bank '{folder}' cannot be used now ({error}){way_out}"
        ) from None


def check_pages(folder: Path, connection: sqlite3.Connection) -> None:
    """Refuse to write into a catalog of at most `CHECKED` bytes whose pages are damaged.

    A row that is added to such a page may overwrite a row that is still readable.

    Args:
        folder: the bank's folder.
        connection: connection to its catalog.

    Raises:
        DamagedCatalogError: a page is damaged.
    """
    if (folder / CATALOG).stat().st_size > CHECKED:
        return
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise DamagedCatalogError(
            f"the catalog of bank '{folder}' is damaged ({first_line(found)}), so nothing is "
            "written into it; restore it, or keep what can be read of it with 'sedem bank verify "
            "--repair'"
        )


def _tells_damage(error: sqlite3.OperationalError) -> bool:
    """Whether a table or a part of the file is missing; any other error is temporary."""
    name = getattr(error, "sqlite_errorname", "")
    return name in ("SQLITE_ERROR", "SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT_READ")


def check_is_bank(folder: Path) -> None:
    """Refuse a folder that is not a bank.

    Raises:
        BankError: it does not exist, may not be read, or has no catalog.
    """
    try:
        (folder / CATALOG).stat()
    except PermissionError:
        raise BankError(f"'{folder}' may not be read; ask its owner for permission") from None
    except OSError:
        if not folder.exists():
            raise BankError(
                f"there is no bank '{folder}'; make one with 'sedem build {folder} FILE...'"
            ) from None
    if not (folder / CATALOG).is_file():
        raise BankError(f"'{folder}' is not a bank: it holds no {CATALOG}")


def _opened(uri: str, alone: bool) -> sqlite3.Connection:
    """Open a database; readers and a writer share a mapped file if the file system can map."""
    until = time.monotonic() + WAIT
    while True:
        connection = sqlite3.connect(uri, 0 if alone else WAIT, uri=True)
        try:
            if alone:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA schema_version").fetchall()
            return connection
        except sqlite3.Error as error:
            connection.close()
            name = getattr(error, "sqlite_errorname", "")
            if not alone and name.startswith("SQLITE_IOERR_SHM"):
                alone = True
            elif alone and name.startswith("SQLITE_BUSY") and time.monotonic() < until:
                # Two processes waiting inside SQLite would each keep their half of the lock.
                time.sleep(random.uniform(0.001, 0.02))
            else:
                raise


def _uri(folder: Path) -> str:
    """Return the catalog's SQLite URI, read-only if the folder is not writable."""
    uri = (folder / CATALOG).absolute().as_uri()
    if os.access(folder, os.W_OK):
        return f"{uri}?mode=rw"
    has_log = (folder / f"{CATALOG}-wal").exists()
    return f"{uri}?mode=ro{'' if has_log else '&immutable=1'}"

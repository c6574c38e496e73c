"""catalog.sqlite: the tables of a bank, how they are opened and what they say of the whole."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sedem.bank.store.interface import Meta
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, DTYPES

CATALOG = "catalog.sqlite"
PLAIN, SCALED = "1", "2"
"""Formats: the first sedem knew bfloat16 alone and must not read slots without their scales."""

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
    """What the catalog says of the bank.

    Raises:
        BankError: it is of a format that is not known, or lacks something.
    """
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if meta.get("schema_version") not in (PLAIN, SCALED):
        raise BankError(
            f"bank '{folder}' has format {meta.get('schema_version')}, this sedem reads "
            f"{PLAIN} and {SCALED}; use the sedem that wrote it or build it again"
        )
    needed = {"fingerprint", "made_by"} | ({"dtype"} if meta["schema_version"] == SCALED else set())
    if lacking := needed - meta.keys():
        raise BankError(
            f"the catalog of bank '{folder}' lacks its {min(lacking)}; restore it or build again"
        )
    dtype = meta.get("dtype", BFLOAT16)
    if dtype not in DTYPES:
        raise BankError(
            f"bank '{folder}' stores its slots as '{dtype}', this sedem reads "
            f"{', '.join(DTYPES)}; use the sedem that wrote it or build it again"
        )
    return Meta(meta["fingerprint"], json.loads(meta["made_by"]), dtype)


@contextmanager
def connect(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the catalog of a bank.

    Raises:
        BankError: there is no bank, or its catalog cannot be used.
    """
    check_is_bank(folder)
    try:
        with closing(sqlite3.connect(_address(folder), uri=True)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            yield connection
            connection.commit()
    except sqlite3.OperationalError as error:
        # A full disk, a lock, a missing right: the bank itself is as it was.
        raise BankError(f"the catalog of bank '{folder}' cannot be used now ({error})") from None
    except sqlite3.DatabaseError as error:
        raise BankError(
            f"the catalog of bank '{folder}' cannot be used ({error}); restore it or build again"
        ) from None


def check_is_bank(folder: Path) -> None:
    """Refuse a folder that is no bank.

    Raises:
        BankError: it is not there, or holds no catalog.
    """
    if not folder.exists():
        raise BankError(
            f"there is no bank '{folder}'; make one with 'sedem build {folder} FILE...'"
        )
    if not (folder / CATALOG).is_file():
        raise BankError(f"'{folder}' is not a bank: it holds no {CATALOG}")


def _address(folder: Path) -> str:
    """The catalog for SQLite, which must not want to write where it cannot."""
    address = (folder / CATALOG).absolute().as_uri()
    if os.access(folder, os.W_OK):
        return f"{address}?mode=rw"
    unfinished = (folder / f"{CATALOG}-wal").exists()
    return f"{address}?mode=ro{'' if unfinished else '&immutable=1'}"

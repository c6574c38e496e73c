"""The server's database: the banks, the uploads and what is still to be read.

SQLite in WAL mode, synchronous FULL: committed data survives a crash and a power cut. One
connection, behind a lock, serves all threads; every transaction takes milliseconds.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from sedem.errors import BankError, ConfigError
from sedem.serve.errors import ApiError

VERSION = 3
"""Version of the tables; SQLite's `user_version`."""
BUSY_SECONDS = 10.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_TABLES = """
CREATE TABLE banks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    folder TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL
) STRICT;
CREATE TABLE removals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    bank INTEGER NOT NULL REFERENCES banks ON DELETE CASCADE,
    name TEXT NOT NULL
) STRICT;
"""
_UPLOADS = """
CREATE TABLE uploads (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    bank INTEGER NOT NULL REFERENCES banks ON DELETE CASCADE,
    name TEXT NOT NULL,
    file TEXT NOT NULL,
    size INTEGER NOT NULL,
    status TEXT NOT NULL,
    error TEXT
) STRICT;
CREATE INDEX uploads_by_status ON uploads (status, id);
"""
# uploads: the files sent since the bank last had nothing to read; size counts bytes, and characters
# once the file is read.
# removals: documents that must be removed from a bank. A row is deleted once its document is gone,
# so that no crash and no running build brings the document back.
_FROM_2 = """
DROP TABLE IF EXISTS trash;
INSERT INTO uploads SELECT bank_files.id, bank_files.bank, bank_files.name, file,
    iif(status = 'completed', characters, bytes),
    CASE status WHEN 'in_progress' THEN 'waiting' WHEN 'completed' THEN 'read' ELSE 'failed' END,
    error
    FROM bank_files JOIN files ON files.id = file
    WHERE round = (SELECT max(round) FROM bank_files AS other WHERE other.bank = bank_files.bank);
DROP TABLE bank_files;
DROP TABLE files;
ALTER TABLE banks DROP COLUMN title;
ALTER TABLE banks DROP COLUMN metadata;
"""
"""Earlier releases kept every uploaded file; those that are read stay in the folder `files`."""


class Database:
    """The tables of the server's folder.

    Args:
        path: the file; it is created if it does not exist.

    Raises:
        ConfigError: it is not a database, or one of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(
            path, BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._connection.row_factory = sqlite3.Row
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ConfigError(
                f"'{path}' cannot be used as the server's database ({error}); restore it from a "
                "backup, or give another folder"
            ) from None
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA secure_delete = ON")
        with self.writing() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise ConfigError(
                    f"'{self.path}' was written by a newer version of sedem (tables {version}, "
                    f"this one knows {VERSION}); update sedem, or give another folder"
                )
            if version == 0:
                _run(connection, _TABLES + _UPLOADS)
            elif version < VERSION:
                _run(connection, _UPLOADS + _FROM_2)
            connection.execute(f"PRAGMA user_version = {VERSION}")

    def empty_log(self) -> None:
        """Write the log into the file, so that no name of what was deleted stays in it."""
        with self._lock, full_disk():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction; at the end of the block it is durable, or rolled back on an error.

        Raises:
            FullDiskError: the disk is full.
        """
        with self._lock, full_disk():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the database; later calls fail."""
        with self._lock:
            self._connection.close()


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Run statements in the current transaction, which `executescript` would commit."""
    for statement in filter(str.strip, script.split(";")):
        connection.execute(statement)


FULL_DISK = (
    "the disk of the server is full, so nothing was stored; delete files or banks, or ask its "
    "operator for room"
)


class FullDiskError(ApiError):
    """507: the disk has no room."""

    def __init__(self) -> None:
        super().__init__(507, FULL_DISK, "server_error", code="insufficient_storage")


@contextmanager
def full_disk() -> Iterator[None]:
    """Convert all errors that a full disk causes to one error.

    Raises:
        FullDiskError: the disk is full.
    """
    try:
        yield
    except (OSError, sqlite3.Error, BankError) as error:
        if not is_full(error):
            raise
        raise FullDiskError from None


def is_full(error: BaseException | None) -> bool:
    """Return whether an error says that the disk is full, or was caused by one that does."""
    if isinstance(error, BankError):
        return is_full(error.__context__)
    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, apsw.FullError):
        return True
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL

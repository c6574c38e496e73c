"""A consistent copy of a bank that another process may be writing.

SQLite copies the catalog first; the catalog says which shards belong to it. Shards never change, so
they can be copied afterwards. They are copied, not linked: damage to a shared file would affect
both the bank and its backup.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from sedem.bank.store import catalog, catalog_rows
from sedem.bank.store.catalog import CATALOG, ShardRow
from sedem.bank.store.checksums import State
from sedem.bank.store.local import LocalStore
from sedem.bank.store.shard import SHARDS
from sedem.durable_files import folder_bytes, sync_folder
from sedem.errors import BankError
from sedem.untrusted import open_file


class CheckedFile:
    """A shard file that is read once, from the start, and verified against its checksum.

    Args:
        file: the open file.
        path: its path, for messages.
        row: its row in the catalog.
    """

    def __init__(self, file: IO[bytes], path: Path, row: ShardRow) -> None:
        self._file = file
        self._path = path
        self._row = row
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        content = self._file.read(size)
        self._digest.update(content)
        return content

    def check(self) -> None:
        """Verify everything that was read.

        Raises:
            BankError: it is damaged.
        """
        if self._digest.hexdigest() != self._row.sha256:
            raise BankError(
                f"shard '{self._path}' is damaged (its SHA-256 differs); run 'sedem bank verify "
                "--repair' before it is copied"
            )


def backup(folder: Path, target: Path) -> int:
    """Copy a bank as of one commit; other processes may write it meanwhile.

    Args:
        folder: the bank's folder.
        target: the new folder, which appears when it is complete.

    Returns:
        Bytes of the copy.

    Raises:
        BankError: something exists at the target, the bank is damaged, or the copy cannot be
            written.
    """
    catalog.check_is_bank(folder)
    check_free(target)
    with LocalStore(target).appearing() as unfinished, removed_on_error(unfinished.folder):
        shards = unfinished.folder / SHARDS

        def copy(rows: list[ShardRow]) -> None:
            shutil.rmtree(shards, ignore_errors=True)
            shards.mkdir()
            for row in rows:
                with checked(folder, row) as source:
                    write_file(shards / row.file, source)
            sync_folder(shards)

        copy_commit(folder, unfinished.folder, copy)
        return folder_bytes(unfinished.folder)


def copy_commit(folder: Path, target: Path, copy: Callable[[list[ShardRow]], None]) -> None:
    """Copy a bank's catalog, then what it names; retry if the bank was compacted in between.

    Args:
        folder: the bank's folder.
        target: folder for the copy of the catalog.
        copy: copies the given shards.

    Raises:
        BankError: a shard is missing or damaged, or the catalog is damaged.
    """
    while True:
        with catalog.connect(folder) as connection:
            (target / CATALOG).unlink(missing_ok=True)
            with closing(sqlite3.connect(target / CATALOG)) as copied:
                connection.backup(copied)
        rows, state = shard_rows(target)
        _sync(target / CATALOG)
        try:
            copy(rows)
            return
        except FileNotFoundError as missing:
            with catalog.connect(folder) as connection:
                if catalog_rows.read_meta(folder, connection)[1] == state:
                    raise BankError(
                        f"shard '{missing.filename}' is missing; restore it, or run 'sedem bank "
                        "verify --repair' before the bank is copied"
                    ) from None


def shard_rows(folder: Path) -> tuple[list[ShardRow], State]:
    """Return the rows of a bank's shards in its catalog, and its state."""
    with catalog.connect(folder) as connection:
        _, state = catalog_rows.read_meta(folder, connection)
        stored = catalog_rows.read_shards(folder, connection, state)
    return [shard.row for shard in stored], state


@contextmanager
def checked(folder: Path, row: ShardRow) -> Iterator[CheckedFile]:
    """Open a shard to be read completely; its checksum is verified at the end.

    Raises:
        BankError: it is damaged or may not be read.
        FileNotFoundError: there is no such file.
    """
    path = folder / SHARDS / row.file
    with open_file(path, BankError) as file:
        if os.fstat(file.fileno()).st_size == row.size:
            source = CheckedFile(file, path, row)
            yield source
            source.check()
        else:
            raise BankError(
                f"shard '{path}' is damaged (its size differs); run 'sedem bank verify --repair' "
                "before it is copied"
            )


def write_file(path: Path, source: CheckedFile) -> None:
    """Write a new file, durably."""
    with path.open("xb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())


def check_free(target: Path) -> None:
    """Refuse to replace an existing file or folder.

    Raises:
        BankError: something has that name.
    """
    if os.path.lexists(target):
        raise BankError(f"'{target}' exists already; choose another name")


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Remove an unfinished copy on an error; a killed process leaves it behind."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

"""Make a new catalog from what can be read of a damaged one.

Every row has a checksum, so rows are taken from any page that still holds them, without trusting
what SQLite says about the file. The entry `state` shows whether rows are missing. A document stays
only if all its blocks are still known. A document whose memory is unknown is listed in a shard that
does not exist, so it counts as damaged, and a repair reads it again or drops it. SQLite replaces
the catalog in one transaction, so a crash leaves the old one or the new one.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sedem.bank.store import catalog, salvaged_rows, sqlite_pages, verify
from sedem.bank.store.catalog import CATALOG, WAIT
from sedem.bank.store.shard import SHARDS
from sedem.bank.store.tensor_files import reading
from sedem.durable_files import link, sync_folder
from sedem.errors import BankError, DamagedCatalogError

DAMAGED = ".damaged"
"""Suffix of files that were set aside; nothing removes them."""
WORK = ".salvage"
"""The folder in which a new catalog is made; one left by a crash is removed."""
LOG = "-wal"
_TRANSIENT = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_PERM")


@dataclass(frozen=True)
class Salvaged:
    """The result of salvaging a catalog.

    Attributes:
        problems: its defects and what they lost, one sentence each; empty if it was intact.
        set_aside: files that are no longer used, under their new names.
    """

    problems: list[str]
    set_aside: list[str]


WHOLE = Salvaged([], [])


def salvage(folder: Path) -> Salvaged:
    """Make a new catalog of a bank whose lock is held, if the old one is damaged.

    Raises:
        BankError: nothing of it can be kept, or it cannot be written. The bank does not change.
    """
    shutil.rmtree(folder / WORK, ignore_errors=True)
    problem = verify.catalog_problem(folder)
    if not problem:
        return WHOLE
    work = folder / WORK
    try:
        work.mkdir()
        _copy(folder / CATALOG, work / "aside")
        _copy(work / "aside", work / "damaged")
        problems = _make_new(folder, work, problem)
        set_aside = _set_aside_catalog(folder, work)
        if problems:
            set_aside += _set_aside_shards(folder, work)
        _exchange(folder, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Salvaged([problem, *problems], set_aside)


# Reading


def _copy(source: Path, target: Path) -> None:
    """Copy a catalog and its log, durably; a page that the disk cannot read becomes zero."""
    for ending in ("", LOG):
        path = source.with_name(source.name + ending)
        if not path.is_file():
            continue
        with path.open("rb", buffering=0) as old, open(f"{target}{ending}", "wb") as new:
            for place in range(0, path.stat().st_size, sqlite_pages.PAGE):
                old.seek(place)
                try:
                    page = old.read(sqlite_pages.PAGE)
                except OSError:
                    page = bytes(sqlite_pages.PAGE)
                # A write error is not the page's: ignoring it would lose what was read.
                new.write(page)
            new.flush()
            os.fsync(new.fileno())


def _take_in_log(file: Path) -> bool:
    """Apply the log of a copied catalog to the copy; False if SQLite cannot."""
    if not file.with_name(file.name + LOG).is_file():
        return True
    for _ in range(2):
        with suppress(sqlite3.Error), closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA schema_version").fetchone()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return True
        _mend_start(file)
    return False


def _mend_start(file: Path) -> None:
    """Rewrite the first page of a catalog; it holds only the schema, which is known."""
    with file.open("rb+") as opened:
        pages = max(1, -(-opened.seek(0, os.SEEK_END) // sqlite_pages.PAGE))
        opened.truncate(pages * sqlite_pages.PAGE)
        opened.seek(0)
        opened.write(sqlite_pages.first_page(pages))
        opened.flush()
        os.fsync(opened.fileno())


# Making a new catalog


def _make_new(folder: Path, work: Path, problem: str) -> list[str]:
    """Make an intact catalog in the folder `work`; returns the losses, one sentence each.

    Raises:
        BankError: nothing can be kept, or the new catalog cannot be written.
    """
    try:
        log = _take_in_log(work / "damaged")
        with catalog.creating(work) as connection, connection:
            connection.execute("BEGIN")
            salvaged_rows.insert_rows(work / "damaged", connection)
            problems = salvaged_rows.complete(folder, connection)
        if left := verify.catalog_problem(work):
            raise DamagedCatalogError(left)
    except DamagedCatalogError:
        raise BankError(
            f"bank '{folder}' cannot be repaired, because too little can be read of its catalog, "
            f"which alone maps memory to text ({problem.partition(';')[0]}); restore a backup, "
            "or read the documents again with 'sedem build NEW_BANK FILE...'"
        ) from None
    return problems if log else [*problems, "its log cannot be read, so commits may be lost"]


# Exchanging


def _set_aside_catalog(folder: Path, work: Path) -> list[str]:
    """Keep the damaged catalog and its log under other names; returns the names."""
    name, number = f"{CATALOG}{DAMAGED}", 1
    while (folder / name).exists() and not _same(folder / name, work / "aside"):
        number += 1
        name = f"{CATALOG}.{number}{DAMAGED}"
    names = [name]
    if (work / f"aside{LOG}").exists():
        (work / f"aside{LOG}").replace(folder / f"{name}{LOG}")
        names.append(f"{name}{LOG}")
    (work / "aside").replace(folder / name)
    sync_folder(folder)
    return names


def _same(one: Path, other: Path) -> bool:
    """Whether two catalogs and their logs are equal."""
    pairs = [(Path(f"{one}{ending}"), Path(f"{other}{ending}")) for ending in ("", LOG)]
    return all(
        filecmp.cmp(a, b, shallow=False) if a.exists() and b.exists() else a.exists() == b.exists()
        for a, b in pairs
    )


def _set_aside_shards(folder: Path, work: Path) -> list[str]:
    """Give shards that the new catalog does not name a second name, which no writer clears."""
    with catalog.connect(work) as connection:
        named = catalog.shard_files(connection)
    names = []
    for path in sorted((folder / SHARDS).glob("*.safetensors")):
        aside = path.with_name(path.name + DAMAGED)
        if path.name not in named:
            aside.unlink(missing_ok=True)
            link(path, aside)
            names.append(f"{SHARDS}/{aside.name}")
    if names:
        sync_folder(folder / SHARDS)
    return names


def _exchange(folder: Path, work: Path) -> None:
    """Overwrite the damaged catalog with the new one in one transaction.

    Raises:
        BankError: it cannot be written.
    """
    try:
        try:
            _write_over(folder / CATALOG, work / CATALOG)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", "") in _TRANSIENT:
                raise
            _mend_start(folder / CATALOG)
            _write_over(folder / CATALOG, work / CATALOG)
    except sqlite3.Error as error:
        raise BankError(
            f"the catalog of bank '{folder}' cannot be replaced ({error}) and is still damaged; "
            "repair it again"
        ) from None


def _write_over(old: Path, new: Path) -> None:
    with closing(sqlite3.connect(new)) as source, closing(sqlite3.connect(old, WAIT)) as target:
        if reading():
            target.execute("PRAGMA locking_mode = EXCLUSIVE")
        target.execute("PRAGMA synchronous = FULL")
        source.backup(target)
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

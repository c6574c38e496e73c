"""Read every byte of a bank on disk and compare it with its checksums."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sedem.bank.store import catalog, catalog_rows
from sedem.bank.store.catalog_rows import DocumentRows, StoredShard
from sedem.bank.store.interface import Meta
from sedem.bank.store.raw_rows import RawRows
from sedem.bank.store.shard import SHARDS
from sedem.durable_files import sha256
from sedem.errors import BankError, DamagedCatalogError


@dataclass(frozen=True)
class Damage:
    """The damage of a bank.

    Attributes:
        problems: one sentence for each defect.
        documents: names of the documents whose memory or text is damaged, in reading order.
        shards: files of shards that are damaged or missing.
        catalog: whether the catalog is damaged. If it cannot be read, `documents` and `shards` are
            empty; if only SQLite's integrity check fails, they are filled.
    """

    problems: list[str]
    documents: list[str]
    shards: list[str] = field(default_factory=list)
    catalog: bool = False


def catalog_problem(folder: Path) -> str:
    """Return the first defect of a catalog, except in its texts, as a sentence; empty if none.

    Raises:
        BankError: there is no bank, or SQLite cannot open its catalog now.
    """
    try:
        with catalog.connect(folder) as connection:
            _, state = catalog_rows.read_meta(folder, connection)
            documents = catalog_rows.read_documents(folder, connection, state)
            shards = catalog_rows.read_shards(folder, connection, state)
            catalog_rows.live_blocks(folder, documents, shards)
            connection.execute("SELECT 1 FROM texts LIMIT 1").fetchall()
            (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
    except DamagedCatalogError as error:
        return str(error)
    return "" if integrity == "ok" else f"the catalog is damaged: {integrity}"


def examine(
    folder: Path,
    at_hand: Callable[[StoredShard], AbstractContextManager[object]] = lambda shard: nullcontext(),
) -> Damage:
    """Read every byte of a bank.

    Args:
        folder: the bank's folder.
        at_hand: makes a context that is entered for each shard while its file is read.

    Raises:
        BankError: there is no bank, or its catalog cannot be opened.
    """
    with catalog.connect(folder) as connection:
        try:
            meta, state = catalog_rows.read_meta(folder, connection)
            documents = catalog_rows.read_documents(folder, connection, state)
            shards = catalog_rows.read_shards(folder, connection, state)
            catalog_rows.live_blocks(folder, documents, shards)
        except BankError as error:
            return Damage([str(error)], [], catalog=True)
        (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
        problems = [] if integrity == "ok" else [f"the catalog is damaged: {integrity}"]
        lost_texts = _damaged_texts(folder, connection, documents) if meta.texts else []
    affected = set(lost_texts)
    problems += [f"the text of document '{name}' is damaged or missing" for name in lost_texts]
    files = []
    for shard in shards:
        with at_hand(shard):
            problem, names = _examine_shard(folder, meta, documents, shard)
        if problem:
            problems.append(problem)
            files.append(shard.row.file)
            affected.update(names)
    in_order = [name for name in documents.names if name in affected]
    return Damage(problems, in_order, files, integrity != "ok")


def is_whole(folder: Path, shard: StoredShard) -> bool:
    """Whether the file of a shard exists and every byte of it is unchanged.

    Raises:
        BankError: this process may not read it.
    """
    path = folder / SHARDS / shard.row.file
    try:
        same_size = path.is_file() and path.stat().st_size == shard.row.size
        return same_size and sha256(path) == shard.row.sha256
    except PermissionError:
        raise BankError(f"shard '{path}' may not be read; ask its owner for permission") from None
    except OSError:
        return False  # A part of the disk cannot be read.


def sound_text(
    folder: Path, connection: sqlite3.Connection, documents: DocumentRows, index: int
) -> str | None:
    """Return the text of a document; None if a part of it is damaged or missing."""
    number, length = int(documents.ids[index]), int(documents.characters[index])
    try:
        text = catalog_rows.read_text(folder, connection, number, 0, length)
    except (BankError, sqlite3.Error, UnicodeError):
        return None
    return text if catalog.text_digest(text) == documents.digests[index] else None


def _damaged_texts(
    folder: Path, connection: sqlite3.Connection, documents: DocumentRows
) -> list[str]:
    """Return the names of the documents whose text is damaged or missing."""
    return [
        name
        for index, name in enumerate(documents.names)
        if sound_text(folder, connection, documents, index) is None
    ]


def _examine_shard(
    folder: Path, meta: Meta, documents: DocumentRows, shard: StoredShard
) -> tuple[str, Iterable[str]]:
    """Return the defect of a shard, if any, and the documents that it affects."""
    path = folder / SHARDS / shard.row.file
    if is_whole(folder, shard):
        return "", []
    what = "is damaged (its SHA-256 differs)" if path.is_file() else "is missing"
    lost = RawRows(folder / SHARDS, shard, meta).damaged()
    ids = np.unique(shard.blocks.documents[lost])
    names = [documents.names[i] for i in np.flatnonzero(np.isin(documents.ids, ids)).tolist()]
    return f"shard '{path.name}' {what}; it affects {_listed(names)}", names


def _listed(names: list[str], most: int = 5) -> str:
    if not names:
        return "no document"
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")

"""Reading every byte of a bank on disk and comparing it with its checksums."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sedem.bank.store import catalog, catalog_rows
from sedem.bank.store.catalog_rows import DocumentRows, StoredShard
from sedem.bank.store.interface import Meta
from sedem.bank.store.shard import SHARDS, Maps, Shard, checksum
from sedem.durable_files import sha256
from sedem.errors import BankError


@dataclass(frozen=True)
class Damage:
    """What is damaged in a bank.

    Attributes:
        problems: one sentence for each defect.
        documents: names of the documents whose memory or text is damaged, in reading order.
        catalog: whether the catalog itself is damaged, so that nothing can be said of documents.
    """

    problems: list[str]
    documents: list[str]
    catalog: bool = False


def examine(folder: Path) -> Damage:
    """Read every byte of a bank.

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
        lost_texts = _damaged_texts(folder, connection, documents)
    affected = set(lost_texts)
    problems += [f"the text of document '{name}' is damaged or missing" for name in lost_texts]
    for shard in shards:
        problem, names = _examine_shard(folder, meta, documents, shard)
        if problem:
            problems.append(problem)
            affected.update(names)
    return Damage(problems, [n for n in documents.names if n in affected], integrity != "ok")


def damaged_rows(folder: Path, meta: Meta, stored: StoredShard) -> list[int]:
    """Rows of a shard whose memory cannot be read, or does not match its checksum."""
    shard = Shard(folder / SHARDS, stored, meta.made_by["width"], meta.dtype, Maps())
    try:
        memory = shard.readable()
    except BankError:
        return [*range(len(shard))]
    return [row for row, crc in enumerate(stored.checksums) if checksum(memory[row]) != crc]


def _damaged_texts(
    folder: Path, connection: sqlite3.Connection, documents: DocumentRows
) -> list[str]:
    """Names of the documents whose text is damaged or missing."""
    lost = []
    lengths = documents.characters.tolist()
    for number, name, digest, length in zip(
        documents.ids.tolist(), documents.names, documents.digests, lengths, strict=True
    ):
        try:
            text = catalog_rows.read_text(folder, connection, number, 0, length)
        except (BankError, sqlite3.Error, UnicodeError):
            lost.append(name)
            continue
        if catalog.text_digest(text) != digest:
            lost.append(name)
    return lost


def _examine_shard(
    folder: Path, meta: Meta, documents: DocumentRows, shard: StoredShard
) -> tuple[str, Iterable[str]]:
    """The defect of a shard, if it has one, and the documents that it affects."""
    path = folder / SHARDS / shard.row.file
    if not path.is_file():
        what = "is missing"
    elif path.stat().st_size != shard.row.size or sha256(path) != shard.row.sha256:
        what = "is damaged (its SHA-256 differs)"
    else:
        return "", []
    ids = np.unique(shard.blocks.documents[damaged_rows(folder, meta, shard)])
    names = [documents.names[i] for i in np.flatnonzero(np.isin(documents.ids, ids)).tolist()]
    return f"shard '{path.name}' {what}; it affects {_listed(names)}", names


def _listed(names: list[str], most: int = 5) -> str:
    if not names:
        return "no document"
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")

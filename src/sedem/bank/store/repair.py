"""Repair a bank: damaged shards are set aside, intact blocks are kept, the rest is dropped.

A document that lost one block or a piece of its text is dropped entirely, because answers from the
rest would look complete. `inference/repair.py` first reads such documents again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sedem.bank.store import catalog, catalog_rows, document_rows, leftovers, rewriting, verify
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.raw_rows import RawRows
from sedem.bank.store.salvage import DAMAGED, WHOLE, Salvaged
from sedem.bank.store.shard import SHARDS
from sedem.durable_files import link, sync_folder
from sedem.errors import BankError
from sedem.quantization import vector_bytes


@dataclass(frozen=True)
class Repaired:
    """The result of a repair.

    Attributes:
        problems: the defects that it found, one sentence each.
        set_aside: the damaged files, under their new names.
        repaired: documents whose blocks were intact in a damaged shard and were rewritten.
        dropped: documents that had lost a part.
    """

    problems: list[str]
    set_aside: list[str]
    repaired: list[str]
    dropped: list[str]


@dataclass(frozen=True)
class Lost:
    """A document that has lost a part.

    Attributes:
        name: its name.
        sha256: SHA-256 of its text.
        text: its text; None if it is damaged too, or the bank holds no texts.
        pages: first character of each of its pages.
    """

    name: str
    sha256: str
    text: str | None
    pages: tuple[int, ...]


def repair(folder: Path, before: Salvaged = WHOLE) -> Repaired:
    """Repair a bank whose lock is held.

    One transaction makes all changes, so a crash leaves the bank unchanged or repaired.

    Args:
        folder: the bank's folder.
        before: the result of salvaging its catalog before.

    Raises:
        BankError: its catalog is damaged.
    """
    damage = examine(folder)
    if not damage.problems:
        return Repaired(before.problems, before.set_aside, [], [])
    (folder / SHARDS).mkdir(exist_ok=True)
    with catalog.connect(folder) as connection:
        meta, state = catalog_rows.read_meta(folder, connection)
        documents = catalog_rows.read_documents(folder, connection, state)
        stored = catalog_rows.read_shards(folder, connection, state)
        stored, blocks, places_N2 = catalog_rows.live_blocks(folder, documents, stored)
        rows = rewriting.rows_of(stored, documents.ids, blocks, places_N2)
        names = dict(zip(documents.ids.tolist(), documents.names, strict=True))
        dropped = [number for number, name in names.items() if name in set(damage.documents)]
        rows = rows.take(~np.isin(rows.blocks.documents, dropped))
        broken = np.array([shard.row.file in damage.shards for shard in stored], bool)
        kept = np.unique(rows.in_shards(broken).blocks.documents).tolist()
        chosen = rewriting.with_whole_documents(broken, rows)
        gone = {index: stored[index] for index in np.flatnonzero(chosen).tolist()}
        new = rewriting.write_rows(
            folder,
            catalog.newest_shard(connection) + 1,
            rows.in_shards(chosen),
            {index: RawRows(folder / SHARDS, shard, meta) for index, shard in gone.items()},
            max(1, blocks.slots * vector_bytes(int(meta.made_by["width"]), meta.dtype)),
        )
        set_aside = _set_aside(
            folder, [shard for shard in stored if shard.row.file in damage.shards]
        )
        with connection:
            for name in damage.documents:
                state = document_rows.delete(connection, state, name)
            rewriting.exchange(connection, [*gone.values()], new)
            catalog.write_state(connection, catalog.recounted(connection, state).committed())
        leftovers.clear(folder, connection)
    return Repaired(
        [*before.problems, *damage.problems],
        [*before.set_aside, *set_aside],
        [names[number] for number in kept],
        damage.documents,
    )


def examine(folder: Path) -> verify.Damage:
    """Return the damage of a bank whose catalog is intact.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    damage = verify.examine(folder)
    if damage.catalog:
        raise BankError(damage.problems[0])
    return damage


def lost_documents(folder: Path) -> list[Lost]:
    """Return the documents of a bank that have lost a part, in reading order.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    names = set(examine(folder).documents)
    with catalog.connect(folder) as connection:
        _, state = catalog_rows.read_meta(folder, connection)
        documents = catalog_rows.read_documents(folder, connection, state)
        return [
            Lost(
                name,
                documents.digests[index],
                verify.sound_text(folder, connection, documents, index),
                catalog_rows.pages_of(documents.pages[index]),
            )
            for index, name in enumerate(documents.names)
            if name in names
        ]


def _set_aside(folder: Path, damaged: Sequence[StoredShard]) -> list[str]:
    """Give damaged files a second name that no writer clears; returns the names.

    They keep their first names until the commit, because the catalog names them until then.
    """
    names = []
    for shard in damaged:
        path = folder / SHARDS / shard.row.file
        aside = path.with_name(path.name + DAMAGED)
        if path.is_file():
            aside.unlink(missing_ok=True)
            link(path, aside)
            names.append(f"{SHARDS}/{aside.name}")
    sync_folder(folder / SHARDS)
    return names

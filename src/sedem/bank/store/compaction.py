"""Compact a bank: move the blocks of the remaining documents to new shards, and free the rest.

One SQLite transaction replaces old shards with new ones, so a crash leaves the bank unchanged or
compacted. Files that are no longer named are removed later, by this process or the next writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sedem.bank.store import catalog, catalog_rows, leftovers, rewriting
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.shard import SHARDS, Maps, Shard, check_size
from sedem.durable_files import folder_bytes
from sedem.quantization import vector_bytes


@dataclass(frozen=True)
class Compacted:
    """The result of compacting a bank.

    Attributes:
        bytes_before: bytes of all files of the bank before compaction.
        bytes_after: the same, after it.
        shards_before: shards of the bank before compaction.
        shards_after: the same, after it.
    """

    bytes_before: int
    bytes_after: int
    shards_before: int
    shards_after: int


def compact(
    folder: Path, fetch: Callable[[catalog.ShardRow], object] = lambda row: None
) -> Compacted:
    """Compact a bank whose lock is held.

    Args:
        folder: the bank's folder.
        fetch: called with each shard to be rewritten, whose file may not exist yet.

    Raises:
        BankError: it is damaged; the message names the block. The bank is unchanged.
    """
    size = folder_bytes(folder)
    with catalog.connect(folder) as connection:
        meta, state = catalog_rows.read_meta(folder, connection)
        documents = catalog_rows.read_documents(folder, connection, state)
        stored = catalog_rows.read_shards(folder, connection, state)
        stored, blocks, places_N2 = catalog_rows.live_blocks(folder, documents, stored)
        rows = rewriting.rows_of(stored, documents.ids, blocks, places_N2)
        chosen = _worth_rewriting(stored, rows)
        width = int(meta.made_by["width"])
        maps = Maps(limit=1)
        sources = {
            index: Shard(folder / SHARDS, stored[index], width, meta.dtype, maps)
            for index in np.flatnonzero(chosen).tolist()
        }
        for source in (sources[index] for index in np.intersect1d([*sources], rows.shards)):
            fetch(source.stored.row)
            check_size(source.path, source.stored.row.size)
        new = rewriting.write_rows(
            folder,
            catalog.newest_shard(connection) + 1,
            rows.in_shards(chosen),
            sources,
            max(1, blocks.slots * vector_bytes(width, meta.dtype)),
        )
        with connection:
            rewriting.exchange(connection, [stored[index] for index in sources], new)
            catalog.forget_removed(connection)
            catalog.write_state(connection, catalog.recounted(connection, state).committed())
        leftovers.clear(folder, connection)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    after = len(stored) - len(sources) + len(new)
    return Compacted(size, folder_bytes(folder), len(stored), after)


def _worth_rewriting(stored: Sequence[StoredShard], rows: rewriting.Rows) -> NDArray[np.bool_]:
    """Mark the shards that hold rows of removed documents or can be merged with others."""
    live = np.bincount(rows.shards, minlength=len(stored))
    removed = np.array([len(s.checksums) for s in stored], np.int64) > live
    small = np.array([s.row.size for s in stored], np.int64) < rewriting.SHARD_BYTES // 2
    chosen = removed | small | (live == 0)
    if chosen.sum() == 1 and not removed.any() and live.all():
        return np.zeros(len(stored), bool)
    return rewriting.with_whole_documents(chosen, rows)

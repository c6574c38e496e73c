"""Write existing blocks of a bank into new shards; compaction and repair use this.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks, Piece
from sedem.bank.store import catalog
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.shard import SHARDS, write_shard
from sedem.quantization import join

SHARD_BYTES = 2**26
"""Bytes of memory per shard, so that copying needs little RAM; a larger block gets its own."""


@dataclass(frozen=True)
class NewShard:
    """A shard that was written but that no table names yet.

    Attributes:
        row: the file.
        columns: the columns of its rows, for `catalog.insert_shard`.
    """

    row: catalog.ShardRow
    columns: Sequence[bytes]


@dataclass(frozen=True, eq=False)
class Rows:
    """Blocks of a bank and where their memory is.

    Attributes:
        blocks: the blocks, in reading order; `documents` are ids.
        shards: index of each block's shard `[N]`.
        rows: row of each block in its shard `[N]`.
        checksums: CRC-32 of each block's memory `[N]`.
    """

    blocks: Blocks
    shards: NDArray[np.int64]
    rows: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, indices: NDArray[Any] | slice) -> Rows:
        """Select blocks by indices, by a slice or by a boolean mask."""
        columns = (self.shards[indices], self.rows[indices], self.checksums[indices])
        return Rows(self.blocks.take(indices), *columns)

    def in_shards(self, chosen: NDArray[np.bool_]) -> Rows:
        """Return the blocks of the shards where a mask is True."""
        return self.take(chosen[self.shards])


def rows_of(
    stored: Sequence[StoredShard], ids: NDArray[np.int64], blocks: Blocks, places_N2: NDArray[Any]
) -> Rows:
    """Combine the results of `catalog_rows.live_blocks`; `ids` are the document ids."""
    counts = [len(shard.checksums) for shard in stored]
    firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    checksums = np.concatenate([np.zeros(0, np.uint32), *(s.checksums for s in stored)])
    shards_N, rows_N = places_N2[:, 0], places_N2[:, 1]
    blocks = blocks.of_documents(ids[blocks.documents])
    return Rows(blocks, shards_N, rows_N, checksums[firsts[shards_N] + rows_N])


def with_whole_documents(chosen: NDArray[np.bool_], rows: Rows) -> NDArray[np.bool_]:
    """Also choose each shard that has a document in common with a chosen one.

    Blocks of a document are in the order of their shards, and rewritten shards come last.
    """
    while True:
        documents = np.unique(rows.in_shards(chosen).blocks.documents)
        more = chosen.copy()
        more[rows.shards[np.isin(rows.blocks.documents, documents)]] = True
        if (more == chosen).all():
            return chosen
        chosen = more


def write_rows(
    folder: Path, first: int, rows: Rows, sources: Mapping[int, Piece], block_bytes: int
) -> list[NewShard]:
    """Write blocks into new shards, which no table names yet.

    Args:
        folder: the bank's folder.
        first: number of the first new shard.
        rows: the blocks.
        sources: the memory of each shard by its index; it verifies checksums.
        block_bytes: bytes of the memory of a block.

    Raises:
        BankError: a block is damaged; what was written is removed.
    """
    written: list[NewShard] = []
    at_once = max(1, SHARD_BYTES // block_bytes)
    name = ""
    try:
        for start in range(0, len(rows), at_once):
            part = rows.take(slice(start, start + at_once))
            name = f"{first + len(written):06d}.safetensors"
            taken = [sources[shard].take(numbers) for shard, numbers in _runs(part)]
            size, digest = write_shard(folder / SHARDS, name, join(taken))
            columns = catalog.shard_columns(part.blocks, part.checksums)
            written.append(NewShard(catalog.ShardRow(name, len(part), size, digest), columns))
    except BaseException:
        for left in (name, *(shard.row.file for shard in written)):
            if left:
                (folder / SHARDS / left).unlink(missing_ok=True)
        raise
    return written


def exchange(
    connection: sqlite3.Connection, gone: Sequence[StoredShard], new: Sequence[NewShard]
) -> None:
    """Replace shards with new ones in the catalog.

    Args:
        connection: inside a transaction.
        gone: the shards whose blocks were rewritten or dropped.
        new: the shards that hold them now.
    """
    connection.executemany("DELETE FROM shards WHERE id = ?", [(shard.id,) for shard in gone])
    for shard in new:
        catalog.insert_shard(connection, shard.row, shard.columns)


def _runs(rows: Rows) -> Iterator[tuple[int, list[int]]]:
    """Yield the shard and the rows of each run of neighbours in the same shard."""
    places = zip(rows.shards.tolist(), rows.rows.tolist(), strict=True)
    for shard, run in groupby(places, key=lambda place: place[0]):
        yield shard, [row for _, row in run]

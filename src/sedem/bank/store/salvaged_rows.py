"""Move the rows of a damaged catalog to a new one, and report what is missing.

Letters: N blocks, J slots of a block.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from sedem.bank.blocks import Blocks
from sedem.bank.store import catalog, catalog_rows, sqlite_pages, verify
from sedem.bank.store.catalog import TABLES, ShardRow
from sedem.bank.store.catalog_rows import DocumentRows, StoredShard
from sedem.bank.store.checksums import State, Sum, row_checksum
from sedem.bank.store.document_rows import REMOVED, UNFINISHED
from sedem.bank.store.shard import MEMORY, SCALES, SHARDS
from sedem.bank.store.tensor_files import open_tensors, read_vectors
from sedem.errors import DamagedCatalogError

_SHOWN = 40
"""Characters of a text that identify it in a message."""
_TABLES = {3: ("meta", 2), 10: ("shards", 5), 7: ("documents", 6), 5: ("texts", 3)}
"""The table of a row and the index of its checksum, by the number of its columns."""


def insert_rows(file: Path, connection: sqlite3.Connection) -> None:
    """Insert each row of a damaged catalog that matches its checksum.

    Raises:
        DamagedCatalogError: two rows have the same id.
    """
    for number, columns in sqlite_pages.rows(file):
        if len(columns) not in _TABLES:
            continue
        table, at = _TABLES[len(columns)]
        crc = columns[at]
        values: list[Any] = [*columns[:at], *columns[at + 1 :]]
        if table != "meta":
            values[0] = number
        checked = values[1:] if table == "texts" else values
        plain = all(isinstance(value, str | int | bytes) for value in checked)
        if not plain or row_checksum(*checked) != crc:
            continue
        row = [*values[:at], crc, *values[at:]]
        marks = ", ".join("?" * len(row))
        if not connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row).rowcount:
            raise DamagedCatalogError(f"table '{table}' has two rows {values[0]!a}")


def complete(folder: Path, connection: sqlite3.Connection) -> list[str]:
    """Make a complete catalog from the rows that were found; returns what is lost.

    Raises:
        DamagedCatalogError: there are too few rows, or they are from different commits.
    """
    keys = {key for (key,) in connection.execute("SELECT key FROM meta")}
    if "schema_version" not in keys:
        raise DamagedCatalogError("its format is lost")
    known = catalog.STATE in keys
    if not known:
        catalog.write_state(connection, State(0, dict.fromkeys(TABLES, Sum())))
    _, wanted = catalog_rows.read_meta(folder, connection)
    state = catalog.recounted(connection, wanted)
    missing = {
        table: wanted.sums[table].count - state.sums[table].count if known else 0
        for table in TABLES
    }
    if known and (odd := [table for table in TABLES if not _fits(wanted, state, table)]):
        raise DamagedCatalogError(f"rows of table '{odd[0]}' are of another commit")
    problems = [
        f"{count:,} of {wanted.sums[table].count:,} rows of table '{table}' are lost"
        for table, count in missing.items()
        if count
    ]
    if not known:
        problems.append("more may be lost: the row counts are lost too")
    documents = catalog_rows.read_documents(folder, connection, state)
    shards = catalog_rows.read_shards(folder, connection, state)
    problems += _forget_nameless(connection, documents, shards)
    _count_on(folder, connection)
    if missing["shards"] or not known:
        state = catalog.recounted(connection, state)
        documents = catalog_rows.read_documents(folder, connection, state)
        problems += _list_lost(folder, connection, documents, shards)
        problems += _drop_unfinished(connection)
    catalog.write_state(connection, catalog.recounted(connection, state).committed())
    return problems


def _fits(wanted: State, found: State, table: str) -> bool:
    """Whether missing rows can explain the difference between a table's sums."""
    more = wanted.sums[table].count - found.sums[table].count
    total = wanted.sums[table].total - found.sums[table].total
    return 0 <= total < more * 2**32 if more > 0 else (more, total) == (0, 0)


def _forget_nameless(
    connection: sqlite3.Connection, documents: DocumentRows, shards: Sequence[StoredShard]
) -> list[str]:
    """Mark documents as removed whose blocks are known but whose names are lost."""
    named = [np.unique(shard.blocks.documents) for shard in shards]
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *named]))
    problems = []
    for number in np.setdiff1d(every, documents.all_ids).tolist():
        _insert_removed(connection, number)
        found = connection.execute(
            "SELECT substr(text, 1, ?) FROM texts WHERE document = ? AND start = 0",
            (_SHOWN, number),
        ).fetchone()
        text = f" (its text begins with {found[0]!a})" if found else ""
        problems.append(
            f"document {number}{text} is lost with its name, unless it had been removed before"
        )
    return problems


def _insert_removed(connection: sqlite3.Connection, number: int) -> None:
    row = (number, "", 0, catalog.text_digest(""), REMOVED, b"")
    connection.execute(
        "INSERT INTO documents (id, name, characters, sha256, removed, pages, crc32) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*row, row_checksum(*row)),
    )


def _list_lost(
    folder: Path,
    connection: sqlite3.Connection,
    documents: DocumentRows,
    shards: Sequence[StoredShard],
) -> list[str]:
    """List documents with unknown blocks in a shard that does not exist."""
    shards, blocks, _ = catalog_rows.live_blocks(folder, documents, shards)
    lost = [
        index
        for index in range(len(documents.ids))
        if _lacks_blocks(folder, connection, documents, index, blocks)
    ]
    slots = next((shard.blocks.slots for shard in shards if len(shard.blocks)), 0)
    slots = slots or _slots_on_disk(folder)
    ids = documents.ids[lost]
    if slots and lost:
        starts, tokens = np.zeros(len(lost), np.int64), np.ones((len(lost), slots), np.uint8)
        columns = Blocks(ids, starts, documents.characters[lost], tokens)
        row = ShardRow(f"{catalog.newest_shard(connection) + 1:06d}.safetensors", len(lost), 0, "")
        catalog.insert_shard(connection, row, catalog.shard_columns(columns, [0] * len(lost)))
    else:
        _count_as_removed(connection, ids.tolist())
    return [
        f"some memory of '{documents.names[index]}' cannot be located any more" for index in lost
    ]


def _lacks_blocks(
    folder: Path,
    connection: sqlite3.Connection,
    documents: DocumentRows,
    index: int,
    blocks: Blocks,
) -> bool:
    """Whether a part of a text, other than white space, is in none of its blocks."""
    own = blocks.take(blocks.documents == index)
    end, gaps = 0, []
    for start, after in zip(own.starts.tolist(), own.ends.tolist(), strict=True):
        gaps.append((end, start))
        end = max(end, after)
    gaps.append((end, int(documents.characters[index])))
    gaps = [(start, after) for start, after in gaps if start < after]
    if not gaps:
        return False
    text = verify.sound_text(folder, connection, documents, index)
    return text is None or any(text[start:after].strip() for start, after in gaps)


def _slots_on_disk(folder: Path) -> int:
    """Slots per block, from the first shard that can be read; 0 if there is none."""
    for path in _shards(folder):
        with suppress(SafetensorError, OSError), open_tensors(path) as file:
            return int(read_vectors(file, MEMORY, SCALES).values.shape[1])
    return 0


def _drop_unfinished(connection: sqlite3.Connection) -> list[str]:
    """Mark documents as removed whose build was interrupted: parts of them may be lost."""
    found = connection.execute(
        "SELECT id, name FROM documents WHERE removed = ?", (UNFINISHED,)
    ).fetchall()
    _count_as_removed(connection, [number for number, _ in found])
    return [f"the unfinished build of '{name}' is lost; build it again" for _, name in found]


def _count_as_removed(connection: sqlite3.Connection, ids: Sequence[int]) -> None:
    for number in ids:
        (row,) = connection.execute(
            "SELECT id, name, characters, sha256, ?, pages FROM documents WHERE id = ?",
            (REMOVED, number),
        )
        connection.execute(
            "UPDATE documents SET removed = ?, crc32 = ? WHERE id = ?",
            (REMOVED, row_checksum(*row), number),
        )


def _shards(folder: Path) -> list[Path]:
    """Return all files of shards, whether a table names them or not."""
    return sorted((folder / SHARDS).glob("*.safetensors"))


def _count_on(folder: Path, connection: sqlite3.Connection) -> None:
    """Ensure that no shard gets a number that a lost row may have had."""
    stems = [path.stem for path in _shards(folder) if re.fullmatch(r"\d{6,18}", path.stem)]
    newest = max([catalog.newest_shard(connection), *map(int, stems)])
    changed = connection.execute(
        "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'shards'", (newest,)
    )
    if not changed.rowcount:
        connection.execute("INSERT INTO sqlite_sequence VALUES ('shards', ?)", (newest,))

"""Read the tables of a catalog: a row that does not match its checksum is never used.

A catalog may be untrusted, so everything that other modules rely on is checked here too.

Letters: N blocks, J slots of a block.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks
from sedem.bank.store.catalog import FORMATS, STATE, TABLES, TEXT_PIECE, ShardRow
from sedem.bank.store.checksums import State, Sum, row_checksum
from sedem.bank.store.interface import Meta
from sedem.errors import BankError, DamagedCatalogError
from sedem.quantization import DTYPES
from sedem.types import are_pages

OLD_FORMATS = ("1", "2")
_SHARD_FILE = re.compile(r"\d{6,}\.safetensors")


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The documents of a bank, in reading order.

    Attributes:
        ids: their ids `[n]`, in ascending order.
        names: their names.
        digests: SHA-256 of their texts.
        characters: lengths of their texts `[n]`.
        pages: first character of each page of each text, as stored; `pages_of` decodes it.
        all_ids: ids of these and of removed documents, in ascending order.
    """

    ids: NDArray[np.int64]
    names: list[str]
    digests: list[str]
    characters: NDArray[np.int64]
    pages: list[bytes]
    all_ids: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StoredShard:
    """A shard and its rows according to the catalog.

    Attributes:
        id: its number.
        row: file, size and digest.
        blocks: its rows; `documents` are ids of documents, including removed ones.
        checksums: CRC-32 of each row's memory `[N]`.
        crc32: checksum of all of this.
    """

    id: int
    row: ShardRow
    blocks: Blocks
    checksums: NDArray[np.uint32]
    crc32: int


def read_meta(folder: Path, connection: sqlite3.Connection) -> tuple[Meta, State]:
    """Return the bank-wide metadata and the state of the tables.

    Raises:
        BankError: the format is unknown, or an entry is missing or damaged.
    """
    version = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    found = None if version is None else version[0]
    if found not in FORMATS.values():
        again = "; build it again with 'sedem build'" if found in OLD_FORMATS else ""
        raise BankError(
            f"bank '{folder}' has format {found!a}, this sedem reads "
            f"{' and '.join(FORMATS.values())}"
            f"{again or '; use the sedem that wrote it or build it again'}"
        )
    rows = connection.execute("SELECT key, value, crc32 FROM meta").fetchall()
    for key, value, crc in rows:
        _check(folder, f"its entry {key!a}", crc, key, value)
    meta = {key: value for key, value, _ in rows}
    if missing := {"fingerprint", "made_by", "dtype", STATE} - meta.keys():
        raise damaged(folder, f"it lacks its {min(missing)}")
    if meta["dtype"] not in DTYPES:
        raise BankError(
            f"bank '{folder}' stores its slots as '{meta['dtype']}', this sedem reads "
            f"{', '.join(DTYPES)}; use the sedem that wrote it or build it again"
        )
    made_by = _json_object(folder, "made_by", meta["made_by"])
    width = made_by.get("width")
    if not isinstance(width, int) or width < 1:
        raise damaged(folder, f"its made_by has the width {width!a}, not a whole number above 0")
    state = _json_object(folder, STATE, meta[STATE])
    try:
        sums = {table: Sum(*map(int, state[table])) for table in TABLES}
        about = Meta(meta["fingerprint"], made_by, meta["dtype"], found == FORMATS[True])
        return about, State(int(state["commit"]), sums)
    except (KeyError, TypeError, ValueError):
        raise damaged(folder, f"its {STATE} is malformed") from None


def read_documents(folder: Path, connection: sqlite3.Connection, state: State) -> DocumentRows:
    """Return the documents of a bank, without their texts.

    Raises:
        BankError: a row is damaged, or some are missing.
    """
    ids, all_ids, names, digests, characters, checksums = [], [], [], [], [], []
    all_pages = []
    for number, name, length, sha256, removed, pages, crc in connection.execute(
        "SELECT id, name, characters, sha256, removed, pages, crc32 FROM documents ORDER BY id"
    ):
        _check(folder, f"document {number!a}", crc, number, name, length, sha256, removed, pages)
        if not isinstance(pages, bytes) or len(pages) % 8 or not are_pages(pages_of(pages), length):
            raise damaged(folder, f"the pages of document {number!a} lie outside its text")
        checksums.append(crc)
        all_ids.append(number)
        if not removed:
            ids.append(number)
            names.append(name)
            digests.append(sha256)
            characters.append(length)
            all_pages.append(pages)
    _check_sum(folder, state, "documents", checksums)
    if len(set(names)) < len(names):
        raise damaged(folder, "two documents have the same name")
    as_numbers = (np.array(values, np.int64) for values in (ids, characters, all_ids))
    ids_n, characters_n, all_ids_n = as_numbers
    return DocumentRows(ids_n, names, digests, characters_n, all_pages, all_ids_n)


def pages_of(stored: bytes) -> tuple[int, ...]:
    """Decode the first characters of a document's pages."""
    return tuple(np.frombuffer(stored, "<i8").tolist())


def read_shards(
    folder: Path,
    connection: sqlite3.Connection,
    state: State,
    known: Mapping[int, StoredShard] | None = None,
) -> list[StoredShard]:
    """Return all shards, the oldest first.

    Args:
        folder: the bank's folder, for messages.
        connection: connection to its catalog.
        state: state of its tables.
        known: shards that were read before, by id; unchanged ones are not read again.

    Raises:
        BankError: a row is damaged, contradicts itself or names a file outside the bank.
    """
    known = known or {}
    listed = connection.execute("SELECT id, crc32 FROM shards ORDER BY id").fetchall()
    _check_sum(folder, state, "shards", [crc for _, crc in listed])
    found = []
    for number, crc in listed:
        old = known.get(number)
        if old is None or old.crc32 != crc:
            old = read_shard(folder, connection, number)
        found.append(old)
    slots = {shard.blocks.slots for shard in found if len(shard.blocks)}
    if len(slots) > 1:
        raise damaged(folder, f"its blocks have {' and '.join(map(str, sorted(slots)))} slots")
    return found


def live_blocks(
    folder: Path, documents: DocumentRows, shards: Sequence[StoredShard]
) -> tuple[list[StoredShard], Blocks, NDArray[np.int64]]:
    """Return the blocks of documents that were not removed, in reading order, and their places.

    Args:
        folder: the bank's folder, for messages.
        documents: its documents.
        shards: its shards.

    Returns:
        The same shards, which now share columns with the blocks; the blocks, whose `documents` are
        indices into `documents.ids`; the shard and row of each block `[N, 2]`.

    Raises:
        BankError: a block has no document, or lies outside its text.
    """
    blocks = Blocks.join([shard.blocks for shard in shards])
    if not len(blocks):
        return [*shards], blocks, np.zeros((0, 2), np.int64)
    counts = [len(shard.blocks) for shard in shards]
    ends = np.cumsum(counts).tolist()
    shards = [
        replace(shard, blocks=blocks.take(slice(end - count, end)))
        for shard, count, end in zip(shards, counts, ends, strict=True)
    ]
    rows_N = np.concatenate([np.arange(count) for count in counts])
    places_N2 = np.stack([np.repeat(np.arange(len(shards)), counts), rows_N], axis=1)
    _, known_N = _find(documents.all_ids, blocks.documents)
    if not known_N.all():
        shard, row = places_N2[known_N.argmin()]
        raise damaged(folder, f"row {row} of '{shards[shard].row.file}' has no document")
    index_N, live_N = _find(documents.ids, blocks.documents)
    blocks = blocks.of_documents(index_N)
    if not live_N.all():
        blocks, places_N2 = blocks.take(live_N), places_N2[live_N]
    if (np.diff(blocks.documents) < 0).any():
        order_N = np.argsort(blocks.documents, kind="stable")
        blocks, places_N2 = blocks.take(order_N), places_N2[order_N]
    outside_N = (
        (blocks.starts < 0)
        | (blocks.starts > blocks.ends)
        | (blocks.ends > documents.characters[blocks.documents])
    )
    if outside_N.any():
        name = documents.names[int(blocks.documents[outside_N.argmax()])]
        raise damaged(folder, f"a block of document '{name}' lies outside its text")
    return shards, blocks, places_N2


def _find(ids: NDArray[np.int64], wanted_N: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return indices `[N]` of ids in a sorted array, and whether each id is in it `[N]`."""
    if not len(ids):
        return np.zeros_like(wanted_N), np.zeros(len(wanted_N), bool)
    index_N = np.searchsorted(ids, wanted_N).clip(max=len(ids) - 1)
    return index_N, ids[index_N] == wanted_N


def read_text(
    folder: Path, connection: sqlite3.Connection, document: int, start: int, end: int
) -> str:
    """Return a span of a document's text.

    Raises:
        BankError: a piece of it is damaged or missing, or the bank was compacted in between.
    """
    rows = connection.execute(
        "SELECT start, crc32, text FROM texts WHERE document = ? AND start BETWEEN ? AND ? "
        "ORDER BY start",
        (document, start - start % TEXT_PIECE, max(start, end - 1)),
    ).fetchall()
    for at, crc, text in rows:
        _check(folder, f"the text of document {document}", crc, document, at, text)
    text = "".join(text for _, _, text in rows)
    first = rows[0][0] if rows else 0
    found = text[start - first : end - first]
    if len(found) != end - start:
        raise BankError(
            f"the text of document {document} is not in bank '{folder}' any more; open the bank "
            "again if it was compacted, else restore it or build again"
        )
    return found


def damaged(folder: Path, reason: str) -> DamagedCatalogError:
    """Return the error for a damaged catalog."""
    return DamagedCatalogError(
        f"the catalog of bank '{folder}' is damaged: {reason}; restore it, or keep what can be "
        "read of it with 'sedem bank verify --repair'"
    )


def read_shard(folder: Path, connection: sqlite3.Connection, number: int) -> StoredShard:
    """Return a shard by its id; errors as in `read_shards`."""
    row = connection.execute(
        "SELECT file, blocks, bytes, sha256, documents, spans, slot_tokens, checksums, crc32 "
        "FROM shards WHERE id = ?",
        (number,),
    ).fetchone()
    _check(folder, f"shard {number!a}", row[-1], number, *row[:-1])
    file, count, size, sha256, documents, spans, slot_tokens, checksums, crc = row
    # A name that contains a path could point outside the bank.
    if not _SHARD_FILE.fullmatch(str(file)):
        raise damaged(folder, f"it names a shard {file!a}")
    fits = (
        all(isinstance(column, bytes) for column in row[4:8])
        and isinstance(count, int)
        and count >= 0
        and len(documents) == 8 * count
        and len(spans) == 16 * count
        and len(checksums) == 4 * count
        and len(slot_tokens) % max(count, 1) == 0
        and (not count or slot_tokens)
    )
    if not fits:
        raise damaged(folder, f"shard '{file}' has columns of unequal length")
    spans_N2 = np.frombuffer(spans, "<i8").reshape(-1, 2).astype(np.int64)
    slot_tokens_NJ = np.frombuffer(slot_tokens, np.uint8).reshape(count, -1 if count else 0)
    return StoredShard(
        number,
        ShardRow(file, count, size, sha256),
        Blocks(
            np.frombuffer(documents, "<i8").astype(np.int64),
            spans_N2[:, 0].copy(),
            spans_N2[:, 1].copy(),
            slot_tokens_NJ,
        ),
        np.frombuffer(checksums, "<u4").astype(np.uint32),
        crc,
    )


def _check(folder: Path, what: str, crc: object, *values: Any) -> None:
    plain = all(isinstance(value, str | int | bytes) for value in values)
    if not plain or row_checksum(*values) != crc:
        raise damaged(folder, f"{what} does not match its checksum")


def _check_sum(folder: Path, state: State, table: str, checksums: list[int]) -> None:
    if any(not isinstance(crc, int) for crc in checksums) or (
        Sum().plus(checksums) != state.sums[table]
    ):
        raise damaged(folder, f"rows of its table '{table}' are missing, or older ones are back")


def _json_object(folder: Path, entry: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise damaged(folder, f"its {entry} is not a JSON object")
    return found

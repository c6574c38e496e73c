"""The rows of documents and their texts in a catalog: adding them and changing their status.

`removed` of a document is `PRESENT`, `REMOVED`, or `UNFINISHED` while its parts are being appended.
Readers see only documents that are present.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np

from sedem.bank.blocks import Blocks
from sedem.bank.store.catalog import (
    TEXT_PIECE,
    ShardRow,
    insert_shard,
    shard_columns,
    text_digest,
)
from sedem.bank.store.checksums import State, row_checksum
from sedem.types import Document

PRESENT, REMOVED, UNFINISHED = 0, 1, 2


def insert(
    connection: sqlite3.Connection,
    state: State,
    shard: ShardRow,
    documents: Sequence[Document],
    blocks: Blocks,
    checksums: Sequence[int],
    texts: bool,
) -> State:
    """Add a shard with its documents and blocks; a document replaces one of the same name.

    Args:
        connection: inside a transaction.
        state: the state before the change.
        shard: the file that holds the blocks' memory, row by row.
        documents: names and texts.
        blocks: one for each row; `documents` are indices into the documents.
        checksums: CRC-32 of each row.
        texts: whether the texts are stored.

    Returns:
        The new state.
    """
    ids = []
    for document in documents:
        state = delete(connection, state, document.name)
        state = mark(connection, state, document.name, UNFINISHED, REMOVED)
    for document in documents:
        number, state = insert_document(connection, state, document)
        if texts:
            state = insert_text(connection, state, number, document.text)
        ids.append(number)
    numbered = blocks.of_documents(np.array(ids, np.int64)[blocks.documents])
    return add_shard(connection, state, shard, numbered, checksums)


def add_shard(
    connection: sqlite3.Connection,
    state: State,
    shard: ShardRow,
    blocks: Blocks,
    checksums: Sequence[int],
) -> State:
    """Add a shard; `documents` of its blocks are ids. Returns the new state."""
    crc = insert_shard(connection, shard, shard_columns(blocks, checksums))
    return state.with_sums(shards=state.sums["shards"].plus([crc]))


def insert_document(
    connection: sqlite3.Connection, state: State, document: Document, removed: int = PRESENT
) -> tuple[int, State]:
    """Add a document without its text; returns its id and the new state."""
    text, pages = document.text, np.array(document.pages, "<i8").tobytes()
    row = (document.name, len(text), text_digest(text), removed, pages)
    number = connection.execute(
        "INSERT INTO documents (name, characters, sha256, removed, pages, crc32) "
        "VALUES (?, ?, ?, ?, ?, 0)",
        row,
    ).lastrowid
    assert number is not None
    crc = row_checksum(number, *row)
    connection.execute("UPDATE documents SET crc32 = ? WHERE id = ?", (crc, number))
    return number, state.with_sums(documents=state.sums["documents"].plus([crc]))


def insert_text(connection: sqlite3.Connection, state: State, number: int, text: str) -> State:
    """Add the text of a document by its id; returns the new state."""
    rows = []
    for start in range(0, len(text), TEXT_PIECE):
        piece = text[start : start + TEXT_PIECE]
        rows.append((number, start, row_checksum(number, start, piece), piece))
    connection.executemany(
        "INSERT INTO texts (document, start, crc32, text) VALUES (?, ?, ?, ?)", rows
    )
    return state.with_sums(texts=state.sums["texts"].plus(crc for _, _, crc, _ in rows))


def delete(connection: sqlite3.Connection, state: State, name: str) -> State:
    """Mark a document as removed; its text and blocks stay until the bank is compacted.

    So a reader that opened the bank before keeps what it has opened.

    Returns:
        The new state; the same object if there is no document of that name.
    """
    return mark(connection, state, name, PRESENT, REMOVED)


def mark(connection: sqlite3.Connection, state: State, name: str, was: int, now: int) -> State:
    """Change the status of the documents with a name.

    Args:
        connection: inside a transaction.
        state: the state before the change.
        name: name of the documents.
        was: the current status; documents with another status are not changed.
        now: the new status.

    Returns:
        The new state; the same object if there is no such document.
    """
    found = connection.execute(
        "SELECT id, characters, sha256, pages, crc32 FROM documents WHERE name = ? AND removed = ?",
        (name, was),
    ).fetchall()
    documents = state.sums["documents"]
    for number, characters, sha256, pages, old in found:
        crc = row_checksum(number, name, characters, sha256, now, pages)
        connection.execute(
            "UPDATE documents SET removed = ?, crc32 = ? WHERE id = ?", (now, crc, number)
        )
        documents = documents.minus([old]).plus([crc])
    return state.with_sums(documents=documents) if found else state

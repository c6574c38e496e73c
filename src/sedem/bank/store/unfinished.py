"""Long documents are appended in parts, one commit each; readers see them after the last part.

The parts of an unfinished document stay in the bank until its build continues, until another text
of its name is appended, or until the bank is compacted.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sedem.bank.blocks import Blocks
from sedem.bank.store import catalog, catalog_rows, document_rows
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.document_rows import PRESENT, REMOVED, UNFINISHED
from sedem.bank.store.interface import check_fingerprint
from sedem.bank.store.local import LocalStore
from sedem.bank.store.opening import PlacedStore
from sedem.errors import BankError
from sedem.quantization import Quantized
from sedem.types import Document


@dataclass(frozen=True)
class StoredPart:
    """A part of a document that was not finished.

    Attributes:
        blocks: its blocks, in order.
        whole: whether its file exists and is unchanged; if not, the part has to be read again.
    """

    blocks: Blocks
    whole: bool


def stored_parts(store: PlacedStore, document: Document) -> list[StoredPart]:
    """Return the parts of an unfinished document, in order; the file of each part is verified.

    Args:
        store: the bank's store.
        document: its name and text; parts of another text are ignored.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    with store.at_hand() as folder, catalog.connect(folder) as connection:
        catalog_rows.read_meta(folder, connection)
        found = _find(folder, connection, document)[1]
    return [StoredPart(shard.blocks, store.is_whole(shard)) for shard in found]


def unfinished_documents(store: PlacedStore) -> list[str]:
    """Return the names of documents whose build was interrupted, in the order of their first part.

    Args:
        store: the bank's store.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    with store.at_hand() as folder, catalog.connect(folder) as connection:
        rows = connection.execute(
            "SELECT name FROM documents WHERE removed = ? ORDER BY id", (UNFINISHED,)
        ).fetchall()
    return [str(name) for (name,) in rows]


def append_part(
    store: PlacedStore,
    fingerprint: str,
    document: Document,
    blocks: Blocks,
    memory_NJD: Quantized,
    *,
    before: int,
    last: bool,
) -> None:
    """Append a part of a document in one commit; the last part makes the document visible.

    Args:
        store: the bank's store.
        fingerprint: hash of the model that made the memory.
        document: the whole document. Once visible, it replaces one of its name.
        blocks: blocks of the part; `Blocks.documents` are 0.
        memory_NJD: their memory, of any type.
        before: number of blocks in the earlier parts; 0 drops what an earlier build left.
        last: whether this is the last part.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: another process writes the bank or has changed the earlier parts, or the memory
            cannot be stored.
    """

    def append(local: LocalStore) -> None:
        with local.writing(), catalog.connect(local.folder) as connection:
            meta, state = catalog_rows.read_meta(local.folder, connection)
            check_fingerprint(str(local.folder), meta.fingerprint, fingerprint)
            number, parts = _find(local.folder, connection, document)
            stored = sum(len(part.blocks) for part in parts)
            if before and stored != before:
                raise _changed(local.folder, document, before, stored)
            shard, checksums = local.write_blocks(
                connection, [document], blocks, memory_NJD.cast(meta.dtype)
            )
            name = document.name
            with connection:
                if not before:
                    state = document_rows.mark(connection, state, name, UNFINISHED, REMOVED)
                    number, state = document_rows.insert_document(
                        connection, state, document, UNFINISHED
                    )
                numbered = blocks.of_documents(np.full(len(blocks), number, np.int64))
                state = document_rows.add_shard(connection, state, shard, numbered, checksums)
                if last:
                    state = document_rows.delete(connection, state, name)
                    state = document_rows.mark(connection, state, name, UNFINISHED, PRESENT)
                    if meta.texts:
                        state = document_rows.insert_text(connection, state, number, document.text)
                catalog.write_state(connection, state.committed())

    store.changing(append)


def replace_part(
    store: PlacedStore,
    fingerprint: str,
    document: Document,
    blocks: Blocks,
    memory_NJD: Quantized,
    index: int,
) -> None:
    """Rewrite a part whose file was lost or damaged, in place and in one commit.

    Args:
        store: the bank's store.
        fingerprint: hash of the model that made the memory.
        document: the whole document.
        blocks: blocks of the part, the same as before; `Blocks.documents` are 0.
        memory_NJD: their memory, of any type.
        index: index of the part among those that are stored.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: another process writes the bank or has changed the parts, or the memory cannot
            be stored.
    """

    def replace(local: LocalStore) -> None:
        with local.writing(), catalog.connect(local.folder) as connection:
            meta, state = catalog_rows.read_meta(local.folder, connection)
            check_fingerprint(str(local.folder), meta.fingerprint, fingerprint)
            _, parts = _find(local.folder, connection, document)
            if index >= len(parts) or parts[index].blocks.documents.shape != blocks.documents.shape:
                found = len(parts[index].blocks) if index < len(parts) else 0
                raise _changed(local.folder, document, len(blocks), found)
            old = parts[index]
            # Under its old name: after a crash before the commit the part still counts as lost.
            shard, checksums = local.write_blocks(
                connection, [document], blocks, memory_NJD.cast(meta.dtype), old.row.file
            )
            columns = catalog.shard_columns(old.blocks, checksums)
            with connection:
                crc = catalog.replace_shard(connection, old.id, shard, columns)
                sums = state.sums["shards"].minus([old.crc32]).plus([crc])
                catalog.write_state(connection, state.with_sums(shards=sums).committed())

    store.changing(replace)


def _changed(folder: Path, document: Document, before: int, now: int) -> BankError:
    return BankError(
        f"{before:,} blocks of '{document.name}' were in bank '{folder}', {now:,} are there now: "
        "another process has changed it; build again"
    )


def _find(
    folder: Path, connection: sqlite3.Connection, document: Document
) -> tuple[int, list[StoredShard]]:
    """Return the id and the parts of an unfinished document; 0 and no parts if there is none."""
    pages = np.array(document.pages, "<i8").tobytes()
    found = connection.execute(
        "SELECT id FROM documents WHERE name = ? AND sha256 = ? AND pages = ? AND removed = ?",
        (document.name, catalog.text_digest(document.text), pages, UNFINISHED),
    ).fetchone()
    if found is None:
        return 0, []
    number = int(found[0])
    # The shard of a part holds nothing else, so all its rows have the document of the first.
    shards = connection.execute(
        "SELECT id FROM shards WHERE substr(documents, 1, 8) = ? ORDER BY id",
        (number.to_bytes(8, "little"),),
    ).fetchall()
    return number, [catalog_rows.read_shard(folder, connection, one) for (one,) in shards]

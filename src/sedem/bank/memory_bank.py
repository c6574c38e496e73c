"""MemoryBank: documents that are read once and can be queried, changed and saved.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sedem.bank.blocks import BlockRow, Blocks, InMemory, Piece
from sedem.bank.documents import InMemoryDocuments, Source, unknown_document
from sedem.bank.snapshot import BankReader, Snapshot
from sedem.bank.store.compaction import Compacted
from sedem.bank.store.interface import Contents, Meta, Store
from sedem.bank.store.opening import store_at
from sedem.bank.store.shard import Check
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, check_dtype
from sedem.types import Document


class MemoryBank(BankReader):
    """The result of `SeDeM.read`: documents read once, to be queried any number of times.

    A change makes a new snapshot and replaces the current one with it. So threads may query the
    bank while another thread changes it.

    Args:
        fingerprint: hash of the model that made it; other models refuse the bank.
        made_by: the settings behind the fingerprint, for people: model, layers, T, C.
        documents: the texts, in reading order.
        blocks: the span behind each block, in reading order.
        pieces: the memory of all blocks, in parts, in block order.
        dtype: type of the stored slots: "bfloat16", "int8" or "fp8".

    Raises:
        BankError: the number of blocks is not the number of rows of memory.
    """

    def __init__(
        self,
        fingerprint: str,
        made_by: dict[str, Any],
        documents: Sequence[Document],
        blocks: Sequence[BlockRow],
        pieces: Sequence[Piece],
        *,
        dtype: str = BFLOAT16,
    ) -> None:
        places = [(p, row) for p, piece in enumerate(pieces) for row in range(len(piece))]
        if len(places) != len(blocks):
            raise BankError(f"the bank names {len(blocks)} blocks but has memory of {len(places)}")
        contents = Contents(
            Meta(fingerprint, made_by, dtype),
            InMemoryDocuments(documents),
            Blocks.of(blocks),
            [*pieces],
            np.array(places, np.int64).reshape(-1, 2),
        )
        self._start(Snapshot(contents))

    @classmethod
    def of(cls, snapshot: Snapshot) -> MemoryBank:
        """Return a bank that can be changed and starts as a snapshot."""
        bank = cls.__new__(cls)
        bank._start(snapshot)
        return bank

    def _start(self, snapshot: Snapshot) -> None:
        self._now = snapshot
        self._changing = threading.RLock()

    def snapshot(self) -> Snapshot:
        """Return the bank as it is now; later changes do not affect the result."""
        return self._now

    @property
    def store(self) -> Store | None:  # type: ignore[override]
        """Where the bank is kept; None while it is only in RAM."""
        return self._now.store

    def append(self, other: BankReader) -> None:
        """Add another bank's documents; each replaces a document of the same name.

        A document that the bank already has with the same text is kept. A stored bank is extended
        in its store, in one commit.

        Raises:
            BankMismatchError: another model made the other bank.
            NoTextError: the other bank holds no texts, and one cannot be read from its source.
        """
        other = other.snapshot()
        other.check_made_by(self.fingerprint)
        with self._changing:
            if self.store is not None:
                append_to(self.store, other)
                self.reload()
            else:
                self._now = Snapshot(_joined(self.contents, other))

    def remove(self, name: str) -> None:
        """Remove a document and its blocks.

        Raises:
            BankError: no document has that name.
        """
        with self._changing:
            if self.store is not None:
                self.store.remove(name)
                self.reload()
                return
            now = self.contents
            if name not in now.documents.names:
                raise unknown_document("the bank", name, now.documents.names)
            self._now = Snapshot(_without(now, {name}))

    def compact(self) -> Compacted:
        """Free the space of removed documents and merge small shards; answers do not change.

        Raises:
            BankError: the bank is only in RAM, another process writes it, or a block is damaged.
        """
        with self._changing:
            compact = getattr(self.store, "compact", None)
            if compact is None:
                raise BankError(
                    "only a bank in a folder or an object store can be compacted; save it to one"
                )
            report: Compacted = compact()
            self.reload()
            return report

    def cast(self, dtype: str) -> MemoryBank:
        """Return a copy in RAM with slots of another type.

        Raises:
            ConfigError: there is no such type.
        """
        now = self.snapshot()
        memory = now.stored(range(len(now))).cast(check_dtype(dtype)) if len(now) else None
        pieces = [] if memory is None else [InMemory(memory)]
        return MemoryBank(
            now.fingerprint, now.made_by, list(now.documents), now.blocks, pieces, dtype=dtype
        )

    def save(self, path: str | Path, dtype: str | None = None, *, no_text: bool = False) -> None:
        """Write the bank to a new folder; later changes are written there too.

        Args:
            path: the folder, or a place in an object store such as "s3://bucket/folder".
            dtype: type to store slots as: "bfloat16", "int8" or "fp8"; None keeps the current one.
                Documents appended later are stored the same way.
            no_text: keep the SHA-256 of each document's text instead of the text.

        Raises:
            BankError: something exists at that path.
            NoTextError: the bank holds no texts, and one cannot be read from its source.
            ConfigError: there is no such type.
        """
        self.save_to(store_at(path), dtype, no_text=no_text)

    def save_to(self, store: Store, dtype: str | None = None, *, no_text: bool = False) -> None:
        """Write the bank to a new store, as `save` does to a folder."""
        with self._changing:
            meta = self.contents.meta
            texts = meta.texts and not no_text
            meta = replace(meta, dtype=check_dtype(dtype or self.dtype), texts=texts)
            with store.creating(meta) as unfinished:
                if len(self):
                    append_to(unfinished, self.snapshot())
            self._now = Snapshot(store.open(), store)

    @classmethod
    def open(
        cls, path: str | Path, *, check: Check = "once", source: Source | None = None
    ) -> MemoryBank:
        """Open the bank in a folder; its memory is mapped, not read.

        Args:
            path: the folder, or a place in an object store such as "s3://bucket/folder". Memory in
                an object store is downloaded on first use.
            check: when a block's checksum is verified: on its first use ("once") or on every use
                ("always").
            source: reads texts that the bank does not hold, by document name, such as
                `sedem.data.documents.source_text`. A text is used only if its SHA-256 matches the
                one in the bank.

        Raises:
            BankError: there is no bank, or it is damaged.
        """
        return cls.open_from(store_at(path, check, source))

    @classmethod
    def open_from(cls, store: Store) -> MemoryBank:
        """Open the bank in a store, as `open` does in a folder."""
        return cls.of(Snapshot(store.open(), store))

    def reload(self, prepare: Callable[[Snapshot], None] = lambda snapshot: None) -> None:
        """Load what other processes have written since; a bank in RAM does not change.

        Only what is new is read.

        Args:
            prepare: called with the new snapshot before any reader of this bank sees it.
        """
        with self._changing:
            if self.store is not None:
                new = Snapshot(self.store.open(self.contents), self.store)
                prepare(new)
                self._now = new


def append_to(store: Store, bank: Snapshot) -> None:
    """Add the documents of a bank to a store, in one commit."""
    memory_NJD = bank.stored(range(len(bank)))
    store.append(bank.fingerprint, list(bank.documents), bank.blocks, memory_NJD)


def _joined(now: Contents, other: Snapshot) -> Contents:
    """Return the contents plus another bank's documents, except those already there."""
    index = {name: number for number, name in enumerate(now.documents.names)}
    same = {
        document.name
        for document in other.documents
        if document.name in index and now.documents[index[document.name]].text == document.text
    }
    added = _without(other.contents, same)
    now = _without(now, set(added.documents.names))
    pieces = added.pieces
    if added.meta.dtype != now.meta.dtype:
        pieces = [
            InMemory(piece.take(range(len(piece))).cast(now.meta.dtype)) for piece in added.pieces
        ]
    first_piece = np.array([[len(now.pieces), 0]])
    first_document = len(now.documents)
    moved = added.blocks.of_documents(added.blocks.documents + first_document)
    return replace(
        now,
        documents=InMemoryDocuments([*now.documents, *added.documents]),
        blocks=Blocks.join([now.blocks, moved]),
        pieces=[*now.pieces, *pieces],
        places=np.concatenate([now.places, added.places + first_piece]),
    )


def _without(now: Contents, names: set[str]) -> Contents:
    """Return the contents without some documents; the pieces keep their memory."""
    remaining = [i for i, name in enumerate(now.documents.names) if name not in names]
    if len(remaining) == len(now.documents):
        return now
    kept = np.isin(now.blocks.documents, remaining)
    blocks = now.blocks.take(kept)
    renumbered = np.searchsorted(remaining, blocks.documents).astype(np.int64)
    return replace(
        now,
        documents=InMemoryDocuments([now.documents[i] for i in remaining]),
        blocks=blocks.of_documents(renumbered),
        places=now.places[kept],
    )

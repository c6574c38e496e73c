"""MemoryBank: the blocks of some documents, their text, and the model that made them.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sedem.bank.blocks import BlockRow, InMemory, Piece, scan_ranges
from sedem.bank.store.interface import Meta, Store, check_fingerprint
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, Quantized, check_dtype, join, vector_bytes
from sedem.types import Citation, Document


@dataclass(eq=False)
class MemoryBank:
    """What `SeDeM.read` returns: documents read once, to be asked any number of times.

    Attributes:
        fingerprint: hash of the model that made it; other models refuse the bank.
        made_by: the settings behind the fingerprint, for people: model, layers, T, C.
        documents: the texts, in reading order.
        blocks: the span behind each block, in reading order.
        pieces: the memory of all blocks, in parts.
        places: piece and row of each block's memory; empty means one after the other.
        dtype: type of the stored slots: "bfloat16", "int8" or "fp8".
        store: where the bank is kept; None while it is only in RAM.
        version: increases with every change, so that data derived from the blocks can be dropped.
    """

    fingerprint: str
    made_by: dict[str, Any]
    documents: list[Document]
    blocks: list[BlockRow]
    pieces: list[Piece]
    places: list[tuple[int, int]] = field(default_factory=list)
    dtype: str = BFLOAT16
    store: Store | None = None
    version: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.places:
            self.places = [
                (p, row) for p, piece in enumerate(self.pieces) for row in range(len(piece))
            ]
        if len(self.places) != len(self.blocks):
            raise BankError(
                f"the bank names {len(self.blocks)} blocks but has memory of {len(self.places)}"
            )

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def path(self) -> Path | None:
        """Folder of a bank on local disk; None in RAM or in another store."""
        return self.store.folder if isinstance(self.store, LocalStore) else None

    @cached_property
    def tokens(self) -> int:
        """Tokens of all documents; cached, because every answer reports them."""
        return sum(sum(block.slot_tokens) for block in self.blocks)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots as stored, including scales and the padding of last blocks."""
        slots = len(self.blocks[0].slot_tokens) if self.blocks else 0
        return len(self) * slots * vector_bytes(int(self.made_by["width"]), self.dtype)

    def memory(self, indices: Sequence[int]) -> Tensor:
        """Memory of some blocks `[n, J, D]`, in the order of `indices`.

        It is bfloat16, or float32 if slots are stored as int8 or fp8.
        """
        return self.stored(indices).dequantize()

    def stored(self, indices: Sequence[int]) -> Quantized:
        """Memory of some blocks `[n, J, D]` in the stored type, in the order of `indices`."""
        by_piece: dict[int, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            piece, row = self.places[index]
            by_piece.setdefault(piece, []).append((position, row))
        if len(by_piece) <= 1:
            piece, rows = next(iter(by_piece.items()), (0, []))
            return self.pieces[piece].take([row for _, row in rows])
        parts = [self.pieces[p].take([row for _, row in rows]) for p, rows in by_piece.items()]
        positions = torch.tensor([position for rows in by_piece.values() for position, _ in rows])
        return join(parts)[positions.argsort()]

    def slot_tokens(self, indices: Sequence[int]) -> Tensor:
        """Number of real tokens behind each slot of some blocks `[n, J]`."""
        rows = b"".join(bytes(self.blocks[index].slot_tokens) for index in indices)
        # The catalog keeps a byte a slot too, and a tensor from bytes is a hundred times faster.
        counts = torch.frombuffer(bytearray(rows), dtype=torch.uint8) if rows else torch.zeros(0)
        return counts.long().view(len(indices), len(self.blocks[0].slot_tokens))

    def scan(self) -> Iterator[tuple[range, Tensor]]:
        """Yield the indices and memory of all blocks in order, a part at a time."""
        for indices in scan_ranges(len(self)):
            yield indices, self.memory(indices)

    def citation(self, index: int, rank: int, score: float) -> Citation:
        """Return the span behind a block as a citation."""
        block = self.blocks[index]
        name = self.documents[block.document].name
        return Citation(rank, name, block.start, block.end, score, self.block_text(index))

    def block_text(self, index: int) -> str:
        """Return the text behind a block."""
        block = self.blocks[index]
        return self.documents[block.document].text[block.start : block.end]

    def check_made_by(self, fingerprint: str) -> None:
        """Refuse to be used by another model.

        Raises:
            BankMismatchError: the fingerprints differ; the message names both.
        """
        check_fingerprint(str(self.path or "in memory"), self.fingerprint, fingerprint)

    def append(self, other: MemoryBank) -> None:
        """Add another bank's documents; each replaces a document of the same name.

        A stored bank is extended in its store, in one commit.

        Raises:
            BankMismatchError: another model made the other bank.
        """
        other.check_made_by(self.fingerprint)
        if self.store is not None:
            other._append_to(self.store)
            self._reload()
            return
        if other.dtype != self.dtype:
            other = other.cast(self.dtype)
        self._changed()
        self._drop({document.name for document in other.documents})
        first_document, first_piece = len(self.documents), len(self.pieces)
        self.documents += other.documents
        self.pieces += other.pieces
        self.places += [(first_piece + piece, row) for piece, row in other.places]
        self.blocks += [
            BlockRow(first_document + b.document, b.start, b.end, b.slot_tokens)
            for b in other.blocks
        ]

    def remove(self, name: str) -> None:
        """Remove a document and its blocks.

        Raises:
            BankError: no document has that name.
        """
        if self.store is not None:
            self.store.remove(name)
            self._reload()
        elif name not in {document.name for document in self.documents}:
            known = ", ".join(document.name for document in self.documents)
            raise BankError(f"the bank has no document '{name}'; it has {known or 'none'}")
        else:
            self._drop({name})

    def cast(self, dtype: str) -> MemoryBank:
        """Return a copy in RAM with slots of another type.

        Raises:
            ConfigError: there is no such type.
        """
        pieces: list[Piece] = [InMemory(self.stored(range(len(self))).cast(dtype))]
        return replace(
            self,
            documents=list(self.documents),
            blocks=list(self.blocks),
            pieces=pieces if self.blocks else [],
            places=[],
            dtype=check_dtype(dtype),
            store=None,
        )

    def save(self, path: str | Path, dtype: str | None = None) -> None:
        """Write the bank to a new folder; later changes are written there too.

        Args:
            path: the folder.
            dtype: type to store slots as: "bfloat16", "int8" or "fp8"; None keeps the present one.
                Documents appended later are stored the same way.

        Raises:
            BankError: something exists at that path.
            ConfigError: there is no such type.
        """
        self.save_to(LocalStore(Path(path)), dtype)

    def save_to(self, store: Store, dtype: str | None = None) -> None:
        """Write the bank to a new store, as `save` does to a folder."""
        meta = Meta(self.fingerprint, self.made_by, check_dtype(dtype or self.dtype))
        with store.creating(meta) as unfinished:
            if self.blocks:
                self._append_to(unfinished)
        self.store = store
        if meta.dtype != self.dtype:
            self._reload()

    @classmethod
    def open(cls, path: str | Path) -> MemoryBank:
        """Open the bank in a folder; its memory is mapped, not read.

        Raises:
            BankError: there is no bank, or it is damaged.
        """
        return cls.open_from(LocalStore(Path(path)))

    @classmethod
    def open_from(cls, store: Store) -> MemoryBank:
        """Open the bank in a store, as `open` does in a folder."""
        contents = store.open()
        return cls(
            contents.meta.fingerprint,
            contents.meta.made_by,
            [Document(name, text) for name, text in contents.documents],
            contents.blocks,
            contents.pieces,
            contents.places,
            contents.meta.dtype,
            store,
        )

    def _append_to(self, store: Store) -> None:
        memory_NJD = self.stored(range(len(self)))
        documents = [(document.name, document.text) for document in self.documents]
        store.append(self.fingerprint, documents, self.blocks, memory_NJD)

    def _reload(self) -> None:
        assert self.store is not None
        version = self.version
        self.__dict__.update(MemoryBank.open_from(self.store).__dict__)
        self.version = version
        self._changed()

    def _drop(self, names: set[str]) -> None:
        remaining = [i for i, document in enumerate(self.documents) if document.name not in names]
        if len(remaining) == len(self.documents):
            return
        self._changed()
        new_index = {old: new for new, old in enumerate(remaining)}
        block_indices = [i for i, block in enumerate(self.blocks) if block.document in new_index]
        self.places = [self.places[i] for i in block_indices]
        self.blocks = [
            BlockRow(new_index[b.document], b.start, b.end, b.slot_tokens)
            for b in (self.blocks[i] for i in block_indices)
        ]
        self.documents = [self.documents[i] for i in remaining]

    def _changed(self) -> None:
        """Invalidate data derived from the previous blocks."""
        self.version += 1
        self.__dict__.pop("tokens", None)

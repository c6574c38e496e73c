"""MemoryBank: the blocks of some documents, where they came from and which model made them.

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
    """What `SeDeM.read` returns: read once, asked any number of times.

    Attributes:
        fingerprint: of the model that made it; another model refuses it.
        made_by: the same for people: model, layers, T, C.
        documents: the texts, in reading order.
        blocks: where each block comes from.
        pieces: the memory.
        places: piece and row of each block.
        path: the folder it was opened from or saved to, None while only in RAM.
        dtype: what its slots are stored as: "bfloat16", "int8" or "fp8".
        version: counts changes of its documents, for what is derived from its blocks.
    """

    fingerprint: str
    made_by: dict[str, Any]
    documents: list[Document]
    blocks: list[BlockRow]
    pieces: list[Piece]
    places: list[tuple[int, int]] = field(default_factory=list)
    path: Path | None = None
    dtype: str = BFLOAT16
    version: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.places:
            self.places = [
                (p, row) for p, piece in enumerate(self.pieces) for row in range(len(piece))
            ]
        if len(self.places) != len(self.blocks):
            raise BankError(f"{len(self.blocks)} blocks are named, memory holds {len(self.places)}")

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all documents; added up once, for every answer tells it."""
        return sum(sum(block.slot_tokens) for block in self.blocks)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its slots as they are kept, scales and slots that pad a last block included."""
        slots = len(self.blocks[0].slot_tokens) if self.blocks else 0
        return len(self) * slots * vector_bytes(int(self.made_by["width"]), self.dtype)

    def memory(self, indices: Sequence[int]) -> Tensor:
        """Memory of some blocks `[n, J, D]`, in the order asked for.

        It is bfloat16, or float32 where slots are stored as int8 or fp8.
        """
        return self.stored(indices).dequantize()

    def stored(self, indices: Sequence[int]) -> Quantized:
        """Memory of some blocks `[n, J, D]` as it is stored, in the order asked for."""
        by_piece: dict[int, list[tuple[int, int]]] = {}
        for at, index in enumerate(indices):
            piece, row = self.places[index]
            by_piece.setdefault(piece, []).append((at, row))
        if len(by_piece) <= 1:
            piece, rows = next(iter(by_piece.items()), (0, []))
            return self.pieces[piece].take([row for _, row in rows])
        parts = [self.pieces[p].take([row for _, row in rows]) for p, rows in by_piece.items()]
        order = torch.tensor([at for rows in by_piece.values() for at, _ in rows])
        return join(parts)[order.argsort()]

    def slot_tokens(self, indices: Sequence[int]) -> Tensor:
        """Real tokens behind each slot of some blocks `[n, J]`."""
        rows = b"".join(bytes(self.blocks[index].slot_tokens) for index in indices)
        # A slot's tokens are a byte in the catalog too; bytes are a tensor a hundred times sooner.
        counts = torch.frombuffer(bytearray(rows), dtype=torch.uint8) if rows else torch.zeros(0)
        return counts.long().view(len(indices), len(self.blocks[0].slot_tokens))

    def scan(self) -> Iterator[tuple[range, Tensor]]:
        """All blocks in order, some at a time: their indices and their memory."""
        for indices in scan_ranges(len(self)):
            yield indices, self.memory(indices)

    def citation(self, index: int, rank: int, score: float) -> Citation:
        """The span behind a block."""
        block = self.blocks[index]
        document = self.documents[block.document]
        span = document.text[block.start : block.end]
        return Citation(rank, document.name, block.start, block.end, score, span)

    def check_made_by(self, fingerprint: str) -> None:
        """Refuse a bank of another model.

        Raises:
            BankMismatchError: with both fingerprints.
        """
        check_fingerprint(str(self.path or "in memory"), self.fingerprint, fingerprint)

    def append(self, other: MemoryBank) -> None:
        """Take in another bank's documents; one that has a name of this bank's replaces it.

        A bank that lies on disk is extended there, in one commit.

        Raises:
            BankMismatchError: another model made the other bank.
        """
        other.check_made_by(self.fingerprint)
        if self.path is not None:
            other._write(LocalStore(self.path))
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
        """Forget a document.

        Raises:
            BankError: it holds none of that name.
        """
        if self.path is not None:
            LocalStore(self.path).remove(name)
            self._reload()
        elif name not in {document.name for document in self.documents}:
            known = ", ".join(document.name for document in self.documents)
            raise BankError(f"the bank has no document '{name}'; it has {known or 'none'}")
        else:
            self._drop({name})

    def cast(self, dtype: str) -> MemoryBank:
        """The same bank in RAM with its slots stored as another type.

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
            path=None,
            dtype=check_dtype(dtype),
        )

    def save(self, path: str | Path, dtype: str | None = None) -> None:
        """Write the bank to a new folder and keep it open there.

        Args:
            path: the folder.
            dtype: what slots are stored as from now on, "bfloat16", "int8" or "fp8"; None means as
                they are. What is appended later is stored like them.

        Raises:
            BankError: something is there already.
            ConfigError: there is no such type.
        """
        folder = Path(path)
        meta = Meta(self.fingerprint, self.made_by, check_dtype(dtype or self.dtype))
        with LocalStore(folder).creating(meta) as unfinished:
            if self.blocks:
                self._write(unfinished)
        self.path = folder
        if meta.dtype != self.dtype:
            self._reload()

    @classmethod
    def open(cls, path: str | Path) -> MemoryBank:
        """Open a bank; its memory is mapped, not read.

        Raises:
            BankError: there is none, or it is damaged.
        """
        folder = Path(path)
        contents = LocalStore(folder).open()
        return cls(
            contents.meta.fingerprint,
            contents.meta.made_by,
            [Document(name, text) for name, text in contents.documents],
            contents.blocks,
            contents.pieces,
            contents.places,
            folder,
            contents.meta.dtype,
        )

    def _write(self, store: Store) -> None:
        memory_NJD = self.stored(range(len(self)))
        documents = [(document.name, document.text) for document in self.documents]
        store.append(self.fingerprint, documents, self.blocks, memory_NJD)

    def _reload(self) -> None:
        assert self.path is not None
        version = self.version
        self.__dict__.update(MemoryBank.open(self.path).__dict__)
        self.version = version
        self._changed()

    def _drop(self, names: set[str]) -> None:
        keep = [i for i, document in enumerate(self.documents) if document.name not in names]
        if len(keep) == len(self.documents):
            return
        self._changed()
        renumbered = {old: new for new, old in enumerate(keep)}
        alive = [i for i, block in enumerate(self.blocks) if block.document in renumbered]
        self.places = [self.places[i] for i in alive]
        self.blocks = [
            BlockRow(renumbered[b.document], b.start, b.end, b.slot_tokens)
            for b in (self.blocks[i] for i in alive)
        ]
        self.documents = [self.documents[i] for i in keep]

    def _changed(self) -> None:
        """Invalidate what was derived from the blocks as they were."""
        self.version += 1
        self.__dict__.pop("tokens", None)

"""The read interface of a bank, and a snapshot: the bank as of one commit.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.blocks import Blocks, Piece, scan_ranges
from sedem.bank.documents import Documents
from sedem.bank.store.interface import Contents, Store, check_fingerprint
from sedem.bank.store.local import LocalStore
from sedem.errors import NoTextError
from sedem.quantization import Quantized, join, quantize, vector_bytes
from sedem.types import Citation, page_of


class BankReader(ABC):
    """The read interface of a bank; each method reads one snapshot.

    Attributes:
        store: where the bank is kept; None while it is only in RAM.
    """

    store: Store | None

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the bank as it is now."""

    @property
    def contents(self) -> Contents:
        """Everything that the bank holds now."""
        return self.snapshot().contents

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.contents.blocks)

    @property
    def fingerprint(self) -> str:
        """Hash of the model that made the bank; other models refuse it."""
        return self.contents.meta.fingerprint

    @property
    def made_by(self) -> dict[str, Any]:
        """The settings behind the fingerprint, for people: model, layers, T, C."""
        return self.contents.meta.made_by

    @property
    def dtype(self) -> str:
        """Type of the stored slots: "bfloat16", "int8" or "fp8"."""
        return self.contents.meta.dtype

    @property
    def documents(self) -> Documents:
        """The documents, in reading order; a text is read when it is needed."""
        return self.contents.documents

    @property
    def blocks(self) -> Blocks:
        """The span behind each block, in reading order."""
        return self.contents.blocks

    @property
    def pieces(self) -> Sequence[Piece]:
        """The memory of all blocks, in parts."""
        return self.contents.pieces

    @property
    def places(self) -> NDArray[np.int64]:
        """Piece and row of each block's memory `[N, 2]`."""
        return self.contents.places

    @property
    def path(self) -> Path | None:
        """Folder of a bank on local disk; None in RAM or in another store."""
        return self.store.folder if isinstance(self.store, LocalStore) else None

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return self.snapshot().all_tokens

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots as stored, including scales and the padding of last blocks."""
        meta, blocks = self.contents.meta, self.contents.blocks
        return len(blocks) * blocks.slots * vector_bytes(int(meta.made_by["width"]), meta.dtype)

    def memory(self, indices: Sequence[int]) -> Tensor:
        """Memory of some blocks `[n, J, D]`, in the order of `indices`.

        It is bfloat16, or float32 if slots are stored as int8 or fp8.
        """
        return self.stored(indices).dequantize()

    def stored(self, indices: Sequence[int]) -> Quantized:
        """Memory of some blocks `[n, J, D]` in the stored type, in the order of `indices`."""
        now = self.contents
        if not now.pieces:
            none = torch.zeros(0, now.blocks.slots, int(now.meta.made_by["width"]))
            return quantize(none, now.meta.dtype)
        by_piece: dict[int, list[tuple[int, int]]] = {}
        for position, (piece, row) in enumerate(now.places[list(indices)].tolist()):
            by_piece.setdefault(piece, []).append((position, row))
        if len(by_piece) <= 1:
            piece, rows = next(iter(by_piece.items()), (0, []))
            return now.pieces[piece].take([row for _, row in rows])
        parts = [now.pieces[p].take([row for _, row in rows]) for p, rows in by_piece.items()]
        positions = torch.tensor([position for rows in by_piece.values() for position, _ in rows])
        return join(parts)[positions.argsort()]

    def slot_tokens(self, indices: Sequence[int]) -> Tensor:
        """Number of real tokens behind each slot of some blocks `[n, J]`."""
        rows_NJ = self.contents.blocks.slot_tokens
        if isinstance(indices, range):  # a slice avoids a list of a million numbers
            chosen_nJ = rows_NJ[indices.start : indices.stop : indices.step]
        else:
            chosen_nJ = rows_NJ[list(indices)]
        return torch.from_numpy(chosen_nJ.astype(np.int64))

    def scan(self) -> Iterator[tuple[range, Tensor]]:
        """Yield the indices and memory of all blocks in order, a part at a time."""
        now = self.snapshot()
        for indices in scan_ranges(len(now)):
            yield indices, now.memory(indices)

    def citation(self, index: int, rank: int, score: float) -> Citation:
        """Return the span behind a block as a citation."""
        now = self.contents
        block = now.blocks[index]
        try:
            text, note = now.documents.text(block.document, block.start, block.end), None
        except NoTextError as missing:
            text, note = "", str(missing)
        name = now.documents.names[block.document]
        page = page_of(now.documents.pages(block.document), block.start)
        return Citation(rank, name, block.start, block.end, score, text, page, note)

    def block_text(self, index: int) -> str:
        """Return the text behind a block.

        Raises:
            NoTextError: the bank does not hold it, and it cannot be read from its source.
        """
        now = self.contents
        block = now.blocks[index]
        return now.documents.text(block.document, block.start, block.end)

    def check_made_by(self, fingerprint: str) -> None:
        """Refuse use by another model.

        Raises:
            BankMismatchError: the fingerprints differ; the message names both.
        """
        check_fingerprint(str(self.store or "in memory"), self.fingerprint, fingerprint)


class Snapshot(BankReader):
    """An immutable view of a bank as of one commit; each answer uses one snapshot.

    Data derived from the blocks, such as keys, belongs to a snapshot and is dropped with it.

    Args:
        contents: everything that the bank holds.
        store: where it is kept; None while it is only in RAM.
    """

    def __init__(self, contents: Contents, store: Store | None = None) -> None:
        self._contents = contents
        self.store = store

    def snapshot(self) -> Snapshot:
        """Return this snapshot."""
        return self

    @property
    def contents(self) -> Contents:
        """Everything that the bank holds."""
        return self._contents

    def part(self, blocks: range) -> Snapshot:
        """Return consecutive blocks as a bank: its block 0 is block `blocks.start` of this one.

        Documents keep their indices, even those without a block in it.
        """
        rows = slice(blocks.start, blocks.stop)
        now = self.contents
        part = replace(now, blocks=now.blocks.take(rows), places=now.places[rows])
        return Snapshot(part, self.store)

    @cached_property
    def all_tokens(self) -> int:
        """Tokens of all documents; cached, because every answer reports them."""
        return int(self.blocks.slot_tokens.sum(dtype=np.int64))

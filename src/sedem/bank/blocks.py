"""What a bank holds: its metadata, and the text span, the slots and the memory of each block.

Letters: S segments, T tokens, M slots of a segment, N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sedem.errors import DataError
from sedem.method.compressor import slot_tokens
from sedem.method.segments import Segments
from sedem.tensors import BFLOAT16, DTYPES, vector_bytes

SCAN = 256
"""Blocks loaded at once when a whole bank is scanned: 32 MB in float32 for a 1B model."""

MOST_SLOT_TOKENS = 255
"""Largest number of tokens of a slot that a bank can store."""


@dataclass(frozen=True)
class Meta:
    """Bank-wide metadata; J is `slots` and D is `width`.

    Attributes:
        fingerprint: hash of the model that made it.
        made_by: the settings behind the fingerprint, for people.
        dtype: type of the stored slots: "bfloat16", "int8" or "fp8".
        texts: always true; banks of earlier releases may be without texts, which are refused.
        words: whether there is a word index.
    """

    fingerprint: str
    made_by: dict[str, Any]
    slots: int
    width: int
    dtype: str = BFLOAT16
    texts: Literal[True] = True
    words: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of the row of a block."""
        return self.slots * (vector_bytes(self.width, self.dtype) + 1) + 40


@dataclass(frozen=True)
class Head:
    """A version of a bank, and how much it holds; a copy of the file has the same id."""

    id: str
    version: int
    documents: int
    blocks: int
    tokens: int


def fits(head: Head, meta: Meta, size: int) -> bool:
    """Whether a file of `size` bytes has room for what it claims to hold.

    More would allocate memory that no file fills. A document has at least a digest.
    """
    return (
        meta.dtype in DTYPES
        and 1 <= meta.slots < 2**16
        and 1 <= meta.width < 2**20
        and 0 <= head.version < 2**62
        and 0 <= head.documents <= size // 64
        and 0 <= head.blocks * meta.slots * vector_bytes(meta.width, meta.dtype) <= size
        and 0 <= head.tokens <= head.blocks * meta.slots * MOST_SLOT_TOKENS
    )


def scan_ranges(blocks: int) -> Iterator[range]:
    """Yield the indices of all blocks in order, at most `SCAN` at a time."""
    for start in range(0, blocks, SCAN):
        yield range(start, min(start + SCAN, blocks))


@dataclass(frozen=True)
class BlockRow:
    """What is stored about one block, except its memory.

    Its span is from character `start` to before `end` of a document's text. `slot_tokens` are the
    real tokens behind each of J slots; 0 is padding.
    """

    document: int
    start: int
    end: int
    slot_tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Blocks(Sequence[BlockRow]):
    """The rows of many blocks, as columns: a million row objects would take a gigabyte.

    Attributes:
        documents: index of the document of each block `[N]`.
        starts: first character of each span `[N]`.
        ends: character after each span `[N]`.
        slot_tokens: real tokens behind each slot `[N, J]`; 0 is padding.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    slot_tokens: NDArray[np.uint8]

    @classmethod
    def of(cls, rows: Sequence[BlockRow]) -> Blocks:
        """Convert rows to columns; columns are returned unchanged.

        Raises:
            DataError: a slot has more tokens than a byte can count.
        """
        if isinstance(rows, cls):
            return rows
        documents, starts, ends = (
            np.array([getattr(row, name) for row in rows], np.int64)
            for name in ("document", "start", "end")
        )
        slot_tokens = np.array([row.slot_tokens for row in rows], np.int64)
        slot_tokens = slot_tokens.reshape(len(rows), -1 if rows else 0)
        return cls(documents, starts, ends, as_bytes(slot_tokens))

    @classmethod
    def none(cls, slots: int) -> Blocks:
        """Return no blocks, with a number of slots."""
        no = np.zeros(0, np.int64)
        return cls(no, no, no, np.zeros((0, slots), np.uint8))

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """Concatenate blocks; parts without blocks may have any number of slots."""
        parts = [part for part in parts if len(part)] or list(parts[:1]) or [cls.none(0)]
        if len(parts) == 1:
            return parts[0]
        columns = ("documents", "starts", "ends", "slot_tokens")
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in columns))

    @property
    def slots(self) -> int:
        """J, slots per block; 0 if there are no blocks."""
        return self.slot_tokens.shape[1]

    def take(self, indices: NDArray[Any] | slice) -> Blocks:
        """Select blocks by indices, by a slice (a view) or by a boolean mask."""
        return Blocks(
            self.documents[indices],
            self.starts[indices],
            self.ends[indices],
            self.slot_tokens[indices],
        )

    def of_documents(self, documents: NDArray[np.int64]) -> Blocks:
        """Return the same blocks with new document indices `[N]`."""
        return replace(self, documents=documents)

    def __len__(self) -> int:
        return len(self.documents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> BlockRow: ...
    @overload
    def __getitem__(self, index: slice) -> Blocks: ...
    def __getitem__(self, index: int | slice) -> BlockRow | Blocks:
        if isinstance(index, slice):
            return self.take(index)
        place = int(self.documents[index]), int(self.starts[index]), int(self.ends[index])
        return BlockRow(*place, tuple(self.slot_tokens[index].tolist()))


def as_bytes(slot_tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Convert numbers of tokens to bytes.

    Raises:
        DataError: a slot has more tokens than a byte can count.
    """
    most = int(slot_tokens.max(initial=0))
    if most > MOST_SLOT_TOKENS:
        raise DataError(
            f"a slot of {most} tokens cannot be stored, at most {MOST_SLOT_TOKENS} can; use a "
            "smaller compression"
        )
    return slot_tokens.astype(np.uint8)


LAST_CHARACTER = 2**62
"""A position after every character of any document."""


def to_blocks(
    segments: Segments, memory_SMD: Tensor, document: int, compression: int, block_slots: int
) -> tuple[Blocks, Tensor]:
    """Group one document's slots into blocks of N_B (section 3.2, first paragraph).

    The last block of a document is padded with zeros.

    Returns:
        The blocks that hold at least one real token, and their memory `[N, J, D]`.
    """
    blocks, slots_NJ = partition(segments, document, compression, block_slots)
    flat_LD = memory_SMD.flatten(0, 1)
    padding_1D = flat_LD.new_zeros(1, flat_LD.shape[1])
    return blocks, torch.cat([flat_LD, padding_1D])[slots_NJ]


def partition(
    segments: Segments, document: int, compression: int, block_slots: int
) -> tuple[Blocks, Tensor]:
    """Assign the slots of one document to blocks; arguments as in `to_blocks`.

    Returns:
        The blocks that hold at least one real token, and the indices of their slots `[N, J]`,
        counted over all segments; -1 is padding.
    """
    tokens_L = slot_tokens(segments.mask, compression).flatten()
    missing = -len(tokens_L) % block_slots
    slots_L = torch.cat([torch.arange(len(tokens_L)), torch.full((missing,), -1)])
    slots_NJ = slots_L.unflatten(0, (-1, block_slots))
    tokens_NJ = torch.cat([tokens_L, tokens_L.new_zeros(missing)]).view_as(slots_NJ)
    width, count = block_slots * compression, len(tokens_NJ)

    def by_block(values_ST: Tensor) -> Tensor:
        flat = values_ST.flatten()
        return F.pad(flat, (0, count * width - len(flat))).view(count, width)

    real = by_block(segments.mask)
    starts = by_block(segments.starts).masked_fill(~real, LAST_CHARACTER).amin(1)
    ends = by_block(segments.ends).masked_fill(~real, 0).amax(1)
    nonempty = real.any(1)
    spans = starts[nonempty].numpy(), ends[nonempty].numpy()
    documents = np.full(len(spans[0]), document, np.int64)
    tokens = as_bytes(tokens_NJ[nonempty].numpy())
    return Blocks(documents, *spans, tokens), slots_NJ[nonempty]

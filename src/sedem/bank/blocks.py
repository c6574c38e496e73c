"""Blocks: the span of text behind each, the slots in it, and its memory.

Letters: S segments, T tokens, M slots of a segment, N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sedem.method.pooling import slot_tokens
from sedem.method.segments import Segments
from sedem.quantization import Quantized

SCAN = 256
"""Blocks loaded at once when a whole bank is scanned: 32 MB in float32 for a 1B model."""


def scan_ranges(blocks: int) -> Iterator[range]:
    """Yield the indices of all blocks in order, at most `SCAN` at a time."""
    for start in range(0, blocks, SCAN):
        yield range(start, min(start + SCAN, blocks))


@dataclass(frozen=True)
class BlockRow:
    """What is known of one block besides its memory.

    Attributes:
        document: index of the document it comes from.
        start: first character of its span in the document's text.
        end: character after its span.
        slot_tokens: how many real tokens each of its J slots stands for; 0 is padding.
    """

    document: int
    start: int
    end: int
    slot_tokens: tuple[int, ...]


class Piece(Protocol):
    """The memory of a part of a bank's blocks, in RAM or mapped from a file."""

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of the blocks at these rows, in the stored type."""
        ...


@dataclass(frozen=True)
class InMemory:
    """A piece in RAM."""

    memory_NJD: Quantized

    def __len__(self) -> int:
        return len(self.memory_NJD)

    def take(self, indices: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of the blocks at these rows."""
        return self.memory_NJD[list(indices)]


def to_blocks(
    segments: Segments, memory_SMD: Tensor, document: int, compression: int, block_slots: int
) -> tuple[list[BlockRow], Tensor]:
    """Group one document's slots into blocks of N_B (section 3.2, first paragraph).

    Args:
        segments: the segments that were compressed.
        memory_SMD: the memory of their slots.
        document: index of the document.
        compression: C.
        block_slots: N_B; the last block of a document is padded with zeros.

    Returns:
        The blocks that hold at least one real token, and their memory `[N, J, D]`.
    """
    blocks, slots_NJ = partition(segments, document, compression, block_slots)
    flat_LD = memory_SMD.flatten(0, 1)
    padding_1D = flat_LD.new_zeros(1, flat_LD.shape[1])
    return blocks, torch.cat([flat_LD, padding_1D])[slots_NJ]


def partition(
    segments: Segments, document: int, compression: int, block_slots: int
) -> tuple[list[BlockRow], Tensor]:
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
    mask, starts, ends = (t.flatten() for t in (segments.mask, segments.starts, segments.ends))
    width = block_slots * compression
    blocks, nonempty = [], []
    for index, tokens_J in enumerate(tokens_NJ.tolist()):
        span = slice(index * width, (index + 1) * width)
        real = mask[span]
        if real.any():
            start, end = starts[span][real].min(), ends[span][real].max()
            blocks.append(BlockRow(document, int(start), int(end), tuple(tokens_J)))
            nonempty.append(index)
    return blocks, slots_NJ[nonempty]

"""Keys and values of independent blocks, kept between answers.

What the layers above injection compute for an independent block depends only on the block, so it is
computed once. The least recently used blocks make room for others: on a GPU they move from its
memory to RAM, and from there they are dropped. Keys and values that a bank has on disk are mapped
and do not count against RAM.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sedem.engine.block_walk import BlockWalk
from sedem.engine.interface import BlockSource
from sedem.engine.kept_level import KeptLevel
from sedem.engine.stored import StoredBlocks, stored_blocks
from sedem.quantization import Quantized, check_dtype, quantize, vector_bytes

Progress = Callable[[int, int], None]
"""Called with the number of blocks done and the number of all blocks."""


@dataclass(frozen=True)
class KeptBudget:
    """Limits on the keys and values that an engine keeps.

    Attributes:
        device_bytes: bytes on a GPU; a CPU uses only RAM.
        ram_bytes: bytes in RAM.
        dtype: type in which they are kept, "bfloat16", "int8" or "fp8"; None does not round them.
            Rounding happens before their first use, so that answers do not depend on what is kept.

    Raises:
        ConfigError: there is no such type.
    """

    device_bytes: int = 2**30
    ram_bytes: int = 2**31
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_dtype(self.dtype)


def rounded(entry: Tensor, dtype: str | None) -> Quantized:
    """Round keys and values to a type, vector by vector; None leaves them as they are."""
    return Quantized(entry) if dtype is None else quantize(entry, dtype)


class Kept:
    """Provides the keys and values of blocks, kept ones or newly computed ones.

    Args:
        walk: computes them.
        budget: limits on what is kept.
        fingerprint: returns `stored.decoder_fingerprint`; called when a bank on disk is first used.

    Attributes:
        hits: number of blocks found.
        misses: number of blocks that had to be computed.
    """

    def __init__(self, walk: BlockWalk, budget: KeptBudget, fingerprint: Callable[[], str]) -> None:
        self.walk = walk
        self.budget = budget
        self.hits = self.misses = 0
        self._fingerprint = cache(fingerprint)
        self._stored: WeakKeyDictionary[BlockSource, StoredBlocks | None]
        self._stored = WeakKeyDictionary()
        device, cpu = walk.decoder.device, torch.device("cpu")
        self.levels = [KeptLevel(cpu, budget.ram_bytes)]
        if device.type != "cpu":
            self.levels.insert(0, KeptLevel(device, budget.device_bytes))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the decoder that computes keys and values."""
        return self._fingerprint()

    @property
    def nbytes(self) -> int:
        """Bytes in use, on all devices."""
        return sum(level.nbytes for level in self.levels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """L, G and H."""
        upper = self.walk.decoder.upper
        return len(upper), upper[0].key_heads, upper[0].head_width

    def fetch(self, bank: BlockSource, blocks: Sequence[int]) -> list[Quantized]:
        """Return keys and values `[L, 2, G, U, H]` of some blocks on the decoder's device.

        Args:
            bank: their bank.
            blocks: their indices, in the order of the result.
        """
        distinct = list(dict.fromkeys(blocks))
        found = self.find(bank, distinct)
        entries = {
            block: entry if number == 0 else self._move_up(bank, block, entry)
            for block, (number, entry) in found.items()
        }
        for block, entry in self.compute(bank, [b for b in distinct if b not in found]):
            entries[block] = self.keep(0, bank, block, entry)
        return [entries[block] for block in blocks]

    def find(
        self, bank: BlockSource, blocks: Sequence[int]
    ) -> dict[int, tuple[int | None, Quantized]]:
        """Return the blocks that need not be computed.

        Args:
            bank: their bank.
            blocks: their indices, each once.

        Returns:
            By index, the level at which a block is kept (None for a file), and its keys and values.
        """
        found: dict[int, tuple[int | None, Quantized]] = {}
        for block in blocks:
            for number, level in enumerate(self.levels):
                entry = level.get(bank, block)
                if entry is not None:
                    found[block] = number, entry
                    break
            else:
                entry = self.stored(bank, block)
                if entry is not None:
                    found[block] = None, entry
        self.hits += len(found)
        self.misses += len(blocks) - len(found)
        return found

    def compute(self, bank: BlockSource, blocks: Sequence[int]) -> Iterator[tuple[int, Quantized]]:
        """Compute keys and values of some blocks, a few at a time, and yield them."""
        together = self.walk.together
        for first in range(0, len(blocks), together):
            group = blocks[first : first + together]
            for block, entry in zip(group, self.walk.compute(bank, group), strict=True):
                yield block, rounded(entry, self.budget.dtype)

    def keep(self, number: int, bank: BlockSource, block: int, entry: Quantized) -> Quantized:
        """Keep a block at a level, and move what it displaces to the next level.

        Args:
            number: the level.
            bank: the bank.
            block: index of the block.
            entry: its keys and values.

        Returns:
            The same, in the memory of that level.
        """
        level = self.levels[number]
        entry = entry.to(level.device)
        for removed in level.put(bank, block, entry):
            if number + 1 < len(self.levels):
                lower = self.levels[number + 1]
                if lower.get(removed[0], removed[1]) is None:
                    self.keep(number + 1, *removed)
        return entry

    def entry_bytes(self, states: int) -> int:
        """Bytes of the keys and values of this many states, as they are kept."""
        layers, heads, width = self.shape
        dtype = self.budget.dtype
        exact = width * self.walk.decoder.dtype.itemsize
        each = exact if dtype is None else vector_bytes(width, dtype)
        return states * layers * 2 * heads * each

    def stored(self, bank: BlockSource, block: int) -> Quantized | None:
        """Return the keys and values of a block that its bank has on disk."""
        if bank not in self._stored:
            self._stored[bank] = stored_blocks(bank, self._fingerprint, self.shape)
        stored = self._stored[bank]
        if stored is None:
            return None
        return stored.entry(block, self.walk.sizes(bank, [block])[0])

    def look_again(self, bank: BlockSource) -> None:
        """Forget the mapped files of a bank, because they have changed."""
        self._stored.pop(bank, None)

    def clear(self) -> None:
        """Free everything that is kept."""
        for level in self.levels:
            level.clear()
        self._stored = WeakKeyDictionary()

    def _move_up(self, bank: BlockSource, block: int, entry: Quantized) -> Quantized:
        """Keep a block from RAM or a file on the decoder's device too, if that is a GPU."""
        return self.keep(0, bank, block, entry) if len(self.levels) > 1 else entry

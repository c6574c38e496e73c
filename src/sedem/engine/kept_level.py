"""One memory in which keys and values of blocks are kept, up to a number of bytes.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

import torch

from sedem.engine.interface import BlockSource
from sedem.quantization import Quantized

Removed = list[tuple[BlockSource, int, Quantized]]
"""Banks, indices of blocks, and their removed keys and values."""


@dataclass
class BankBlocks:
    """The kept blocks of one bank.

    Attributes:
        entries: keys and values by index of the block.
        nbytes: their bytes.
    """

    entries: dict[int, Quantized] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, block: int, entry: Quantized) -> None:
        """Keep a block; replace it if it is already there."""
        self.pop(block)
        self.entries[block] = entry
        self.nbytes += entry.nbytes

    def pop(self, block: int) -> Quantized | None:
        """Remove a block; None if it is not there."""
        entry = self.entries.pop(block, None)
        self.nbytes -= 0 if entry is None else entry.nbytes
        return entry


class KeptLevel:
    """Keys and values in one memory; the least recently used make room for new ones.

    They belong to a snapshot of a bank, and are freed with it.

    Args:
        device: the memory.
        limit: how many bytes may be used.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self._banks: WeakKeyDictionary[BlockSource, BankBlocks] = WeakKeyDictionary()
        # The least recently used first. Entries of removed blocks are skipped.
        self._order: OrderedDict[tuple[ref[BlockSource], int], None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(kept.nbytes for kept in list(self._banks.values()))

    def get(self, bank: BlockSource, block: int) -> Quantized | None:
        """Return keys and values `[L, 2, G, U, H]` of a block, and mark it as last used."""
        kept = self._banks.get(bank)
        entry = None if kept is None else kept.entries.get(block)
        if entry is not None:
            self._order.move_to_end((ref(bank), block))
        return entry

    def put(self, bank: BlockSource, block: int, entry: Quantized) -> Removed:
        """Keep a block.

        Args:
            bank: its bank.
            block: its index.
            entry: its keys and values; they are copied to this memory.

        Returns:
            What was removed to make room; the block itself if it is too large.
        """
        if entry.nbytes > self.limit:
            return [(bank, block, entry)]
        removed = self._make_room(entry.nbytes)
        kept = self._banks.get(bank)
        if kept is None:
            kept = self._banks[bank] = BankBlocks()
        kept.add(block, entry.to(self.device))
        self._order[ref(bank), block] = None
        self._order.move_to_end((ref(bank), block))
        return removed

    def clear(self) -> None:
        """Free everything."""
        self._banks, self._order = WeakKeyDictionary(), OrderedDict()

    def _make_room(self, needed: int) -> Removed:
        removed: Removed = []
        used = self.nbytes
        while used + needed > self.limit and self._order:
            (bank_ref, block), _ = self._order.popitem(last=False)
            bank = bank_ref()
            kept = None if bank is None else self._banks.get(bank)
            entry = None if kept is None else kept.pop(block)
            if bank is not None and entry is not None:
                used -= entry.nbytes
                removed.append((bank, block, entry))
        return removed

"""Keys and values of independent blocks, and of prefixes: computed, and kept between answers.

What the layers above injection compute for an independent block depends only on the block (see
`method.injection`), so it is computed once. The least recently used blocks make room for
others: on a GPU they move from its memory to RAM, and from there they are dropped.

If a question is read once, the layers below injection have run before its blocks are selected, and
its answer begins above injection. A captured graph runs them again, which costs it little.

Letters: N blocks, J slots per block, U restored states, P prefix positions, L layers above or below
injection, G key heads, H head width, D decoder width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from sedem.bank.memory_bank import BankReader
from sedem.engine.device import FairLock, machine_bytes, resident_bytes
from sedem.engine.fused import FusedDecoder
from sedem.errors import ConfigError
from sedem.method.compressor import state_mask
from sedem.method.injection import GrowingColumns, keys_values, read_prefix, real_first, start_state

Progress = Callable[[int, int], None]
"""Called with the number of blocks done and the number of all blocks."""


REQUESTS = 8
"""One part in so many of the memory of a process, at least, is left for requests, texts and what
calls take for a moment."""
LEAST_FOR_REQUESTS = 2**29
"""Bytes that these get in any case: with an eighth of 1 GiB, four readers took 1.29 GiB."""


@dataclass(frozen=True)
class KeptBudget:
    """Limits on the keys and values that an engine keeps, and on all that it may take.

    Attributes:
        device_bytes: bytes on a GPU; a CPU uses only RAM.
        memory: RAM of the whole process in bytes, which caches of answers share with what is kept;
            None means what the machine has.
    """

    device_bytes: int = 2**30
    ram_bytes: int = 2**31
    memory: int | None = None

    def room(self) -> int | None:
        """RAM that is left for caches and kept keys and values, once a model is open.

        Raises:
            ConfigError: there is none.
        """
        if self.memory is None:
            return None
        taken = resident_bytes()
        room = self.memory - max(self.memory // REQUESTS, LEAST_FOR_REQUESTS) - taken
        if room <= 0:
            least = max(taken * REQUESTS // (REQUESTS - 1), taken + LEAST_FOR_REQUESTS)
            raise ConfigError(
                f"memory is {self.memory:,} bytes; the open model takes {taken:,} and requests "
                f"need some, so give more than {least:,}"
            )
        return room


def half_of_memory() -> int | None:
    """Half of the machine's RAM; None if the system does not say how much it has."""
    whole = machine_bytes()
    return None if whole is None else whole // 2


Removed = list[tuple[BankReader, int, Tensor]]
"""Banks, indices of blocks, and their removed keys and values."""

TOGETHER = 8
"""Blocks per call on a GPU; a CPU computes each block alone."""
MOST = 64
"""Number of prefixes that are kept."""


class BlockWalk:
    """Computes keys and values of blocks, each block always in calls of the same shape.

    The shape determines the order in which a kernel adds up. On a CPU the result is therefore
    bitwise the same, regardless of when and with which other blocks it is computed.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self.decoder = decoder
        self.together = 1 if decoder.device.type == "cpu" else TOGETHER
        self._start_11D: Tensor | None = None

    @torch.no_grad()
    def compute(self, bank: BankReader, blocks: Sequence[int]) -> list[Tensor]:
        """Return keys and values `[L, 2, G, U, H]` of each block.

        Returns:
            One tensor for each block; keys are rotated to positions from 1.
        """
        decoder, layer = self.decoder, self.decoder.config.inject_layer
        computed: list[Tensor] = []
        for first in range(0, len(blocks), self.together):
            group = list(blocks[first : first + self.together])
            if self._start_11D is None:
                self._start_11D = start_state(decoder, layer)
            # A GPU's call is always full, so that its shape is always the same.
            full = group + [group[0]] * (self.together - len(group))
            real_NU = state_mask(bank.slot_tokens(full), decoder.states_per_slot)
            memory_NJD = bank.memory(full).to(decoder.device, torch.float32)
            restored_NUD = decoder.decompress(memory_NJD).to(decoder.dtype)
            # Attention does not see padding at the end; without other blocks, there is none.
            length = None if len(full) == 1 else real_NU.shape[1]
            restored_NUD, _ = real_first(restored_NUD, real_NU, length)
            found = keys_values(decoder, layer, restored_NUD, self._start_11D)
            every_NL2GUH = torch.stack([torch.stack(pair, dim=1) for pair in found], dim=1)
            sizes = real_NU.sum(1).tolist()
            computed += [
                kept[..., :size, :].contiguous()
                for kept, size, _ in zip(every_NL2GUH, sizes, group, strict=False)
            ]
        return computed


@dataclass
class BankBlocks:
    """The kept blocks of one bank.

    Attributes:
        entries: keys and values by index of the block.
        nbytes: their bytes.
    """

    entries: dict[int, Tensor] = field(default_factory=dict)
    nbytes: int = 0


class KeptLevel:
    """Keys and values in one memory; the least recently used make room for new ones.

    They belong to a snapshot of a bank, and are freed with it.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self._banks: WeakKeyDictionary[BankReader, BankBlocks] = WeakKeyDictionary()
        # The least recently used first. Entries of banks that are gone are skipped.
        self._order: OrderedDict[tuple[ref[BankReader], int], None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(kept.nbytes for kept in list(self._banks.values()))

    def get(self, bank: BankReader, block: int) -> Tensor | None:
        """Return keys and values `[L, 2, G, U, H]` of a block, and mark it as last used."""
        kept = self._banks.get(bank)
        entry = None if kept is None else kept.entries.get(block)
        if entry is not None:
            self._order.move_to_end((ref(bank), block))
        return entry

    def put(self, bank: BankReader, block: int, entry: Tensor) -> Removed:
        """Keep a block that is not kept yet.

        Returns:
            What was removed to make room; the block itself if it is too large.
        """
        if entry.nbytes > self.limit:
            return [(bank, block, entry)]
        removed = self.make_room(entry.nbytes)
        kept = self._banks.get(bank)
        if kept is None:
            kept = self._banks[bank] = BankBlocks()
        kept.entries[block] = entry.to(self.device)
        kept.nbytes += entry.nbytes
        self._order[ref(bank), block] = None
        self._order.move_to_end((ref(bank), block))
        return removed

    def clear(self) -> None:
        """Free everything."""
        self._banks, self._order = WeakKeyDictionary(), OrderedDict()

    def make_room(self, needed: int) -> Removed:
        """Remove blocks until so many bytes are free; returns them."""
        removed: Removed = []
        used = self.nbytes
        while used + needed > self.limit and self._order:
            (bank_ref, block), _ = self._order.popitem(last=False)
            bank = bank_ref()
            kept = None if bank is None else self._banks.get(bank)
            if bank is not None and kept is not None:
                entry = kept.entries.pop(block)
                kept.nbytes -= entry.nbytes
                used -= entry.nbytes
                removed.append((bank, block, entry))
        return removed


@dataclass(frozen=True)
class ReadPrefix:
    """What the layers below injection computed for one prefix.

    Attributes:
        hidden: states at the injection layer `[P, D]`.
        keys, values: of these layers `[L, G, P, H]`.
    """

    hidden: Tensor
    keys: Tensor
    values: Tensor


class Kept:
    """Provides the keys and values of blocks, kept ones or newly computed ones, to one thread at a
    time, in the order of asking.

    Attributes:
        misses: number of blocks that had to be computed.
        prefixes: by their tokens, the last ones that were read before their blocks were selected:
            an answer soon follows.
    """

    def __init__(self, walk: BlockWalk, budget: KeptBudget) -> None:
        self.walk = walk
        self.budget = budget
        self.prefixes: OrderedDict[tuple[int, ...], ReadPrefix] = OrderedDict()
        self.hits = self.misses = 0
        self._lock = FairLock()
        device, cpu = walk.decoder.device, torch.device("cpu")
        self.levels = [KeptLevel(cpu, budget.ram_bytes)]
        if device.type != "cpu":
            self.levels.insert(0, KeptLevel(device, budget.device_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes in use, on all devices."""
        return sum(level.nbytes for level in self.levels)

    def fetch(self, bank: BankReader, blocks: Sequence[int]) -> list[Tensor]:
        """Return keys and values `[L, 2, G, U, H]` of the given blocks on the decoder's device."""
        entries: dict[int, Tensor] = {}
        distinct = list(dict.fromkeys(blocks))
        with self._lock:
            for block in distinct:
                for level in self.levels:
                    if (entry := level.get(bank, block)) is not None:
                        is_first = level is self.levels[0]  # a GPU keeps it from now on
                        entries[block] = entry if is_first else self.keep(0, bank, block, entry)
                        break
            missing = [block for block in distinct if block not in entries]
            self.hits += len(entries)
            self.misses += len(missing)
            for block, computed in zip(missing, self.walk.compute(bank, missing), strict=True):
                entries[block] = self.keep(0, bank, block, computed)
            return [entries[block] for block in blocks]

    def read(self, ids_P: Tensor) -> Tensor:
        """Return the states of a prefix at the injection layer `[P, D]`, and keep it."""
        decoder, cache = self.walk.decoder, GrowingColumns()
        layer, room = decoder.config.inject_layer, decoder.config.states_per_block
        hidden_PD = read_prefix(decoder, layer, ids_P, room, cache)
        keys, values = (torch.cat(several) for several in zip(*cache.stored.values(), strict=True))
        self.prefixes[tuple(ids_P.tolist())] = ReadPrefix(hidden_PD, keys, values)
        if len(self.prefixes) > MOST:
            self.prefixes.popitem(last=False)
        return hidden_PD

    def keep(self, number: int, bank: BankReader, block: int, entry: Tensor) -> Tensor:
        """Keep a block at a level, and move what it displaces to the next level.

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
        decoder, layer = self.walk.decoder, self.walk.decoder.upper[0]
        vector = layer.head_width * decoder.dtype.itemsize
        return states * len(decoder.upper) * 2 * layer.key_heads * vector

    def limit_to(self, nbytes: int) -> None:
        """Keep at most so many bytes in RAM from now on, and no more than the budget allows."""
        with self._lock:
            self.levels[-1].limit = max(0, min(nbytes, self.budget.ram_bytes))
            self.levels[-1].make_room(0)

    def clear(self) -> None:
        """Free everything that is kept."""
        with self._lock:
            for level in self.levels:
                level.clear()
            self.prefixes.clear()

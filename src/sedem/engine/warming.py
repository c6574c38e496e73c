"""Compute keys and values of a bank's blocks before the first question, in memory or on disk.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from sedem.bank.memory_bank import MemoryBank
from sedem.bank.snapshot import BankReader
from sedem.bank.store.kept_files import kept_bytes, read_kept, write_kept
from sedem.bank.store.local import LocalStore
from sedem.bank.store.opening import local_folder
from sedem.bank.store.shard import Shard
from sedem.engine.interface import Engine
from sedem.engine.kept import Progress, rounded
from sedem.engine.static import Static
from sedem.errors import BankError, ConfigError
from sedem.quantization import DTYPES, Quantized, check_dtype


@torch.no_grad()
def warm(
    engine: Engine,
    bank: BankReader,
    blocks: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> int:
    """Compute keys and values ahead of time, as many as the engine's budget keeps.

    Args:
        engine: keeps them.
        bank: the bank.
        blocks: indices of blocks, the most important first; None means all, in their order.
        progress: called with the number of blocks done and of all.

    Returns:
        How many of the blocks are ready, in memory or on disk.

    Raises:
        BankMismatchError: another model made the bank.
        ConfigError: the engine keeps nothing, or there is no such block.
    """
    engine, bank = keeping_engine(engine), bank.snapshot()
    bank.check_made_by(engine.model.fingerprint())
    wanted = list(range(len(bank)) if blocks is None else blocks)
    for block in wanted:
        if not 0 <= block < len(bank):
            raise ConfigError(f"block {block} is to be warmed, the bank has {len(bank)}")
    kept, together = engine.kept, engine.kept.walk.together
    room = sum(level.limit for level in kept.levels)
    ready = 0
    for first in range(0, len(wanted), together):
        group = wanted[first : first + together]
        fitting = []
        with engine.device_lock():
            for block, states in zip(group, kept.walk.sizes(bank, group), strict=True):
                needed = 0 if kept.stored(bank, block) is not None else kept.entry_bytes(states)
                if needed <= room:
                    fitting.append(block)
                    room -= needed
            kept.fetch(bank, fitting)
        ready += len(fitting)
        if progress is not None:
            progress(first + len(group), len(wanted))
    return ready


@torch.no_grad()
def save_kept(
    engine: Engine, bank: BankReader, dtype: str | None = None, progress: Progress | None = None
) -> int:
    """Store keys and values of all blocks next to a bank's shards; later processes map them.

    Existing files of this decoder and type are kept.

    Args:
        engine: computes them.
        bank: a bank on local disk.
        dtype: "bfloat16", "int8" or "fp8"; None stores them unrounded.
        progress: called with the number of blocks done and of all.

    Returns:
        Bytes of all stored keys and values.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: the bank is only in RAM, empty, damaged, or being written by another process;
            or the disk has no room.
        ConfigError: the engine keeps nothing, or there is no such type.
    """
    engine = keeping_engine(engine)
    kept, walk = engine.kept, engine.kept.walk
    bank.check_made_by(engine.model.fingerprint())
    if bank.store is not None:
        local_folder(str(bank.store), "storing keys and values")
    if bank.path is None:
        raise BankError("the bank is only in RAM; save it before its keys and values")
    stored_as = walk.decoder.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    store = LocalStore(bank.path)
    with store.writing():
        opened = MemoryBank.open_from(store).snapshot()
        if not len(opened):
            raise BankError("the bank holds no documents, so there is nothing to compute")
        done = 0
        for number, shard in enumerate(opened.pieces):
            assert isinstance(shard, Shard)
            of_shard = np.flatnonzero(opened.places[:, 0] == number)
            rows = opened.places[of_shard, 1].tolist()
            blocks = dict(sorted(zip(rows, of_shard.tolist(), strict=True)))
            if not blocks:
                continue
            states = walk.sizes(opened, list(blocks.values()))
            sizes = dict(zip(blocks, states, strict=True))
            file = read_kept(shard, kept.fingerprint, kept.shape)
            if file is None or not file.holds(sizes, stored_as):
                entries = _entries(engine, opened, blocks, dtype, progress, done)
                write_kept(shard, kept.fingerprint, kept.shape, stored_as, sizes, entries)
            done += len(blocks)
    kept.look_again(bank.snapshot())
    return kept_bytes(bank.path)


def _entries(
    engine: Static,
    bank: BankReader,
    blocks: Mapping[int, int],
    dtype: str | None,
    progress: Progress | None,
    done: int,
) -> Iterator[tuple[int, Quantized]]:
    """Compute the entry `[L, 2, G, U, H]` of each row of a shard.

    Args:
        engine: computes them.
        bank: the bank.
        blocks: index of the block in each row.
        dtype: type to round to.
        progress: called with the number of blocks done and of all.
        done: number of blocks already done.

    Yields:
        Rows and their entries, on the CPU.
    """
    walk, rows = engine.kept.walk, list(blocks)
    for first in range(0, len(rows), walk.together):
        group = rows[first : first + walk.together]
        with engine.device_lock():
            computed = walk.compute(bank, [blocks[row] for row in group])
        for row, entry in zip(group, computed, strict=True):
            yield row, rounded(entry, dtype).to(torch.device("cpu"))
        if progress is not None:
            progress(done + first + len(group), len(bank))


def keeping_engine(engine: Engine) -> Static:
    """Return the engine if it keeps keys and values.

    Raises:
        ConfigError: it keeps none.
    """
    if not isinstance(engine, Static):
        raise ConfigError(
            f"engine '{engine.name}' keeps no keys and values; open the model with 'static' or "
            "'graphs'"
        )
    context = engine.model.config.block_context
    if context != "independent":
        raise ConfigError(
            f"block_context of this model is '{context}': keys and values of a block depend on the "
            "blocks before it and cannot be kept; that needs 'independent'"
        )
    return engine

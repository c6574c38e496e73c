"""Compute keys and values of a bank's blocks before the first question, in memory or on disk.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sedem.bank.file import delete
from sedem.bank.kept import KeptFile, kept_bytes, kept_path, memory_digest
from sedem.bank.memory_bank import BankReader, MemoryBank
from sedem.engine.interface import Engine
from sedem.engine.kept import Progress, rounded
from sedem.engine.static import Static
from sedem.errors import BankError, ConfigError, DamagedBankError
from sedem.quantization import DTYPES, check_dtype


@torch.no_grad()
def warm(
    engine: Engine,
    bank: BankReader,
    blocks: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> int:
    """Compute keys and values ahead of time, as many as the engine's budget keeps.

    Args:
        blocks: indices of blocks, the most important first; None means all, in their order.

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
    """Store keys and values of all blocks in a file beside a bank; later processes read them.

    Existing entries of this decoder and type are kept, so an interrupted run continues.

    Args:
        dtype: "bfloat16", "int8" or "fp8"; None stores them unrounded.

    Returns:
        Bytes of all stored keys and values.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: the bank is only in RAM, in parts, empty, or damaged; or the disk has no room.
        ConfigError: the engine keeps nothing, or there is no such type.
    """
    engine = keeping_engine(engine)
    kept, walk = engine.kept, engine.kept.walk
    bank.check_made_by(engine.model.fingerprint())
    if bank.path is None:
        raise BankError(
            f"keys and values need a bank in one file on disk, and this one is {bank.store}; save "
            "it first"
        )
    stored_as = walk.decoder.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    opened = MemoryBank.open(bank.path).snapshot()
    if not len(opened):
        raise BankError("the bank holds no documents, so there is nothing to compute")
    try:
        file = KeptFile(bank.path, kept.fingerprint, kept.shape, create=True)
    except DamagedBankError:
        delete(kept_path(bank.path))
        file = KeptFile(bank.path, kept.fingerprint, kept.shape, create=True)
    memories: set[bytes] = set()
    try:
        for first in range(0, len(opened), walk.together):
            group = range(first, min(first + walk.together, len(opened)))
            memory_NJD = opened.stored(group)
            missing = [b for b in group if not file.holds(memory_NJD[b - first], stored_as)]
            if missing:
                with engine.device_lock():
                    computed = walk.compute(opened, missing)
                for block, entry in zip(missing, computed, strict=True):
                    stored = rounded(entry, dtype).to(torch.device("cpu"))
                    file.put(memory_NJD[block - first], stored)
            memories.update(memory_digest(memory_NJD[b - first]) for b in group)
            if progress is not None:
                progress(group.stop, len(opened))
        file.keep_only(memories, stored_as)
    finally:
        file.close()
    kept.forget_files(bank.snapshot())
    return kept_bytes(bank.path)


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

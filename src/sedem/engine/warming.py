"""Compute keys and values of a bank's blocks before the first question."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sedem.bank.memory_bank import BankReader
from sedem.engine.interface import Engine
from sedem.engine.kept import Progress
from sedem.engine.static import Static
from sedem.errors import ConfigError


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
        How many of the blocks are ready.

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
                needed = kept.entry_bytes(states)
                if needed <= room:
                    fitting.append(block)
                    room -= needed
            kept.fetch(bank, fitting)
        ready += len(fitting)
        if progress is not None:
            progress(first + len(group), len(wanted))
    return ready


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

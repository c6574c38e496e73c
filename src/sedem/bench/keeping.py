"""Keys and values of blocks kept between answers: who keeps them, and when it pays off.

There are three cases for a question. "cold": nothing is ever kept, so the keys and values of its
blocks are computed and dropped. "missed": they are kept but not there yet, so they are computed and
stored. "found": they are already there, so only the question is run.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch

from sedem.answering.requests import auto_budget
from sedem.bank.keys import prepare
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.config import BlockContext
from sedem.engine.kept import Kept, KeptBudget
from sedem.engine.static import open_engine
from sedem.engine.warming import keeping_engine
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import BoundSedem
from sedem.model import SeDeM

Keeping = Literal["cold", "warm"]
"""Whether SeDeM keeps no keys and values of blocks, or computes those of all blocks ahead."""

NOTHING = KeptBudget(device_bytes=0, ram_bytes=0)


@runtime_checkable
class Keeper(Protocol):
    """A reader that keeps keys and values of blocks."""

    def warm(self, memory: Any) -> int:
        """Compute the keys and values of all blocks ahead; return how many blocks are ready."""
        ...

    def anew(self, memory: Any) -> Any:
        """The same memory, with nothing kept."""
        ...

    def kept_bytes(self, memory: Any) -> int:
        """Bytes of the keys and values of all its blocks."""
        ...


class WarmSedem(BoundSedem):
    """SeDeM that keeps keys and values of independent blocks; arguments as in `BoundSedem`."""

    def warm(self, memory: BankReader) -> int:
        """Compute the keys and values of all blocks ahead; return how many blocks are ready."""
        return self.model.warm(memory)

    def anew(self, memory: BankReader) -> Snapshot:
        """The same bank as another snapshot, with its selector's keys but nothing kept."""
        # The files are shared. Kept keys and values belong to the snapshot.
        bank = memory.snapshot().part(range(len(memory)))
        prepare(bank, self.model.selector)
        return bank

    def kept_bytes(self, memory: BankReader) -> int:
        """Bytes of the keys and values of all blocks above injection."""
        return every_block_bytes(keeping_engine(self.model.engine).kept, memory)


def every_block_bytes(kept: Kept, source: BankReader) -> int:
    """Bytes of the keys and values of all blocks, whether they are computed or not."""
    return sum(kept.entry_bytes(n) for n in kept.walk.sizes(source, range(len(source))))


def open_keeping(
    settings: MethodSettings, keeping: Keeping, block_context: BlockContext | None = None
) -> SeDeM:
    """Open SeDeM with another block context, and with or without keeping.

    Args:
        settings: checkpoint, data type, device, engine and weights.
        keeping: "cold" keeps nothing between answers.
        block_context: replaces the checkpoint's own; None leaves it unchanged.

    Raises:
        ConfigError: a setting cannot be used, or "warm" is requested and the model or its engine
            cannot keep anything.
    """
    # A fast engine reads the configuration when it is opened, so it is opened afterwards.
    model = SeDeM.from_pretrained(
        settings.checkpoint,
        dtype=getattr(torch, settings.dtype),
        device=settings.device,
        engine="eager",
    )
    if block_context is not None:
        model.config = model.config.with_changes(block_context=block_context)
    # The same prompt for all methods, and one end token, which the bench disables.
    model.config = model.config.with_changes(chat_template=False)
    budget = NOTHING if keeping == "cold" else None
    model.engine = open_engine(settings.engine, model, budget=budget, weights=settings.weights)
    auto_budget(model, settings.k)
    if keeping == "warm":
        keeping_engine(model.engine)
    return model

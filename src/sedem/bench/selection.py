"""Selection at scale: time to score a bank of N blocks of random memory at the model's width."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sedem.bank.blocks import BlockRow, InMemory
from sedem.bank.key_index import key_index, prepare
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.search import score_questions
from sedem.bench.ceilings import Ceilings
from sedem.bench.floors import Work
from sedem.bench.spread import spread
from sedem.engine.device import Clock
from sedem.errors import ConfigError
from sedem.evaluation.readers import BoundSedem
from sedem.inference.requests import encode_questions
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16, quantize
from sedem.types import Document

DRAWN = 1000
"""Blocks of distinct memory; more are the same ones again, each with keys of its own."""

WARM_UP = 2


def check_blocks(counts: list[int]) -> None:
    """Refuse banks of no blocks.

    Raises:
        ConfigError: a count is below 1 or named twice.
    """
    if any(count < 1 for count in counts) or len(set(counts)) < len(counts):
        raise ConfigError(f"blocks are {counts}; give different numbers of at least 1")


def measure_selection(
    reader: BoundSedem, blocks: int, question: str, runs: int, tick: Callable[[], None]
) -> dict[str, object]:
    """Time to score every block of a synthetic bank exactly for one question, keys prepared.

    Args:
        reader: whose selector.
        blocks: of the bank.
        question: what is asked.
        runs: how often.
        tick: called after each.

    Returns:
        `blocks`, `tokens` that they stand for, `bytes` of the keys, `score_ms` and the `work`
        behind its floor.
    """
    model = reader.model
    bank = synthetic_bank(model, blocks)
    prepare(bank, model.selector)
    hidden_1QE, mask_1Q = encode_questions(model, model.engine, [question])
    times = []
    for run in range(-WARM_UP, runs):
        clock = Clock(model.device)
        score_questions(model.selector, bank, hidden_1QE, mask_1Q)
        clock.lap("score_ms")
        if run >= 0:
            times.append(clock.timings["score_ms"])
        tick()
    held = key_index(bank, model.selector).cached
    assert held is not None
    projected = model.selector.w_key.out_features
    match = 2 * int(mask_1Q.sum()) * blocks * model.config.slots_per_block * projected
    return {
        "blocks": blocks,
        "tokens": bank.tokens,
        "bytes": held.nbytes,
        "score_ms": spread(times),
        "work": vars(Work(match, held.nbytes)),
    }


def selection_floor_ms(work: dict[str, float], ceilings: Ceilings) -> float:
    """The least time to score, from what `measure_selection` recorded."""
    return 1e3 * Work(**work).seconds(ceilings)


def synthetic_bank(model: SeDeM, blocks: int) -> MemoryBank:
    """A bank of random memory that the model takes for its own."""
    slots, compression = model.config.slots_per_block, model.config.compression
    generator = torch.Generator().manual_seed(0)
    drawn_NJD = torch.randn(min(blocks, DRAWN), slots, model.decoder.width, generator=generator)
    row = BlockRow(0, 0, 1, (compression,) * slots)
    return MemoryBank(
        model.fingerprint(),
        model.made_by(),
        [Document("synthetic", "-")],
        [row] * blocks,
        [InMemory(quantize(drawn_NJD, BFLOAT16))],
        [(0, block % len(drawn_NJD)) for block in range(blocks)],
    )

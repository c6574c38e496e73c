"""Selection at scale: time to score a bank of N blocks of random memory at the model's width."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sedem.bank import InMemory, MemoryBank
from sedem.bench.ceilings import Ceilings
from sedem.bench.floors import Work
from sedem.bench.spread import spread
from sedem.contracts import Document
from sedem.errors import ConfigError
from sedem.evaluation.readers import BoundSedem
from sedem.generation import Decoding
from sedem.model import SeDeM
from sedem.shard import BlockRow

DRAWN = 1000
"""Blocks of distinct memory; more are copies of these, each in its own place."""

WARM_UP = 2
ONE_TOKEN = Decoding(max_new_tokens=1)


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
    """Time to score every block of a synthetic bank for one question.

    Args:
        reader: whose selector.
        blocks: of the bank.
        question: what is asked.
        runs: how often.
        tick: called after each.

    Returns:
        `blocks`, `tokens` that they stand for, `bytes`, `score_ms` and the `work` behind its floor.
    """
    model = reader.model
    bank = synthetic_bank(model, blocks)
    times = []
    for run in range(-WARM_UP, runs):
        timings = model.answer(bank, question, k=reader.k, decoding=ONE_TOKEN).timings
        if run >= 0:
            times.append(timings["score_ms"])
        tick()
    return {
        "blocks": blocks,
        "tokens": bank.tokens,
        "bytes": bank.memory_bytes,
        "score_ms": spread(times),
        "work": vars(_work(model, bank, question)),
    }


def selection_floor_ms(work: dict[str, float], ceilings: Ceilings) -> float:
    """The least time to score, from what `measure_selection` recorded."""
    return 1e3 * Work(**work).seconds(ceilings)


def synthetic_bank(model: SeDeM, blocks: int) -> MemoryBank:
    """A bank of random memory that the model takes for its own."""
    slots, compression = model.config.slots_per_block, model.config.compression
    generator = torch.Generator().manual_seed(0)
    drawn_NJD = torch.randn(min(blocks, DRAWN), slots, model.decoder.width, generator=generator).to(
        torch.bfloat16
    )
    rounds = -(-blocks // len(drawn_NJD))
    row = BlockRow(0, 0, 1, (compression,) * slots)
    return MemoryBank(
        model.fingerprint(),
        model.made_by(),
        [Document("synthetic", "-")],
        [row] * blocks,
        [InMemory(drawn_NJD.repeat(rounds, 1, 1)[:blocks])],
    )


def _work(model: SeDeM, bank: MemoryBank, question: str) -> Work:
    """Projecting and matching every slot; the question's own encoding is not in the time."""
    questions = len(model.encoder.token_ids(question))
    slots = len(bank) * model.config.slots_per_block
    projected = model.selector.w_key.out_features
    project = 2 * slots * model.decoder.width * projected
    return Work(project + 2 * questions * slots * projected, bank.memory_bytes)

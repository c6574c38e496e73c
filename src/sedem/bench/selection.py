"""Selection at scale: time to score a synthetic bank of N blocks at the model's width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sedem.bank.blocks import Blocks, InMemory
from sedem.bank.documents import InMemoryDocuments
from sedem.bank.key_index import key_index, prepare
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.search import score_questions
from sedem.bank.snapshot import Snapshot
from sedem.bank.store.interface import Contents, Meta
from sedem.bench.ceilings import Ceilings
from sedem.bench.floors import Work
from sedem.bench.spread import spread
from sedem.engine.device import Clock
from sedem.evaluation.readers import BoundSedem
from sedem.inference.requests import encode_questions
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16, quantize
from sedem.types import Document

DISTINCT_BLOCKS = 1000
"""Number of distinct random memory blocks; a larger bank repeats them, each with its own keys."""

WARM_UP = 2


def measure_selection(
    reader: BoundSedem, blocks: int, question: str, runs: int, tick: Callable[[], None]
) -> dict[str, object]:
    """Time exact scoring of every block of a synthetic bank for one question, with prepared keys.

    Args:
        reader: the reader whose selector is measured.
        blocks: number of blocks in the bank.
        question: the question.
        runs: number of measured runs.
        tick: called after each run, warm-up included.

    Returns:
        `blocks`, `tokens` that they represent, `bytes` of the keys, `score_ms`, and the `work` from
        which the floor is computed.
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
    keys = key_index(bank, model.selector).cached
    assert keys is not None
    projected = model.selector.w_key.out_features
    flops = 2 * int(mask_1Q.sum()) * blocks * model.config.slots_per_block * projected
    return {
        "blocks": blocks,
        "tokens": bank.tokens,
        "bytes": keys.nbytes,
        "score_ms": spread(times),
        "work": vars(Work(flops, keys.nbytes)),
    }


def selection_floor_ms(work: dict[str, float], ceilings: Ceilings) -> float:
    """The minimum time to score, from the `work` of `measure_selection`."""
    return 1e3 * Work(**work).seconds(ceilings)


def synthetic_bank(model: SeDeM, blocks: int) -> MemoryBank:
    """A bank of random memory with the model's fingerprint."""
    slots, compression = model.config.slots_per_block, model.config.compression
    generator = torch.Generator().manual_seed(0)
    drawn_NJD = torch.randn(
        min(blocks, DISTINCT_BLOCKS), slots, model.decoder.width, generator=generator
    )
    numbers_N, zeros_N = np.arange(blocks), np.zeros(blocks, np.int64)
    contents = Contents(
        Meta(model.fingerprint(), model.made_by()),
        InMemoryDocuments([Document("synthetic", "-")]),
        Blocks(zeros_N, zeros_N, zeros_N + 1, np.full((blocks, slots), compression, np.uint8)),
        [InMemory(quantize(drawn_NJD, BFLOAT16))],
        np.stack([zeros_N, numbers_N % len(drawn_NJD)], axis=1),
    )
    return MemoryBank.of(Snapshot(contents))

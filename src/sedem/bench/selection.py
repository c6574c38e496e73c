"""Selection at scale: time to score a synthetic bank of N blocks at the model's width."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sedem.answering.requests import encode_questions
from sedem.bank.scores import key_scores
from sedem.bench.ceilings import Ceilings
from sedem.bench.floors import Work
from sedem.bench.spread import spread
from sedem.engine.device import Clock
from sedem.evaluation.readers import BoundSedem
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16, Quantized, quantize

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
    keys_NJRH = synthetic_keys(model, blocks)
    no_padding = torch.zeros(0, dtype=torch.long)
    hidden_1QE, mask_1Q = encode_questions(model, model.engine, [question])
    query_1QRH = model.selector.queries(hidden_1QE)
    times = []
    for run in range(-WARM_UP, runs):
        clock = Clock(model.device)
        key_scores(query_1QRH, mask_1Q, keys_NJRH, no_padding)
        clock.lap("score_ms")
        if run >= 0:
            times.append(clock.timings["score_ms"])
        tick()
    projected = model.selector.w_key.out_features
    flops = 2 * int(mask_1Q.sum()) * blocks * model.config.slots_per_block * projected
    return {
        "blocks": blocks,
        "tokens": blocks * model.config.slots_per_block * model.config.compression,
        "bytes": keys_NJRH.nbytes,
        "score_ms": spread(times),
        "work": vars(Work(flops, keys_NJRH.nbytes)),
    }


def selection_floor_ms(work: dict[str, float], ceilings: Ceilings) -> float:
    """The minimum time to score, from the `work` of `measure_selection`."""
    return 1e3 * Work(**work).seconds(ceilings)


@torch.no_grad()
def synthetic_keys(model: SeDeM, blocks: int) -> Quantized:
    """The selector's keys `[N, J, R, H]` of random memory, as `keys.prepare` keeps them."""
    generator = torch.Generator().manual_seed(0)
    drawn_NJD = torch.randn(
        min(blocks, DISTINCT_BLOCKS),
        model.config.slots_per_block,
        model.decoder.width,
        generator=generator,
    )
    keys = quantize(model.selector.keys(drawn_NJD.to(model.selector.w_key.weight)), BFLOAT16)
    return keys[torch.arange(blocks, device=keys.values.device) % len(keys)]

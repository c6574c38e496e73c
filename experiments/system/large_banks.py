"""What a first search with pooled keys misses in banks larger than any we can read.

Blocks are made as keys, because the selector sees nothing else. Each is assembled from runs of
neighbouring slots of several blocks of a real bank, and noise is added to every key. The real
blocks come first, including the evidence for the questions. Blocks are made in small parts, and
only their scores are kept: for a million of them 320 MB.

Letters: B questions, Q question tokens, N blocks, J slots of a block, R heads, H width of a head.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.system.scales import Scale
from sedem import Document, SeDeM
from sedem.answering.requests import encode_questions
from sedem.bank.keys import key_index, keys_of
from sedem.bank.scores import key_scores
from sedem.bank.search import CANDIDATES, GROUPS, pool_keys
from sedem.provenance import provenance
from sedem.quantization import Quantized

COUNTS = (128, 512, 1024, 2048, 4096, 16384)
BUDGET = 2
RUNS = 4
"""Runs of neighbouring slots in a block, each from another real block."""
NOISE = 0.5
"""Norm of the noise added to a key, whose own norm is 1: their cosine is 0.89."""
NOISES = 2**14
"""Number of noise vectors; drawing a new one for each key would take most of the time."""
PART = 100
"""Blocks made and scored together; more of them would not fit in the processor's cache."""


@torch.no_grad()
def large_banks(
    checkpoint: Path, scale: Scale, questions: str, data: Path, limit: int, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Recall of the coarse search in banks of increasing size, and its cost against exact search.

    Args:
        checkpoint: the model.
        scale: gives the sets.
        questions: key of the set; a sample of it is asked, and its documents give the real blocks.
        data: folder of the data files.
        limit: number of questions.
        sizes: numbers of blocks, in ascending order; each bank begins with the previous one.
    """
    model, asked = SeDeM.from_pretrained(checkpoint), scale.sets[questions]
    examples = random.Random(0).sample([*asked.examples(data)], limit)
    texts = dict.fromkeys(d.text for example in examples for d in example.documents)
    bank = model.read([Document(str(number), text) for number, text in enumerate(texts)])
    states, mask_BQ = encode_questions(model, model.engine, [e.question for e in examples])
    query_BQRH = model.selector.queries(states)
    real = keys_of(bank, model.selector, range(len(bank)))
    padding = key_index(bank, model.selector).padding
    scores = {kind: torch.empty(limit, sizes[-1]) for kind in ("exact", "coarse")}
    seconds = dict.fromkeys(scores, 0.0)
    found: dict[str, Any] = {}
    blocks = 0
    for keys_NJRH, padding_P in _parts(real, padding, sizes):
        pooled, is_padding = pool_keys(keys_NJRH, padding_P)
        empty_P = is_padding.flatten().nonzero()[:, 0]
        place = slice(blocks, blocks + len(keys_NJRH))
        for kind, keys in (("exact", (keys_NJRH, padding_P)), ("coarse", (pooled, empty_P))):
            started = time.process_time()
            scores[kind][:, place] = key_scores(query_BQRH, mask_BQ, *keys)
            seconds[kind] += time.process_time() - started
        blocks = place.stop
        if blocks in sizes:
            found[str(blocks)] = {
                "recall": recall(scores["exact"][:, :blocks], scores["coarse"][:, :blocks]),
                "products": _products(blocks, bank.blocks.slots),
                "cpu_ms_per_question": {k: 1e3 * s / limit for k, s in seconds.items()},
            }
    return {
        "sizes": found,
        "candidates_cpu_ms_per_question": _candidates_ms(query_BQRH, mask_BQ, real, padding),
        "real_blocks": len(bank),
        "made": {"runs": RUNS, "noise": NOISE, "seed": 0},
        "questions": {"data": Path(asked.source).name, "limit": limit, "seed": 0},
        "checkpoint": checkpoint.name,
        **provenance(),
    }


def _parts(
    real: Quantized, padding: Tensor, sizes: tuple[int, ...]
) -> Iterator[tuple[Quantized, Tensor]]:
    """Keys of the real blocks, then of made ones, with padding indices; no part crosses a size."""
    yield real, padding
    generator = torch.Generator().manual_seed(0)
    slots = real.values.shape[1]
    whole = torch.ones(len(real), dtype=torch.bool)
    whole[padding // slots] = False
    keys_NJRH = real.values[whole].float()
    noise = torch.randn(NOISES, *keys_NJRH.shape[2:], generator=generator)
    noise = NOISE * F.normalize(noise, dim=-1)
    done = len(real)
    for size in sizes:
        while done < size:
            count = min(PART, size - done)
            made = made_keys(keys_NJRH, noise, count, generator)
            yield Quantized(made), torch.zeros(0, dtype=torch.long)
            done += count


def made_keys(keys_NJRH: Tensor, noise: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Assemble blocks from runs of real ones.

    Args:
        keys_NJRH: keys of real blocks without padding.
        noise: vectors `[n, R, H]` to add.
        count: number of blocks.
        generator: source of the random choices.

    Returns:
        Unit vectors `[count, J, R, H]`.
    """
    slots = keys_NJRH.shape[1]
    chosen = torch.randint(len(keys_NJRH), (count, RUNS), generator=generator)
    sources = chosen.repeat_interleave(-(-slots // RUNS), 1)[:, :slots]
    made = keys_NJRH[sources, torch.arange(slots)]
    made += noise[torch.randint(len(noise), (count, slots), generator=generator)]
    # In place: `F.normalize` would write all keys once more.
    return made.div_(torch.linalg.vector_norm(made, dim=-1, keepdim=True))


def recall(exact_BN: Tensor, coarse_BN: Tensor) -> dict[str, float]:
    """Percentage of the exact best blocks among the best C by pooled keys, by C."""
    best_BK = exact_BN.topk(BUDGET, 1).indices
    above_BK = torch.stack(
        [(coarse_BN > coarse_BN.gather(1, best_BK[:, k : k + 1])).sum(1) for k in range(BUDGET)], 1
    )
    return {str(c): round(100 * (above_BK < c).float().mean().item(), 2) for c in COUNTS}


def _candidates_ms(
    query_BQRH: Tensor, mask_BQ: Tensor, keys_NJRH: Quantized, padding_P: Tensor
) -> float:
    """Milliseconds to score a question's candidates, one question at a time."""
    started = time.process_time()
    for row in range(len(query_BQRH)):
        question = slice(row, row + 1)
        key_scores(query_BQRH[question], mask_BQ[question], keys_NJRH, padding_P)
    spent = time.process_time() - started
    return 1e3 * spent / len(query_BQRH) * CANDIDATES / len(keys_NJRH)


def _products(blocks: int, slots: int) -> dict[str, float]:
    """Products of a coarse search as a percentage of those of an exact one, by C."""
    return {str(c): 100 * (GROUPS / slots + min(1, c / blocks)) for c in COUNTS}

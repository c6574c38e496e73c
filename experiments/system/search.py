"""Measures of selection: what keyword and coarse searches find, and what scores tell.

Letters: B questions, Q question tokens, N blocks, J slots of a block, R heads, H width of a head,
F features.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.scales import SHIPPED, Questions, Scale
from sedem import Document, MemoryBank, SeDeM
from sedem.answering.requests import encode_questions
from sedem.bank.blocks import BlockRow
from sedem.bank.keys import key_index, key_parts, keys_of
from sedem.bank.search import CANDIDATES as CHOSEN
from sedem.bank.search import GROUPS, key_scores, pool_keys
from sedem.baselines.bm25 import bm25_scores, index_texts
from sedem.data import labels
from sedem.data.articles import read_articles
from sedem.evaluation.metrics import (
    BINS,
    RESAMPLES,
    auroc,
    calibration_error,
    recall_at,
    summarize,
)
from sedem.evaluation.run import sample
from sedem.guidance.scores import FEATURES, Confidence
from sedem.method.segments import segment_text
from sedem.quantization import Quantized, join
from sedem.training.calibration import (
    read_examples,
    score_examples,
    with_and_without_evidence,
)

# BM25 over SeDeM's blocks


def block_recall(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall of the evidence by BM25 over the blocks that the selector chooses from, by K."""
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data))
    spans: dict[str, list[tuple[int, int]]] = {}
    recalls: dict[int, list[float]] = {k: [] for k in (1, 2, 4)}
    for example in examples_of(cell, scale, data):
        rows = []
        for number, document in enumerate(example.documents):
            if document.text not in spans:
                spans[document.text] = _spans(model, document)
            rows += [BlockRow(number, start, end, ()) for start, end in spans[document.text]]
        texts = [example.documents[row.document].text[row.start : row.end] for row in rows]
        scores = bm25_scores(index_texts(texts), len(texts), example.question)
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        evidence = labels.from_evidence(rows, example.evidence)
        for k, values in recalls.items():
            values.append(recall_at(ranked, evidence, k))
    return {f"recall@{k}": summarize(values) for k, values in recalls.items()}


def _spans(model: SeDeM, document: Document) -> list[tuple[int, int]]:
    """Start and end of every block of a document, in characters."""
    config = model.config
    cut = segment_text(document.text, model.encoder, config.segment_length, config.segmentation)
    ends = cut.ends.gather(1, cut.lengths[:, None] - 1)[:, 0]
    return list(zip(cut.starts[:, 0].tolist(), ends.tolist(), strict=True))


# A first search with pooled keys, on one large bank

POOLED = (1, 2, 4, 8, 16)
"""Pooled keys of a block that are tried."""
COUNTS = (32, 128, 512, 1024, 2048, 4096)
TRAINING_PART = Questions("SQuAD, training part", "squad/train-44-articles.json", "squad")
ARTICLES = ("wikipedia/articles.jsonl.xz", 324)
"""More texts of the bank at nano: documents of a second set, and first articles of a file."""


def coarse_search(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Which exact selections a first search with pooled keys misses, by pooled keys a block.

    The documents of a set are read into one bank, which is searched for the set's questions: how
    many of the exact best K blocks are among the best C blocks by pooled keys?
    """
    folder, asked = checkpoint_of(cell, scale, data), scale.sets[cell.questions]
    model = SeDeM.from_pretrained(folder)
    bank = model.read(_documents(scale, asked, data))
    every = [example.question for example in asked.examples(data)]
    sampled = random.Random(0).sample(every, min(cell.limit or len(every), len(every)))
    return {
        "by_pooled_keys_of_a_block": _pooled_recall(model, bank, sampled),
        "bank": {
            "documents": len(bank.documents),
            "blocks": len(bank),
            "tokens": bank.tokens,
            "dtype": bank.dtype,
        },
        "questions": {"data": Path(asked.source).name, "limit": len(sampled), "seed": 0},
        "checkpoint": folder.name,
    }


def _documents(scale: Scale, asked: Questions, data: Path) -> list[Document]:
    """Every text of the bank, without duplicates."""
    nano = scale.name == "nano"
    sets = [asked, TRAINING_PART] if nano else [asked]
    texts = [d.text for s in sets for example in s.examples(data) for d in example.documents]
    if nano:
        source, count = ARTICLES
        texts += [text for _, text in read_articles(data / source, slice(count))]
    return [Document(str(number), text) for number, text in enumerate(dict.fromkeys(texts))]


@torch.no_grad()
def _pooled_recall(model: SeDeM, bank: MemoryBank, questions: list[str]) -> dict[str, Any]:
    """Recall and time of a first search, by the number of pooled keys per block."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, questions)
    query_BQRH = model.selector.queries(hidden_BQE)
    keys, slots = key_index(bank, model.selector), len(bank.blocks[0].slot_tokens)
    exact: list[Tensor] = []
    pooled: dict[int, list[Any]] = {groups: [] for groups in POOLED}
    for indices, part in key_parts(bank, model.selector):
        padding_P = keys.padding_of(indices, slots)
        exact.append(key_scores(query_BQRH, mask_BQ, part, padding_P))
        for groups, parts in pooled.items():
            parts.append(pool_keys(part, padding_P, groups))
    exact_BN = torch.cat(exact, 1)
    found = {}
    for groups, parts in pooled.items():
        means, empty = zip(*parts, strict=True)
        empty_P = torch.cat(empty).flatten().nonzero()[:, 0]
        started = time.process_time()
        rough_BN = key_scores(query_BQRH, mask_BQ, join(means), empty_P)
        milliseconds = 1e3 * (time.process_time() - started) / len(questions)
        found[str(groups)] = {
            "recall": {f"k{k}": recall(exact_BN, rough_BN, k, COUNTS) for k in (1, 2, 4, 10)},
            "cpu_ms_per_question_and_1000_blocks": round(1e3 * milliseconds / len(bank), 3),
        }
    return found


def recall(
    exact_BN: Tensor, rough_BN: Tensor, best: int, counts: tuple[int, ...]
) -> dict[str, float]:
    """Percentage of the exact best blocks among the best C of a rough order, by C."""
    best_BK = exact_BN.topk(min(best, exact_BN.shape[1]), 1).indices
    above_BK = torch.stack(
        [(rough_BN > rough_BN.gather(1, column_B[:, None])).sum(1) for column_B in best_BK.T], 1
    )
    return {str(c): round(100 * (above_BK < c).float().mean().item(), 2) for c in counts}


# The same in banks larger than any we can read. Blocks are made as keys, because the selector sees
# nothing else. Each is assembled from runs of neighbouring slots of several blocks of a real bank,
# and noise is added to every key. The real blocks come first, including the evidence for the
# questions. Blocks are made in small parts, and only their scores are kept: for a million 320 MB.

CANDIDATES = (128, 512, 1024, 2048, 4096, 16384)
BEST = 2
"""Number of exact best blocks that are looked for."""
BANK_SIZES = dict.fromkeys(("nano", "gpu", "paper"), (18_000, 100_000, 300_000, 1_000_000)) | {
    "stand-in": (400, 800)
}
"""Numbers of blocks by scale, in ascending order; each bank begins with the previous one."""
RUNS = 4
"""Runs of neighbouring slots in a block, each from another real block."""
NOISE = 0.5
"""Norm of the noise added to a key, whose own norm is 1: their cosine is 0.89."""
NOISES = 2**14
"""Number of noise vectors; drawing a new one for each key would take most of the time."""
PART = 100
"""Blocks made and scored together; more of them would not fit in the processor's cache."""


@torch.no_grad()
def large_banks(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall of the coarse search in banks of increasing size, and its cost against exact search.

    A sample of a set is asked, and its documents give the real blocks.
    """
    sizes, asked = BANK_SIZES[scale.size], scale.sets[cell.questions].examples(data)
    limit = min(cell.limit or len(asked), len(asked))
    model = SeDeM.from_pretrained(SHIPPED)
    examples = random.Random(0).sample(asked, limit)
    texts = dict.fromkeys(d.text for example in examples for d in example.documents)
    bank = model.read([Document(str(number), text) for number, text in enumerate(texts)])
    states, mask_BQ = encode_questions(model, model.engine, [e.question for e in examples])
    query_BQRH = model.selector.queries(states)
    real = keys_of(bank, model.selector, range(len(bank)))
    padding = key_index(bank, model.selector).padding
    scores = {kind: torch.empty(limit, sizes[-1]) for kind in ("exact", "coarse")}
    seconds = dict.fromkeys(scores, 0.0)
    found: dict[str, Any] = {}
    blocks, slots = 0, bank.blocks.slots
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
            exact_BN, coarse_BN = (scores[kind][:, :blocks] for kind in scores)
            found[str(blocks)] = {
                "recall": recall(exact_BN, coarse_BN, BEST, CANDIDATES),
                # Products of a coarse search as a percentage of those of an exact one.
                "products": {
                    str(c): 100 * (GROUPS / slots + min(1, c / blocks)) for c in CANDIDATES
                },
                "cpu_ms_per_question": {k: 1e3 * s / limit for k, s in seconds.items()},
            }
    return {
        "sizes": found,
        "candidates_cpu_ms_per_question": _candidates_ms(query_BQRH, mask_BQ, real, padding),
        "real_blocks": len(bank),
        "made": {"runs": RUNS, "noise": NOISE, "seed": 0},
        "questions": {
            "data": Path(scale.sets[cell.questions].source).name,
            "limit": limit,
            "seed": 0,
        },
        "checkpoint": SHIPPED.name,
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
            made = _made_keys(keys_NJRH, noise, count, generator)
            yield Quantized(made), torch.zeros(0, dtype=torch.long)
            done += count


def _made_keys(keys_NJRH: Tensor, noise: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Assemble unit vectors `[count, J, R, H]` from runs of real blocks without padding."""
    slots = keys_NJRH.shape[1]
    chosen = torch.randint(len(keys_NJRH), (count, RUNS), generator=generator)
    sources = chosen.repeat_interleave(-(-slots // RUNS), 1)[:, :slots]
    made = keys_NJRH[sources, torch.arange(slots)]
    made += noise[torch.randint(len(noise), (count, slots), generator=generator)]
    # In place: `F.normalize` would write all keys once more.
    return made.div_(torch.linalg.vector_norm(made, dim=-1, keepdim=True))


def _candidates_ms(
    query_BQRH: Tensor, mask_BQ: Tensor, keys_NJRH: Quantized, padding_P: Tensor
) -> float:
    """Milliseconds to score a question's candidates, one question at a time."""
    started = time.process_time()
    for row in range(len(query_BQRH)):
        question = slice(row, row + 1)
        key_scores(query_BQRH[question], mask_BQ[question], keys_NJRH, padding_P)
    spent = time.process_time() - started
    return 1e3 * spent / len(query_BQRH) * CHOSEN / len(keys_NJRH)


# How well scores predict whether the evidence is there, on articles not used for fitting

FITTED = {
    "nano": TRAINING_PART,
    "paper": Questions("SQuAD", "squad", "squad", split="train"),
}
"""The questions used to fit the confidence, by scale."""
ASKED = {"paper": Questions("SQuAD-10", "squad", "squad", split="validation")}
"""The questions used to measure it, for scales without a set in SQuAD's schema."""
DISTRACTORS = (9, 39)
"""Number of paragraphs besides the one with evidence; the first number is used for fitting."""
LIMITS = (1000, 300)
"""Number of questions for each number of paragraphs."""
THRESHOLD = 0.5

Measure = Callable[[Tensor, Tensor], float]


def confidence(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Fit a confidence to training questions, and measure it on the questions of a set.

    Each question is scored against all its paragraphs, and against all except the one with the
    evidence. By number of paragraphs: AUROC of the confidence and of each feature alone, the
    calibration error, and the shares of questions that `THRESHOLD` declines.
    """
    folder, limit = checkpoint_of(cell, scale, data), cell.limit
    model = SeDeM.from_pretrained(folder, engine="eager")
    part, fitted = Confidence(), FITTED[scale.name]
    asked = ASKED.get(scale.name) or scale.sets[cell.questions]

    def features(questions: Questions, distractors: int, most: int) -> tuple[Tensor, Tensor]:
        chosen = replace(questions, options={**questions.options, "distractors": distractors})
        examples = sample(chosen.examples(data), limit or most, 0)
        scored = score_examples(model, examples, read_examples(model, examples))
        return with_and_without_evidence(scored)

    part.fit(*features(fitted, DISTRACTORS[0], LIMITS[0]))
    measured = {
        str(1 + distractors): measure_confidence(part, *features(asked, distractors, most))
        for distractors, most in zip(DISTRACTORS, LIMITS, strict=True)
    }
    return {
        "by_paragraphs": measured,
        "fitted_to": {"data": Path(fitted.source).name, "limit": limit or LIMITS[0], "seed": 0},
        "parameters": {
            **dict(zip(FEATURES, part.weight.tolist(), strict=True)),
            "bias": part.bias.item(),
        },
        "questions": {"data": Path(asked.source).name, "seed": 0},
        "checkpoint": folder.name,
    }


@torch.no_grad()
def measure_confidence(part: Confidence, features_BF: Tensor, present_B: Tensor) -> dict[str, Any]:
    """Metrics of a confidence, each with its interval over questions.

    Args:
        features_BF: features of questions, alternately with and without the evidence.
    """
    confidence_B = part(features_BF)
    measures: dict[str, Measure] = {
        "auroc": auroc,
        "calibration_error": calibration_error,
        "declined_with_evidence": _declined(True),
        "declined_without_evidence": _declined(False),
    }
    groups = confidence_B.argsort(stable=True).tensor_split(BINS)
    return {
        **{n: _with_interval(one, confidence_B, present_B) for n, one in measures.items()},
        "auroc_of_one_feature": {
            name: _with_interval(auroc, features_BF[:, number], present_B)
            for number, name in enumerate(FEATURES)
        },
        "reliability": [
            {
                "confidence": round(float(confidence_B[group].mean()), 4),
                "with_evidence": round(float(present_B[group].float().mean()), 4),
            }
            for group in groups
            if len(group)
        ],
    }


def _declined(present: bool) -> Measure:
    """Percentage of the questions of one kind whose confidence is below the threshold."""

    def measure(confidence_B: Tensor, present_B: Tensor) -> float:
        return 100 * float((confidence_B[present_B == present] < THRESHOLD).float().mean())

    return measure


def _with_interval(measure: Measure, values_B: Tensor, present_B: Tensor) -> dict[str, Any]:
    """A metric, its 95 % bootstrap interval over questions, and the number of questions."""
    count = len(present_B) // 2
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        # Both contexts of a question are drawn together.
        first_B = 2 * torch.from_numpy(rng.integers(count, size=count))
        rows_B = torch.stack([first_B, first_B + 1], 1).flatten()
        resampled.append(measure(values_B[rows_B], present_B[rows_B]))
    low, high = np.percentile(resampled, [2.5, 97.5])
    bounds = [round(float(low), 4), round(float(high), 4)]
    return {"mean": round(measure(values_B, present_B), 4), "interval": bounds, "n": count}

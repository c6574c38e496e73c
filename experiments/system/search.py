"""Measures of selection: what keyword and coarse searches find, and what scores tell.

Letters: B questions, Q question tokens, N blocks, J slots of a block, R heads, H width of a head,
F features.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.scales import SHIPPED, Questions, Scale
from experiments.system.timing import process_bytes
from sedem import Document, MemoryBank, SeDeM
from sedem.bank.blocks import BlockRow, Blocks, Meta
from sedem.bank.codes import CodesFile, CodeSpace, mean_keys
from sedem.bank.file import BankFile
from sedem.bank.index import POSTINGS, bank_codes, keys_of, save_keys, score_words, slot_mask
from sedem.guidance import CONFIDENCE_FEATURES, Confidence
from sedem.method.segments import segment_text
from sedem.selecting.select import (
    CANDIDATES,
    CANDIDATES_ALONE,
    WORD_CANDIDATES,
    encode_questions,
    scores_of,
    telling_tokens,
)
from sedem.tensors import Quantized
from sedem_lab.baselines.bm25 import bm25_scores, index_texts
from sedem_lab.data import labels
from sedem_lab.evaluation import metrics
from sedem_lab.evaluation.run import sample
from sedem_lab.training import calibration

# BM25 over SeDeM's blocks


def block_recall(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall of the evidence by BM25 over the blocks that the selector chooses from, by K."""
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data))
    how = model.config.segment_length, model.config.segmentation
    spans: dict[str, list[tuple[int, int]]] = {}
    recalls: dict[int, list[float]] = {k: [] for k in (1, 2, 4)}
    for example in examples_of(cell, scale, data):
        rows = []
        for number, document in enumerate(example.documents):
            if (text := document.text) not in spans:
                cut = segment_text(text, model.encoder, *how)
                ends = cut.ends.gather(1, cut.lengths[:, None] - 1)[:, 0]
                spans[text] = list(zip(cut.starts[:, 0].tolist(), ends.tolist(), strict=True))
            rows += [BlockRow(number, start, end, ()) for start, end in spans[text]]
        texts = [example.documents[row.document].text[row.start : row.end] for row in rows]
        scores = bm25_scores(index_texts(texts), len(texts), example.question)
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        evidence = labels.from_evidence(rows, example.evidence)
        for k, values in recalls.items():
            values.append(metrics.recall_at(ranked, evidence, k))
    return {f"recall@{k}": metrics.summarize(values) for k, values in recalls.items()}


# Large banks. No set has a million blocks, so most are made: keys and text of each are assembled
# from runs of neighbouring slots of several blocks of a real bank, and noise is added to every key.
# The real blocks come first, including the evidence for the questions. Keys are made in small
# parts, of which only scores and codes are kept. Texts go into a bank of one number per slot.

TRAINING_PART = Questions("SQuAD, training part", "squad/train-44-articles.json", "squad")
BEST = 2
"""Number of exact best blocks that are looked for."""
BANK_SIZES = dict.fromkeys(("nano", "gpu", "paper"), (10_000, 100_000, 1_000_000)) | {
    "stand-in": (400, 800)
}
"""Numbers of blocks by scale, in ascending order; each bank begins with the previous one."""
REAL = 150
"""Number of examples whose documents are the real blocks; some of them are asked."""
RUNS = 4
"""Runs of neighbouring slots in a block, each from another real block."""
NOISE = 0.5
"""Norm of the noise added to a key, whose own norm is 1: their cosine is 0.89."""
NOISES = 2**14
"""Number of noise vectors; drawing a new one for each key would take most of the time."""
PART = 100
"""Blocks made and scored together; more of them would not fit in the processor's cache."""
COMMIT = 20
"""Parts in a commit of the bank that has their texts."""
KINDS = ("memory", "int8")
"""How keys are stored: not at all, so that they are made from memory again, or as int8."""


class Spent:
    """Wall and processor time in milliseconds, summed over each time that it was entered."""

    def __init__(self) -> None:
        self.ms = self.cpu_ms = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        now, cpu = self._started
        self.ms += 1e3 * (time.perf_counter() - now)
        self.cpu_ms += 1e3 * (time.process_time() - cpu)


class Asked(NamedTuple):
    """Questions to a large bank, with their queries, and the real blocks with the evidence."""

    questions: list[str]
    query_BQRH: Tensor
    mask_BQ: Tensor
    telling_BQ: Tensor
    evidence: list[set[int]]


@torch.no_grad()
def large_banks(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """How much of what an exact search finds is among the candidates, and the costs, by size.

    A sample of a set is asked, and its documents give the real blocks. Blocks are selected by
    states and words, and by states alone.
    """
    sizes, every = BANK_SIZES[scale.size], scale.sets[cell.questions].examples(data)
    examples = random.Random(0).sample(every, min(REAL, len(every)))
    limit = min(cell.limit or len(examples), len(examples))
    model = SeDeM.from_pretrained(SHIPPED)
    texts = dict.fromkeys(d.text for example in examples for d in example.documents)
    real = model.read([Document(str(number), text) for number, text in enumerate(texts)])
    # Queries of the questions, and the blocks with their evidence.
    questions = [example.question for example in examples[:limit]]
    states, mask_BQ = encode_questions(model, model.engine, questions)
    number_of, evidence = {text: number for number, text in enumerate(texts)}, []
    for example in examples[:limit]:
        numbers = [number_of[document.text] for document in example.documents]
        spans = [replace(span, document=numbers[span.document]) for span in example.evidence]
        evidence.append(set(np.flatnonzero(labels.from_evidence(real.blocks, spans)).tolist()))
    telling_BQ = telling_tokens(model, questions, mask_BQ)
    asked = Asked(questions, model.queries(states), mask_BQ, telling_BQ, evidence)
    scores_BN = torch.empty(limit, sizes[-1])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        stored = {kind: _stored(model, asked, real, Path(place), kind) for kind in KINDS}
        file = BankFile(Path(place) / "large.bank")
        spent = Spent()
        for blocks, keys_NJRH, padding_P in made_bank(model, real, file, sizes):
            with spent:
                scores_BN[:, blocks] = _exact_scores(asked, keys_NJRH, padding_P)
            if (size := blocks.stop) in sizes:
                bank = MemoryBank.open_from(file)
                measured = _measured(model, asked, bank, scores_BN[:, :size])
                measured["cpu_ms_per_question"]["exact"] = spent.cpu_ms / limit
                measured["search_ms"] = measured["finding_ms"] + stored["int8"]["ms"]
                found[str(size)] = measured
    source = Path(scale.sets[cell.questions].source).name
    return {
        "sizes": found,
        "candidates": stored,
        "load_average": os.getloadavg()[0],
        "real_blocks": len(real),
        "made": {"runs": RUNS, "noise": NOISE, "seed": 0},
        "questions": {"data": source, "limit": limit, "seed": 0},
        "checkpoint": SHIPPED.name,
    }


def made_bank(
    model: SeDeM, real: MemoryBank, file: BankFile, sizes: tuple[int, ...]
) -> Iterator[tuple[slice, Quantized, Tensor]]:
    """Write real blocks and those made of them: texts to a file, codes beside it, keys nowhere.

    Yields the place, keys and padding of all blocks in parts; no part crosses a size.
    """
    selector, slots, fingerprint = model.selector, real.blocks.slots, model.fingerprint()
    texts: list[list[str]] = []
    means: list[Tensor] = []

    def commit() -> None:
        """Write the texts and codes of the parts since the last commit."""
        before = file.head()
        documents, starts, ends = [], list[int](), list[int]()
        for number, part in enumerate(texts):
            documents.append(Document(f"{before.documents + number}", "\n".join(part)))
            lengths = np.array([len(text) + 1 for text in part])
            starts += (lengths.cumsum() - lengths).tolist()
            ends += (lengths.cumsum() - 1).tolist()
        owners = np.repeat(np.arange(len(documents)), [len(part) for part in texts])
        tokens = np.full((len(owners), slots), 2, np.uint8)
        blocks = Blocks(owners, np.array(starts), np.array(ends), tokens)
        memory = Quantized(torch.zeros(len(owners), slots, 1, dtype=torch.bfloat16))
        file.append(fingerprint, documents, blocks, memory)
        means_NE = torch.cat(means)
        assert file.path is not None
        with closing(CodesFile(file.path, before.id, selector.digest())) as codes:
            space = codes.space(lambda: CodeSpace.fit(means_NE))
            codes.add(before.blocks + 1 + np.arange(len(owners)), space.codes(means_NE))
        texts.clear()
        means.clear()

    with file.creating(Meta(fingerprint, {}, slots, 1)):
        pass
    generator = torch.Generator().manual_seed(0)
    keys = keys_of(real, selector, range(len(real)))
    padding = (~slot_mask(real, selector)).flatten().nonzero()[:, 0]
    own = [real.block_text(block) for block in range(len(real))]
    texts.append(own)
    means.append(mean_keys(keys, padding))
    yield slice(0, len(keys)), keys, padding
    whole = torch.ones(len(keys), dtype=torch.bool)
    whole[padding // slots] = False
    keys_NJRH = keys.values[whole].float()
    # Each text in as many runs of words.
    words = [np.array(own[block].split(), dtype=object) for block in whole.nonzero()[:, 0].tolist()]
    runs = [[" ".join(part) for part in np.array_split(one, RUNS)] for one in words]
    noise = torch.randn(NOISES, *keys_NJRH.shape[2:], generator=generator)
    noise = NOISE * F.normalize(noise, dim=-1)
    done, none = len(keys), torch.zeros(0, dtype=torch.long)
    for size in sizes:
        while done < size:
            count = min(PART, size - done)
            chosen = torch.randint(len(keys_NJRH), (count, RUNS), generator=generator)
            # Unit vectors, assembled from runs of the chosen blocks.
            sources = chosen.repeat_interleave(-(-slots // RUNS), 1)[:, :slots]
            made_NJRH = keys_NJRH[sources, torch.arange(slots)]
            made_NJRH += noise[torch.randint(NOISES, (count, slots), generator=generator)]
            # In place: `F.normalize` would write all keys once more.
            made_NJRH.div_(torch.linalg.vector_norm(made_NJRH, dim=-1, keepdim=True))
            made = Quantized(made_NJRH)
            rows = [[runs[block][run] for run, block in enumerate(row)] for row in chosen.tolist()]
            texts.append([" ".join(row) for row in rows])
            means.append(mean_keys(made, none))
            done += count
            if done == size or len(means) >= COMMIT:
                commit()
            yield slice(done - count, done), made, none


def _exact_scores(asked: Asked, keys_NJRH: Quantized, padding_P: Tensor) -> Tensor:
    """Score blocks for all questions at once `[B, N]`; `block_scores` is made for few questions."""
    lengths = asked.mask_BQ.sum(1).tolist()
    query_XRH = asked.query_BQRH[asked.mask_BQ]
    values_NJRH = keys_NJRH.values.float()
    blocks, slots, heads = values_NJRH.shape[:3]
    total_XN = torch.zeros(len(query_XRH), blocks)
    for head in range(heads):
        cosine_XL = query_XRH[:, head] @ values_NJRH[:, :, head].flatten(0, 1).T
        cosine_XL.index_fill_(1, padding_P, -torch.inf)
        total_XN += cosine_XL.view(-1, blocks, slots).amax(-1)
    return torch.stack([part.sum(0) for part in total_XN.split(lengths)]) / heads


def _measured(model: SeDeM, asked: Asked, bank: MemoryBank, states_BN: Tensor) -> dict[str, Any]:
    """What candidates hold of what the exact search finds, and the costs of finding them."""
    codes, size, count = bank_codes(bank, model.selector), len(bank), len(asked.questions)
    # What the first question to a bank reads.
    bank.snapshot().views[0].rows_of(np.zeros(1, np.int64))
    found = Counter[str]()
    words_spent, codes_spent = Spent(), Spent()

    def best_of(total_N: Tensor, count: int) -> set[int]:
        return set(total_N.topk(min(count, size)).indices.tolist())

    for row, question in enumerate(asked.questions):
        states_N = states_BN[row]
        every = score_words(bank, question).scores
        with words_spent:
            by_words = best_of(score_words(bank, question, POSTINGS).scores, WORD_CANDIDATES)
        query_E = asked.query_BQRH[row][asked.telling_BQ[row]].mean(0).flatten()
        with codes_spent:
            by_codes = set(codes.nearest(query_E, min(CANDIDATES, size)).tolist())
        alone = set(codes.nearest(query_E, min(CANDIDATES_ALONE, size)).tolist())
        both_N = states_N + model.config.word_weight * every
        for how, total_N, held in (
            ("states", states_N, alone),
            ("both", both_N, by_codes | by_words),
        ):
            best = best_of(total_N, BEST)
            found[f"best_{how}"] += len(best & held)
            evidence = best & asked.evidence[row]
            found[f"evidence_{how}"] += bool(evidence)
            found[f"held_{how}"] += bool(evidence & held)
        found["candidates"] += len(by_codes | by_words)
    # Memory of a process that searches the bank, beyond the model's.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        memory = pool.apply(_search_memory, (bank.path, asked.questions))
    shares = {
        how: {
            "evidence": 100 * found[f"evidence_{how}"] / count,
            "evidence_held": 100 * found[f"held_{how}"] / max(1, found[f"evidence_{how}"]),
            "best_held": 100 * found[f"best_{how}"] / count / BEST,
        }
        for how in ("states", "both")
    }
    times = {"words": words_spent.cpu_ms / count, "codes": codes_spent.cpu_ms / count}
    return {
        **shares,
        "candidates": found["candidates"] / count,
        "cpu_ms_per_question": times,
        "finding_ms": (words_spent.ms + codes_spent.ms) / count,
        "memory_mb": memory,
        "codes_mb": codes.words_WN.nbytes / 1e6,
    }


def _search_memory(path: Path, questions: list[str]) -> float:
    model = SeDeM.from_pretrained(SHIPPED)
    before = process_bytes("RssAnon")
    bank = MemoryBank.open(path)
    codes = bank_codes(bank, model.selector)
    for question in questions:
        score_words(bank, question, POSTINGS)
        codes.nearest(torch.ones(len(codes.space.mean_E)), min(CANDIDATES, len(bank)))
    return (process_bytes("RssAnon") - before) / 1e6


def _stored(
    model: SeDeM, asked: Asked, real: MemoryBank, place: Path, kind: str
) -> dict[str, float]:
    """Milliseconds to read and score all candidates of a question whose keys are stored so."""
    path = place / f"{kind}.bank"
    real.save(path)
    if kind != "memory":
        save_keys(real, model.selector, kind)
    opened = MemoryBank.open(path)
    count = min(CANDIDATES + WORD_CANDIDATES, len(opened))
    generator, spent = random.Random(0), Spent()
    keys_of(opened, model.selector, [0])  # the first question reads where keys are
    with spent:
        for row in range(len(asked.questions)):
            some = sorted(generator.sample(range(len(opened)), count))
            own = slice(row, row + 1)
            scores_of(model.selector, opened, asked.query_BQRH[own], asked.mask_BQ[own], some)
    share = (CANDIDATES + WORD_CANDIDATES) / count / len(asked.questions)
    return {"cpu_ms": share * spent.cpu_ms, "ms": share * spent.ms}


# How well scores predict whether the evidence is there, on articles not used for fitting

FITTED = {"nano": TRAINING_PART, "paper": Questions("SQuAD", "squad", "squad", split="train")}
"""The questions used to fit the confidence, by scale."""
ASKED = {"paper": Questions("SQuAD-10", "squad", "squad", split="validation")}
"""The questions used to measure it, for scales without a set in SQuAD's schema."""
DISTRACTORS = (9, 39)
"""Number of paragraphs besides the one with evidence; the first number is used for fitting."""
LIMITS = (1000, 300)
"""Number of questions for each number of paragraphs."""
THRESHOLD = 0.5
RESAMPLES = metrics.RESAMPLES


def confidence(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Fit a confidence to training questions, and measure it on the questions of a set.

    Each question is scored against all its paragraphs, and against all except the one with the
    evidence. By number of paragraphs: AUROC, the calibration error, and the shares of questions
    that `THRESHOLD` declines.
    """
    folder, limit = checkpoint_of(cell, scale, data), cell.limit
    model = SeDeM.from_pretrained(folder, engine="eager")
    part, fitted = Confidence(), FITTED[scale.name]
    asked = ASKED.get(scale.name) or scale.sets[cell.questions]

    def features(questions: Questions, distractors: int, most: int) -> tuple[Tensor, Tensor]:
        chosen = replace(questions, options={**questions.options, "distractors": distractors})
        examples = sample(chosen.examples(data), limit or most, 0)
        read = calibration.read_examples(model, examples)
        scored = calibration.score_examples(model, examples, read)
        return calibration.with_and_without_evidence(scored, model.config)

    part.fit(*features(fitted, DISTRACTORS[0], LIMITS[0]))
    measured = {
        str(1 + distractors): measure_confidence(part, *features(asked, distractors, most))
        for distractors, most in zip(DISTRACTORS, LIMITS, strict=True)
    }
    weights = dict(zip(CONFIDENCE_FEATURES, part.weight.tolist(), strict=True))
    return {
        "by_paragraphs": measured,
        "fitted_to": {"data": Path(fitted.source).name, "limit": limit or LIMITS[0], "seed": 0},
        "parameters": {**weights, "bias": part.bias.item()},
        "questions": {"data": Path(asked.source).name, "seed": 0},
        "checkpoint": folder.name,
    }


@torch.no_grad()
def measure_confidence(part: Confidence, features_BF: Tensor, present_B: Tensor) -> dict[str, Any]:
    """Metrics of a confidence: mean, 95 % bootstrap interval over questions, and their number.

    Args:
        features_BF: features of questions, alternately with and without the evidence.
    """
    count, rng = len(present_B) // 2, np.random.default_rng(0)
    # Both contexts of a question are drawn together.
    drawn = [2 * torch.from_numpy(rng.integers(count, size=count)) for _ in range(RESAMPLES)]
    resamples = [torch.stack([first_B, first_B + 1], 1).flatten() for first_B in drawn]
    confidence_B, found = part(features_BF), {}

    def declined(present: bool) -> Callable[[Tensor, Tensor], float]:
        """Percentage of the questions of one kind whose confidence is below the threshold."""
        return lambda values_B, of_B: (
            100 * float((values_B[of_B == present] < THRESHOLD).float().mean())
        )

    for name, metric in (
        ("auroc", metrics.auroc),
        ("calibration_error", metrics.calibration_error),
        ("declined_with_evidence", declined(True)),
        ("declined_without_evidence", declined(False)),
    ):
        resampled = [metric(confidence_B[rows_B], present_B[rows_B]) for rows_B in resamples]
        bounds = [round(float(end), 4) for end in np.percentile(resampled, [2.5, 97.5])]
        mean = round(metric(confidence_B, present_B), 4)
        found[name] = {"mean": mean, "interval": bounds, "n": count}
    return found

"""Measures of time and memory: arrivals, ways to answer, preparation, and growing banks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from typing import Any, get_args

import numpy as np
import torch

from experiments.system.answers import readings
from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.scales import Scale
from sedem import Decoding, SeDeM
from sedem.backbone.prompts import answer_ids, question_ids
from sedem.bank.blocks import BlockRow, Blocks, Meta, partition
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import MemoryBank
from sedem.config import SMALL_MODEL, Condition
from sedem.method.segments import Segments, segment_text
from sedem.selecting.plan import Request
from sedem.tensors import Quantized
from sedem.types import Document
from sedem_lab.bench.contexts import context, demo_text
from sedem_lab.data import labels
from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.training.block_dataset import BlockDataset

# Questions arriving at random times: a running batch compared with static batches. In static
# batches, the questions that wait when a batch ends are answered in the next one. Both ways answer
# the same questions at the same times. They alternate round by round, so that other work on the
# machine affects both equally.

RATES = dict.fromkeys(("nano", "gpu", "paper"), (2, 8)) | {"stand-in": (50,)}
"""Average questions per second, by scale."""
WAYS = ("static batches", "running batch")
TOKENS = 2048
"""Length of the context, in tokens."""
LIMIT = 64
"""Maximum tokens of an answer."""
SEED = 0


def arrivals(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Tokens per second and times to the first token by rate and way; medians of all rounds."""
    small = scale.stand_in
    count, rounds = (3, 1) if small else (64, 3)
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data) if small else SMALL_MODEL)
    bank = model.read(context(demo_text(), model.encoder, TOKENS))
    random, words = Random(SEED), bank.documents[0].text.split()
    requests = []
    for _ in range(count):
        start, length = random.randrange(len(words) - 12), random.randint(1, 12)
        phrase = " ".join(words[start : start + length])
        requests.append(Request(bank, f"What is said about '{phrase}'?", random.choice([1, 2, 4])))
    found: dict[str, Any] = {}
    for rate in RATES[scale.size]:
        clock = Random(SEED)
        times = np.cumsum([clock.expovariate(rate) for _ in requests]).tolist()
        for way in WAYS:  # allocates what later runs use
            _serve(model, way, requests[: model.engine.batch_size], times)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, of_way in runs.items():
                of_way.append(_serve(model, way, requests, times))
        found[str(rate)] = {
            way: {name: median(run[name] for run in of_way) for name in of_way[0]}
            for way, of_way in runs.items()
        }
    settings = {"questions": count, "rounds": rounds, "tokens": TOKENS, "seed": SEED}
    load, rows = os.getloadavg()[0], model.engine.batch_size
    return {"rates": found, **settings, "rows": rows, "load_average": load}


def _serve(
    model: SeDeM, way: str, requests: Sequence[Request], times: Sequence[float]
) -> dict[str, float]:
    """Tokens per second, and milliseconds from the arrival of a question to its first token."""
    most = model.engine.batch_size if way == WAYS[0] else 1
    first, ends, lengths = list[float](), list[float](), list[int]()
    replies: list[tuple[float, float, Any]] = []
    start = time.perf_counter()
    with model.scheduler() as scheduler:
        while len(replies) < len(requests):
            at = len(replies)
            time.sleep(max(0.0, times[at] - (time.perf_counter() - start)))
            now = time.perf_counter() - start
            batch = [n for n in range(at, min(at + most, len(requests))) if times[n] <= now]
            for n in batch or [at]:
                reply = scheduler.submit(requests[n], Decoding(LIMIT))
                replies.append((times[n], time.perf_counter() - start, reply))
            if way == WAYS[0]:
                for _, _, reply in replies[at:]:
                    reply.result()
        for arrived, asked, reply in replies:
            answer = reply.result()
            first.append(1e3 * (asked - arrived) + answer.timings["ttft_ms"])
            ends.append(asked + 1e-3 * answer.timings["total_ms"])
            lengths.append(len(model.decoder.token_ids(answer.text)))
    return {
        "tokens_s": sum(lengths) / (max(ends) - times[0]),
        "ttft_median_ms": median(first),
        "ttft_p99_ms": quantiles(first, n=100, method="inclusive")[-1],
        "end_mean_ms": 1e3 * mean(end - at for end, at in zip(ends, times, strict=False)),
        "answer_tokens": mean(lengths),
    }


# Questions to prebuilt banks, asked in several ways

ROUNDS = 3
ASKED: dict[str, dict[str, Any]] = {
    "free": {"answer": "free"},
    "free, two hops": {"answer": "free", "hops": 2},
    "quoted by memory alone": {"answer": "span", "again": False},
    "quoted": {"answer": "span"},
}
"""Ways, with fields of their questions; `again` is whether sentences are read a second time."""


def _in_turn(
    cell: Cell, scale: Scale, data: Path, ways: Mapping[Any, dict[str, Any]], limit: int | None
) -> Iterator[tuple[int, int, int, dict[Any, Mapping[str, float]]]]:
    """Yield bytes of memory and of text, tokens, and the times by way of single questions.

    Kept keys and values exist before the first question is timed. Ways alternate, so that a busy
    machine slows them all down equally. The shortest of `ROUNDS` answers counts.
    """
    folder = checkpoint_of(cell, scale, data)
    model = SeDeM.from_pretrained(folder, dtype=getattr(torch, cell.dtype or scale.dtype))
    decoding = Decoding(max_new_tokens=limit)
    for example in examples_of(cell, scale, data):
        bank = model.read(example.documents)
        if model.config.block_context == "independent":
            model.warm(bank)
        asked: dict[Any, list[Mapping[str, float]]] = {way: [] for way in ways}
        for _ in range(1 + ROUNDS):
            for way, fields in ways.items():
                how = {name: value for name, value in fields.items() if name != "again"}
                with readings(model, again=fields.get("again", True)):
                    answer = model.answer(bank, example.question, decoding=decoding, **how)
                asked[way].append(answer.timings)
        shortest = {way: min(one[1:], key=itemgetter("total_ms")) for way, one in asked.items()}
        text = sum(len(document.text.encode()) for document in example.documents)
        yield bank.memory_bytes, text, bank.tokens, shortest


def condition_times(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Milliseconds to the first token by condition and K, and bytes per token by condition."""
    conditions: tuple[Condition, ...] = get_args(Condition)
    ways = {(c, k): {"condition": c, "k": k} for c in conditions for k in (1, 2, 4, 8)}
    times: dict[Condition, dict[str, float]] = {c: {} for c in conditions}
    asked = [*_in_turn(cell, scale, data, ways, 1)]
    for condition, k in ways:
        found = [shortest[condition, k]["ttft_ms"] for *_, shortest in asked]
        times[condition][str(k)] = median(found)
    memory, text, tokens = (sum(one[place] for one in asked) for place in range(3))
    # The selector needs the memory of every block, whatever the decoder reads.
    sizes = {c: round((memory + text * (c != "memory")) / tokens, 1) for c in conditions}
    return {"times": times, "bytes": sizes, "questions": len(asked)}


def answer_times(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Milliseconds to the first token and to the end, by way; a quotation comes as a whole."""
    ways = {way: {"k": cell.k, **fields} for way, fields in ASKED.items()}
    asked = [found for *_, found in _in_turn(cell, scale, data, ways, cell.max_new_tokens)]
    times = {
        way: {name: median(one[way][name] for one in asked) for name in ("ttft_ms", "total_ms")}
        for way in ways
    }
    return {"times": times, "questions": len(asked), "load_average": os.getloadavg()[0]}


# Preparing questions for stage 2: one text at a time, together, and again from disk

ANSWER_LIMIT = 64


@dataclass(frozen=True)
class PreparedExample:
    """One example, prepared text by text: segments, blocks and slots of each document.

    `question` is in the encoder's tokens; `prefix` and `answer` are in the decoder's.
    """

    documents: list[tuple[Segments, list[BlockRow], torch.Tensor]]
    evidence: list[bool]
    question: list[int]
    prefix: list[int]
    answer: list[int]


def one_by_one(model: SeDeM, examples: Sequence[Example]) -> list[PreparedExample]:
    """Prepare examples with the functions that read a single document and ask a single question."""
    config, known = model.config, {}
    prepared = []
    for example in examples:
        for document in example.documents:
            if document.text not in known:
                how = config.segment_length, config.segmentation, config.segment_shift
                segments = segment_text(document.text, model.encoder, *how)
                parts = partition(segments, 0, config.compression, config.slots_per_block)
                known[document.text] = (segments, *parts)
        documents = [known[document.text] for document in example.documents]
        rows = [
            BlockRow(number, row.start, row.end, row.slot_tokens)
            for number, (_, blocks, _) in enumerate(documents)
            for row in blocks
        ]
        evidence = labels.from_evidence(rows, example.evidence)
        question = model.encoder.token_ids(example.question.strip())
        prefix = question_ids(model.decoder, example.question)
        answer = answer_ids(model.decoder, example.answers[0])
        prepared.append(PreparedExample(documents, evidence, question, prefix, answer))
    return prepared


def preparation(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Processor time and bytes per example; the ways alternate, round by round.

    Processor time depends less on other work on the machine than wall time. It does not show the
    benefit of more cores for texts that are tokenized together.
    """
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data), engine="eager")
    examples = examples_of(cell, scale, data)

    def prepare(cache: Path | None) -> BlockDataset:
        dataset = BlockDataset(model, ANSWER_LIMIT, cache=cache)
        dataset.add(ExampleSet("questions", examples), "evidence")
        return dataset

    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare(Path(folder))
        ways: dict[str, Callable[[], object]] = {
            "one by one": partial(one_by_one, model, examples),
            "together": partial(prepare, None),
            "from disk": partial(prepare, Path(folder)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                start = time.process_time()
                way()
                seconds[name].append(time.process_time() - start)
    slow = seconds["one by one"]
    return {
        "examples": len(dataset),
        "tokens": len(dataset.segments.values),
        "bytes": sum(array.nbytes for array in dataset.arrays.values()) / len(dataset),
        "milliseconds": {n: 1000 * median(s) / len(examples) for n, s in seconds.items()},
        "times_sooner": {
            name: median(before / after for before, after in zip(slow, own, strict=True))
            for name, own in seconds.items()
        },
        "load_average": os.getloadavg()[0],
    }


# A bank on disk as it grows. Its blocks have the slots of a 1B model at C=4 and a width of eight:
# a million of them fit on a small disk, and the measured costs do not depend on the width.

GROWN = dict.fromkeys(("nano", "gpu", "paper"), (10_000, 100_000, 1_000_000)) | {
    "stand-in": (800, 4_000)
}
"""Numbers of blocks by scale, in ascending order."""
SLOTS, WIDTH = 32, 8
DOCUMENTS, BLOCKS_OF_ONE = 80, 10
"""Documents per commit and blocks per document: a commit has as many blocks as in `build`."""
COMMITS = 9
"""Number of commits timed at each size."""
SELECTED, QUESTIONS = 8, 200
"""Blocks read per question, and number of questions."""
PRINT = "0" * 64


def bank_size(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Grow a bank and measure it at each size, in processor time.

    By number of blocks: seconds to open the bank, megabytes it then takes, seconds and megabytes of
    reading the spans of all blocks, which the first question needs, and milliseconds of reading
    some blocks by number, of a commit and of loading one.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        store = BankFile(Path(place) / "large.bank")
        with store.creating(Meta(PRINT, {}, SLOTS, WIDTH)):
            pass
        commits = 0
        for size in GROWN[scale.size]:
            times: list[float] = []
            while commits * DOCUMENTS * BLOCKS_OF_ONE < size:
                times.append(_commit(store, commits))
                commits += 1
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                opened = pool.apply(_open, (store.path,))
            found[str(size)] = {
                "commit_ms": 1e3 * median(times[-COMMITS:]),
                **opened,
                "reload_ms": _reload(store, commits),
            }
            commits += 1
    of_commit = DOCUMENTS * BLOCKS_OF_ONE
    return {"sizes": found, "slots": SLOTS, "commit_blocks": of_commit}


def _commit(store: BankFile, number: int) -> float:
    """Append documents of random memory; return the seconds of processor time."""
    generator = torch.Generator().manual_seed(number)
    count = DOCUMENTS * BLOCKS_OF_ONE
    memory = torch.randn(count, SLOTS, WIDTH, generator=generator).bfloat16()
    documents = [
        Document(f"{number}/{index}", f"document {index} of commit {number}. " * 100)
        for index in range(DOCUMENTS)
    ]
    starts = np.tile(np.arange(BLOCKS_OF_ONE) * 100, DOCUMENTS)
    blocks = Blocks(
        np.repeat(np.arange(DOCUMENTS), BLOCKS_OF_ONE),
        starts,
        starts + 100,
        np.full((count, SLOTS), 4, np.uint8),
    )
    start = time.process_time()
    store.append(PRINT, documents, blocks, Quantized(memory))
    return time.process_time() - start


def _reload(store: BankFile, commits: int) -> float:
    """Milliseconds until an open bank shows a commit of another process."""
    bank = MemoryBank.open_from(store)
    assert len(bank.blocks)
    _commit(store, commits)
    start = time.process_time()
    bank.reload()
    assert len(bank.blocks)
    return 1e3 * (time.process_time() - start)


def _open(path: Path) -> dict[str, float]:
    """Processor time and memory to open a bank, in a process that has imported everything."""
    found: dict[str, float] = {}

    def measured(name: str, work: Callable[[], Any]) -> Any:
        before, start = process_bytes("RssAnon"), time.process_time()
        result = work()
        found[f"{name}_s"] = time.process_time() - start
        found[f"{name}_mb"] = (process_bytes("RssAnon") - before) / 1e6
        return result

    bank = measured("open", lambda: MemoryBank.open(path))
    count = measured("spans", lambda: len(bank.blocks))
    drawn = np.random.default_rng(0).integers(count, size=(QUESTIONS, SELECTED)).tolist()
    start = time.process_time()
    for blocks in drawn:
        bank.memory(blocks)
    found["select_ms"] = 1e3 * (time.process_time() - start) / QUESTIONS
    return found


PROCESS = Path("/proc/self")


def process_bytes(name: str) -> int:
    """A size of this process, by its name in /proc; RssAnon is memory without mapped files."""
    lines = (PROCESS / "status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])

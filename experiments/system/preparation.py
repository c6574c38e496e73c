"""Time to prepare questions for stage 2: one text at a time, together, and again from disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sedem.answering.prompts import answer_ids, question_ids
from sedem.bank.blocks import BlockRow, partition
from sedem.data import labels
from sedem.method.segments import Segments, segment_text

if TYPE_CHECKING:
    from torch import Tensor

    from sedem.data.examples import Example
    from sedem.model import SeDeM

ROUNDS = 3
ANSWER_LIMIT = 64


@dataclass(frozen=True)
class PreparedExample:
    """One example, prepared text by text, as for building a bank.

    Attributes:
        documents: segments, blocks and slots of each document.
        evidence: whether each block contains evidence.
        question: encoder tokens of the question.
        prefix: decoder tokens of the prompt.
        answer: decoder tokens of the answer.
    """

    documents: list[tuple[Segments, list[BlockRow], Tensor]]
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
                segments = segment_text(
                    document.text,
                    model.encoder,
                    config.segment_length,
                    config.segmentation,
                    config.segment_shift,
                )
                parts = partition(segments, 0, config.compression, config.slots_per_block)
                known[document.text] = (segments, *parts)
        documents = [known[document.text] for document in example.documents]
        rows = [
            BlockRow(number, row.start, row.end, row.slot_tokens)
            for number, (_, blocks, _) in enumerate(documents)
            for row in blocks
        ]
        prepared.append(
            PreparedExample(
                documents,
                labels.from_evidence(rows, example.evidence),
                model.encoder.token_ids(example.question.strip()),
                question_ids(model.decoder, example.question),
                answer_ids(model.decoder, example.answers[0]),
            )
        )
    return prepared


def measure_preparation(model: SeDeM, examples: Sequence[Example]) -> dict[str, Any]:
    """Processor time and bytes per example; the ways alternate, round by round.

    Processor time depends less on other work on the machine than wall time. It does not show the
    benefit of more cores for texts that are tokenized together.

    Args:
        model: gives tokenizers and the shape of blocks.
        examples: the questions.

    Returns:
        `milliseconds` by way (medians over the rounds), `times_sooner` (speed-up over one by one),
        and `bytes` per example in the arrays.
    """
    from statistics import median

    from sedem.data.examples import ExampleSet
    from sedem.provenance import provenance
    from sedem.training.block_dataset import BlockDataset

    questions = ExampleSet("questions", list(examples))

    def prepare(cache: Path | None) -> BlockDataset:
        dataset = BlockDataset(model, ANSWER_LIMIT, cache=cache)
        dataset.add(questions, "evidence")
        return dataset

    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare(Path(folder))
        ways: dict[str, Callable[[], object]] = {
            "one by one": lambda: one_by_one(model, examples),
            "together": lambda: prepare(None),
            "from disk": lambda: prepare(Path(folder)),
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
        **provenance(),
    }

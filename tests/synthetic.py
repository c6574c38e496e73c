"""A synthetic bank and questions of all kinds, to compare answers of one machine with others'."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.answering.decoding import Decoding
from sedem.bank.blocks import BlockRow
from sedem.errors import SedemError
from sedem.guidance import Auto
from sedem.selecting.plan import Request
from sedem.tensors import BFLOAT16, quantize
from sedem.types import Answer

WORDS = (
    "harbour lease tenant cocoa rent signed river storm winter ledger captain garden music "
    "engine mountain letter bridge market silver orchard"
).split()
TOKENS = 6
"""Of an answer, at most."""


def synthetic_bank(model: SeDeM, documents: int, blocks: int = 4, seed: int = 7) -> MemoryBank:
    """A bank of random memory; nothing is read.

    Args:
        model: the model that can be asked about it.
        documents: how many. Every third one has the memory of the one before, for ties.
        blocks: of each document; the last one is short.
        seed: of texts and memory.
    """
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    small = model.read([Document("a", "b")])
    slots, width = small.meta.slots, small.meta.width
    texts, rows, memory = [], [], []
    for number in range(documents):
        spans = [" ".join(chooser.choices(WORDS, k=4)) + " " for _ in range(blocks)]
        texts.append(Document(f"doc-{seed}-{number}.txt", "".join(spans)))
        ends = list(accumulate(len(span) for span in spans))
        for index, (span, end) in enumerate(zip(spans, ends, strict=True)):
            short = index == blocks - 1
            tokens = tuple(0 if short and slot else 4 for slot in range(slots))
            rows.append(BlockRow(number, end - len(span), end, tokens))
        same = number % 3 == 2
        memory.append(
            memory[-1] if same else torch.randn(blocks, slots, width, generator=generator)
        )
    stored = quantize(torch.cat(memory), BFLOAT16)
    return MemoryBank(small.fingerprint, small.made_by, texts, rows, stored)


def synthetic_questions(
    count: int, names: Sequence[str], seed: int = 11
) -> list[tuple[str, dict[str, Any]]]:
    """Questions, each with the fields of its request; every kind of selection comes up.

    Args:
        count: how many.
        names: of the documents that may be asked.
        seed: of the choice.
    """
    chooser = random.Random(seed)
    budgets = (None, 1, 2, 5, 40, "all", "auto", Auto(0.5, 1, 12), 0)
    questions = []
    for number in range(count):
        text = " ".join(chooser.choices(WORDS, k=1 + number % 5)) + "?"
        fields: dict[str, Any] = {"k": budgets[number % len(budgets)]}
        if number % 7 == 3:
            fields["documents"] = chooser.sample(list(names), 3)
        if number % 11 == 5:
            fields["ranking"] = True
        if number % 13 == 6:
            fields["condition"] = ("memory", "text", "both")[number % 3]
        if number % 17 == 8:
            fields["min_confidence"] = 0.5
        questions.append((text, fields))
    return questions


def decoding_of(number: int) -> Decoding:
    """How the answer to a question is generated: most greedily, some are sampled with a seed."""
    return Decoding(TOKENS, temperature=0.7 if number % 5 == 4 else 0.0, seed=number)


def answer_or_error(model: SeDeM, request: Request, decoding: Decoding) -> Answer | str:
    """The answer of one machine, or the sentence of its error."""
    try:
        return model.answer_requests([request], decoding)[0]
    except SedemError as error:
        return str(error)

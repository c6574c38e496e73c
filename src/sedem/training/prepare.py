"""Examples as token ids, blocks and labels: what stage 2 is fed with.

Letters: B batch, S segments of a batch, T tokens, N blocks, J slots of a block, Q question tokens,
P prefix and answer tokens, A answer tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import BlockRow, partition
from sedem.config import SedemConfig
from sedem.data import labels
from sedem.data.examples import Example
from sedem.data.labels import Labelling
from sedem.errors import DataError
from sedem.inference.prompts import answer_ids, question_ids
from sedem.method.losses import IGNORED
from sedem.method.segments import segment_text
from sedem.training.encodings import Encodings
from sedem.training.items import Items


class Blocked(Protocol):
    """Whatever selects among blocks: whose tokens, and the shape of a block."""

    @property
    def encoder(self) -> Backbone:
        """Reads documents and questions."""
        ...

    @property
    def decoder(self) -> Backbone:
        """Reads prompts and answers."""
        ...

    @property
    def config(self) -> SedemConfig:
        """Segments, slots and blocks."""
        ...


@dataclass(frozen=True)
class Text:
    """One document, segmented once however many examples hold it.

    Attributes:
        first: number of its first segment among all segments.
        blocks: its blocks.
        slots: slots of each block `[N, J]`, counted over its segments; -1 is padding.
    """

    first: int
    blocks: list[BlockRow]
    slots: Tensor


@dataclass(frozen=True)
class Item:
    """One example.

    Attributes:
        blocks: text and block of each of its blocks, in document order.
        evidence: label of each block.
        question: number of the question among all questions.
        prefix: start token, prompt and question, in decoder tokens.
        answer: target tokens, end token included.
    """

    blocks: list[tuple[int, int]]
    evidence: list[bool]
    question: int
    prefix: list[int]
    answer: list[int]


@dataclass
class Prepared(Items[Item]):
    """All examples of a training, tokenized and labelled.

    Attributes:
        model: whose tokenizers and shape count.
        answer_limit: examples with longer answers are left out of training, counted.
    """

    model: Blocked
    answer_limit: int
    texts: list[Text] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)
    questions: list[list[int]] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)

    def item(self, example: Example, labelling: Labelling) -> Item | None:
        """Blocks, their labels, prompt and answer of an example."""
        answer = answer_ids(self.model.decoder, example.answers[0])
        if len(answer) > self.answer_limit:
            self.dropped[f"answer longer than {self.answer_limit} tokens"] += 1
            return None
        numbers = [self._text(document.text) for document in example.documents]
        blocks = [(t, b) for t in numbers for b in range(len(self.texts[t].blocks))]
        rows = [
            BlockRow(d, row.start, row.end, row.slot_tokens)
            for d, t in enumerate(numbers)
            for row in self.texts[t].blocks
        ]
        if labelling == "evidence":
            evidence = labels.from_evidence(rows, example.evidence)
        else:
            evidence = labels.from_answers(rows, example.documents, example.answers)
        self.questions.append(self.model.encoder.token_ids(example.question.strip()))
        prefix = question_ids(self.model.decoder, example.question)
        return Item(blocks, evidence, len(self.questions) - 1, prefix, answer)

    def _text(self, text: str) -> int:
        if text not in self._known:
            config = self.model.config
            segments = segment_text(
                text,
                self.model.encoder,
                config.segment_length,
                config.segmentation,
                config.segment_shift,
            )
            blocks, slots = partition(segments, 0, config.compression, config.slots_per_block)
            self._known[text] = len(self.texts)
            self.texts.append(Text(len(self.segments), blocks, slots))
            for ids, length in zip(segments.ids.tolist(), segments.lengths.tolist(), strict=True):
                self.segments.append(ids[:length])
        return self._known[text]


class Collator:
    """Examples as a batch of tensors.

    Args:
        prepared: where they come from.
        max_blocks: blocks of one example in training; evidence stays, others are sampled.
        budgets: K of a batch is one of these.
        seed: of sampling; what is sampled depends on the batch alone, so a resumed run samples
            alike.
        cache: folder of frozen states; None means that states are computed in every step.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        max_blocks: int,
        budgets: Sequence[int],
        seed: int,
        cache: Path | None,
    ) -> None:
        if not len(prepared):
            raise DataError("no example is left to train on; see what was dropped and why")
        self.prepared = prepared
        self.max_blocks = max_blocks
        self.budgets = tuple(budgets)
        self.seed = seed
        self.states: Encodings | None = None
        self.question_states: Encodings | None = None
        if cache is not None:
            encoder, layers = prepared.model.encoder, prepared.model.config.extract_layers
            self.states = Encodings.of(encoder, layers, prepared.segments, cache, "segments")
            self.question_states = Encodings.of(
                encoder, layers, prepared.questions, cache, "questions"
            )

    def __call__(self, items: list[Item]) -> dict[str, Any]:
        """The entries of a `SelectionBatch`."""
        rng = random.Random(f"{self.seed}:{[item.question for item in items]}")
        chosen = [self._blocks(item, rng) for item in items]
        used = sorted(
            {
                segment
                for item, kept in zip(items, chosen, strict=True)
                for at in kept
                for segment in self._segments(item.blocks[at])
            }
        )
        compression = self.prepared.model.config.compression
        longest = max(len(self.prepared.segments[segment]) for segment in used)
        slots = -(-longest // compression)
        batch: dict[str, Any] = self._layout(items, chosen, used, slots)
        batch["budget"] = rng.choice(self.budgets)
        batch["coins"] = torch.tensor([rng.random() for _ in items])
        batch["segment_ids"], batch["segment_mask"] = _padded(
            [self.prepared.segments[segment] for segment in used], slots * compression
        )
        questions = [item.question for item in items]
        batch["question_ids"], batch["question_mask"] = _padded(
            [self.prepared.questions[question] for question in questions]
        )
        if self.states is not None and self.question_states is not None:
            states = self.states.batch(used)
            missing = slots * compression - states.shape[2]
            batch["states"] = torch.nn.functional.pad(states, (0, 0, 0, missing))
            batch["question_states"] = self.question_states.batch(questions)
        return {**batch, **targets([(item.prefix, item.answer) for item in items])}

    def _layout(
        self, items: list[Item], chosen: list[list[int]], used: list[int], slots: int
    ) -> dict[str, Tensor]:
        """Where the slots of each block stand among those of the batch's segments, and labels."""
        config = self.prepared.model.config
        place = {segment: row for row, segment in enumerate(used)}
        shape = (len(items), max(map(len, chosen)), config.slots_per_block)
        slot_index = torch.full(shape, -1)
        slot_tokens = torch.zeros(shape, dtype=torch.long)
        evidence = torch.zeros(shape[:2], dtype=torch.bool)
        blocks = torch.zeros(shape[:2], dtype=torch.bool)
        for b, (item, kept) in enumerate(zip(items, chosen, strict=True)):
            for n, at in enumerate(kept):
                number, row = item.blocks[at]
                text = self.prepared.texts[number]
                slot_tokens[b, n] = torch.tensor(text.blocks[row].slot_tokens)
                own = text.slots[row]
                batch_row = torch.tensor(
                    [place[text.first + s // config.slots] if s >= 0 else 0 for s in own.tolist()]
                )
                index = batch_row * slots + own % config.slots
                slot_index[b, n] = torch.where(slot_tokens[b, n] > 0, index, -1)
                evidence[b, n] = item.evidence[at]
                blocks[b, n] = True
        return {
            "slot_index": slot_index,
            "slot_tokens": slot_tokens,
            "blocks": blocks,
            "evidence": evidence,
        }

    def _blocks(self, item: Item, rng: random.Random) -> list[int]:
        if len(item.blocks) <= self.max_blocks:
            return list(range(len(item.blocks)))
        positive = [i for i, label in enumerate(item.evidence) if label][: self.max_blocks]
        rest = [i for i in range(len(item.blocks)) if i not in positive]
        return sorted(positive + rng.sample(rest, self.max_blocks - len(positive)))

    def _segments(self, block: tuple[int, int]) -> list[int]:
        text = self.prepared.texts[block[0]]
        slots = text.slots[block[1]]
        per_segment = self.prepared.model.config.slots
        return sorted({text.first + s // per_segment for s in slots.tolist() if s >= 0})


def targets(pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Prefix and answer as decoder input, padded on the left, and the tokens to predict.

    Args:
        pairs: prefix and answer of each row.

    Returns:
        `ids` and `valid` `[B, P]`, and `labels` of the last positions `[B, A]`.
    """
    inputs, labels = [], []
    for prefix, answer in pairs:
        ids = [*prefix, *answer]
        inputs.append(torch.tensor(ids[:-1]))
        labels.append(torch.tensor([IGNORED] * (len(prefix) - 1) + answer))
    ids_BP = pad_sequence(inputs, batch_first=True, padding_side="left")
    labels_BP = pad_sequence(labels, batch_first=True, padding_value=IGNORED, padding_side="left")
    lengths_B1 = torch.tensor([[len(row)] for row in inputs])
    valid_BP = torch.arange(ids_BP.shape[1], 0, -1) <= lengths_B1
    longest = max(len(answer) for _, answer in pairs)
    return {"ids": ids_BP, "valid": valid_BP, "labels": labels_BP[:, -longest:]}


def _padded(rows: list[list[int]], length: int | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and mask, padded on the right."""
    width = length or max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = True
    return ids, mask

"""Examples with their documents cut into blocks, the training set of a method that selects blocks.

Letters: N blocks, J slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import BlockRow, partition
from sedem.config import SedemConfig
from sedem.data import labels
from sedem.data.examples import Example
from sedem.data.labels import Labelling
from sedem.inference.prompts import answer_ids, question_ids
from sedem.method.segments import segment_text
from sedem.training.example_dataset import ExampleDataset


class BlockModel(Protocol):
    """A model that selects among blocks: its tokenizers and the shape of its blocks."""

    @property
    def encoder(self) -> Backbone:
        """Backbone that reads documents and questions."""
        ...

    @property
    def decoder(self) -> Backbone:
        """Backbone that reads prompts and writes answers."""
        ...

    @property
    def config(self) -> SedemConfig:
        """Shape of segments, slots and blocks."""
        ...


@dataclass(frozen=True)
class SegmentedDocument:
    """One document, segmented once even if several examples contain it.

    Attributes:
        first_segment: index of its first segment among all segments of the dataset.
        blocks: its blocks.
        slots: slots of each block `[N, J]`, counted over the document's segments; -1 is padding.
        text: the document.
    """

    first_segment: int
    blocks: list[BlockRow]
    slots: Tensor
    text: str

    def block_text(self, index: int) -> str:
        """The text behind a block."""
        return self.text[self.blocks[index].start : self.blocks[index].end]


@dataclass(frozen=True)
class BlockItem:
    """One example.

    Attributes:
        blocks: document and block index of each of its blocks, in document order.
        evidence: whether each block holds evidence.
        question: index of its question among all questions of the dataset.
        prefix: start token, prompt and question, in decoder tokens.
        answer: target tokens, end token included.
    """

    blocks: list[tuple[int, int]]
    evidence: list[bool]
    question: int
    prefix: list[int]
    answer: list[int]


@dataclass
class BlockDataset(ExampleDataset[BlockItem]):
    """All examples of a training run, tokenized, cut into blocks and labelled.

    Attributes:
        model: gives the tokenizers and the shape of blocks.
        answer_limit: examples with more answer tokens are left out and counted.
        documents: each distinct document.
        segments: encoder tokens of each segment.
        questions: encoder tokens of each question.
    """

    model: BlockModel
    answer_limit: int
    documents: list[SegmentedDocument] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)
    questions: list[list[int]] = field(default_factory=list)
    _document_indices: dict[str, int] = field(default_factory=dict)

    def convert(self, example: Example, labelling: Labelling) -> BlockItem | None:
        """Blocks, their labels, prompt and answer of an example."""
        answer = answer_ids(self.model.decoder, example.answers[0])
        if len(answer) > self.answer_limit:
            self.dropped[f"answer longer than {self.answer_limit} tokens"] += 1
            return None
        indices = [self._document_index(document.text) for document in example.documents]
        blocks = [(d, b) for d in indices for b in range(len(self.documents[d].blocks))]
        rows = [
            BlockRow(number, row.start, row.end, row.slot_tokens)
            for number, d in enumerate(indices)
            for row in self.documents[d].blocks
        ]
        if labelling == "evidence":
            evidence = labels.from_evidence(rows, example.evidence)
        else:
            evidence = labels.from_answers(rows, example.documents, example.answers)
        self.questions.append(self.model.encoder.token_ids(example.question.strip()))
        prefix = question_ids(self.model.decoder, example.question)
        return BlockItem(blocks, evidence, len(self.questions) - 1, prefix, answer)

    def _document_index(self, text: str) -> int:
        """Index of a document among `documents`; it is segmented when first seen."""
        if text not in self._document_indices:
            config = self.model.config
            segments = segment_text(
                text,
                self.model.encoder,
                config.segment_length,
                config.segmentation,
                config.segment_shift,
            )
            blocks, slots = partition(segments, 0, config.compression, config.slots_per_block)
            self._document_indices[text] = len(self.documents)
            self.documents.append(SegmentedDocument(len(self.segments), blocks, slots, text))
            for ids, length in zip(segments.ids.tolist(), segments.lengths.tolist(), strict=True):
                self.segments.append(ids[:length])
        return self._document_indices[text]

"""Examples with documents cut into blocks, the training set of methods that select blocks.

Letters: N blocks, J slots of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import all_answer_ids, all_question_ids
from sedem.bank.blocks import BlockRow
from sedem.config import SedemConfig
from sedem.method.segments import boundaries_of, pieces_of
from sedem.model import SeDeM
from sedem.types import check_tokens
from sedem_lab.data import labels
from sedem_lab.data.examples import Example
from sedem_lab.data.labels import Labelling
from sedem_lab.training.example_dataset import ExampleDataset, Ragged


class BlockModel(NamedTuple):
    """The tokenizers of a model that selects among blocks, and the shape of its blocks."""

    encoder: Backbone
    decoder: Backbone
    config: SedemConfig


@dataclass(frozen=True)
class BlockItem:
    """One example."""

    blocks: list[tuple[int, int]]  # document and block index of each, in document order
    evidence: list[bool]  # whether each block holds evidence
    question: int  # index of its question among all questions of the dataset
    prefix: list[int]  # start token, prompt and question, in decoder tokens
    answer: list[int]  # target tokens, end token included


@dataclass
class BlockDataset(ExampleDataset[BlockItem]):
    """All examples of a training run, tokenized, cut into blocks and labelled.

    A document is stored once even if several examples contain it.

    Attributes:
        answer_limit: examples with more answer tokens are left out and counted.
    """

    model: BlockModel | SeDeM
    answer_limit: int

    @property
    def segments(self) -> Ragged:
        """Encoder tokens of each segment of all documents."""
        return self.arrays["segments"]

    @property
    def questions(self) -> Ragged:
        """Encoder tokens of each question."""
        return self.arrays["questions"]

    @property
    def most_blocks(self) -> int:
        """Number of blocks of the example that has the most; 0 without examples."""
        return int(self.arrays["evidence"].lengths.max(initial=0))

    def example_lengths(self) -> NDArray[np.int64]:
        """Count the tokens of blocks, as if each were full, prompt and answer."""
        width = self.model.config.slots_per_block * self.model.config.compression
        text = self.arrays["prefixes"].lengths + self.arrays["answers"].lengths
        return self.arrays["evidence"].lengths * width + text

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that decide tokens, blocks, and which answers are too long."""
        config, decoder = self.model.config, self.model.decoder
        return {
            "kind": "blocks",
            "encoder": self.model.encoder.vocabulary,
            "decoder": [decoder.vocabulary, decoder.bos_token_id, decoder.eos_token_id],
            "segments": [config.segmentation, config.segment_length, config.segment_shift],
            "blocks": [config.compression, config.slots_per_block],
            "answer_limit": self.answer_limit,
            **({"chat": asdict(decoder.chat)} if config.chat_template else {}),
        }

    def prepare(self, batches: Iterator[list[Example]], labelling: Labelling) -> dict[str, Ragged]:
        """New documents, and blocks, their labels, prompt and answer of each example."""
        model, before, chat = self.model, self.arrays, self.model.config.chat_template
        types = {
            "segments": np.int32,  # encoder tokens of each segment
            "owned": np.int32,  # first segment and number of segments of each document
            "blocks": np.int32,  # of each document; three numbers per block, as in `block_rows`
            "texts": np.uint8,  # of each document, in UTF-8
            "digests": np.uint8,  # of each document
            "contexts": np.int32,  # documents of each example
            "evidence": np.uint8,  # of each example; 1 for a block with evidence
            "questions": np.int32,  # encoder tokens of each question
            "prefixes": np.int32,  # decoder tokens of each prompt
            "answers": np.int32,  # decoder tokens of each answer
        }
        parts = [{name: Ragged.of([], dtype) for name, dtype in types.items()}]
        # The documents of what was added before, by their digests, and the blocks of each.
        known = before.get("digests", ())
        numbers = {digest.tobytes(): number for number, digest in enumerate(known)}
        blocks = [self.block_rows(document).tolist() for document in range(len(known))]
        segmented = len(before["segments"]) if before else 0
        for batch in batches:
            answers = all_answer_ids(model.decoder, [e.answers[0] for e in batch], chat=chat)
            pairs = zip(batch, answers, strict=True)
            usable = [(example, ids) for example, ids in pairs if len(ids) <= self.answer_limit]
            if len(usable) < len(batch):
                reason = f"answer longer than {self.answer_limit} tokens"
                self.dropped[reason] += len(batch) - len(usable)
            if not usable:
                continue
            examples = [example for example, _ in usable]
            rows: dict[str, list[Any]] = {name: [] for name in types}

            # The documents of each example; new ones are cut into segments and blocks.
            new: dict[bytes, str] = {}
            contexts = []
            for example in examples:
                contexts.append(list[int]())
                for document in example.documents:
                    digest = hashlib.sha256(document.text.encode()).digest()[:16]
                    if digest not in numbers:
                        numbers[digest] = len(numbers)
                        new[digest] = document.text
                    contexts[-1].append(numbers[digest])
            for segments, cut in segment_texts([*new.values()], model):
                rows["segments"].extend(segments)
                rows["owned"].append([segmented, len(segments)])
                rows["blocks"].append([number for row in cut for number in row])
                segmented += len(segments)
                blocks.append(cut)
            rows["digests"].extend(new)
            rows["texts"].extend(text.encode() for text in new.values())
            rows["contexts"].extend(contexts)

            # The labels of its blocks, its question, prompt and answer.
            for example, context in zip(examples, contexts, strict=True):
                own = [
                    BlockRow(number, start, end, ())
                    for number, document in enumerate(context)
                    for _, start, end in blocks[document]
                ]
                if labels.labelling_of(example, labelling) == "evidence":
                    found = labels.from_evidence(own, example.evidence)
                else:
                    found = labels.from_answers(own, example.documents, example.answers)
                rows["evidence"].append(found)
            questions = [example.question for example in examples]
            tokens = model.encoder.tokenize([question.strip() for question in questions])
            rows["questions"].extend(tokens["input_ids"])
            rows["prefixes"].extend(all_question_ids(model.decoder, questions, chat=chat))
            rows["answers"].extend(ids for _, ids in usable)
            parts.append({name: Ragged.of(rows[name], dtype) for name, dtype in types.items()})
        return {name: Ragged.joined([part[name] for part in parts]) for name in types}

    def item(self, number: int) -> BlockItem:
        """The item of a prepared example."""
        arrays = self.arrays
        blocks = [
            (document, block)
            for document in arrays["contexts"][number].tolist()
            for block in range(len(self.block_rows(document)))
        ]
        return BlockItem(
            blocks,
            arrays["evidence"][number].astype(bool).tolist(),
            number,
            arrays["prefixes"][number].tolist(),
            arrays["answers"][number].tolist(),
        )

    def block_rows(self, document: int) -> NDArray[np.int32]:
        """Index counting padding blocks, first character and end of each block `[N, 3]`."""
        return self.arrays["blocks"][document].reshape(-1, 3)

    def block_text(self, document: int, block: int) -> str:
        """The text behind a block."""
        text = self.arrays["texts"][document].tobytes().decode()
        _, start, end = self.block_rows(document)[block].tolist()
        return text[start:end]

    def slots(
        self, blocks: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Locate the slots of blocks, which are given by document and block index.

        Returns:
            The segment of each slot, -1 where a block is padded; its position in the segment; and
            the number of real tokens it stands for `[N, J]`.
        """
        config, arrays = self.model.config, self.arrays
        places = np.array([self.block_rows(d)[b][0] for d, b in blocks], dtype=np.int64)
        owned = np.array([arrays["owned"][d] for d, _ in blocks], dtype=np.int64)
        slots_NJ = places[:, None] * config.slots_per_block + np.arange(config.slots_per_block)
        padding_NJ = slots_NJ >= owned[:, 1:] * config.slots
        segments_NJ = np.where(padding_NJ, -1, owned[:, :1] + slots_NJ // config.slots)
        places_NJ = slots_NJ % config.slots
        bounds = self.segments.bounds
        lengths_NJ = bounds[segments_NJ + 1] - bounds[segments_NJ]
        tokens_NJ = np.clip(lengths_NJ - places_NJ * config.compression, 0, config.compression)
        return segments_NJ, places_NJ, np.where(padding_NJ, 0, tokens_NJ)


Segmented = tuple[list[list[int]], list[tuple[int, int, int]]]
"""The segments of a text, and for each block with a token: its index among all blocks, its first
character and the character after its last."""


def segment_texts(texts: Sequence[str], model: BlockModel | SeDeM) -> Iterator[Segmented]:
    """Cut texts into segments and blocks, as `segment_text` and `partition` cut one.

    Those two make tensors with every offset of a text. Training reads whole sets, and needs only
    the ends of blocks among the offsets.

    Raises:
        DataError: a text has no tokens.
    """
    if not texts:
        return
    pieces = [pieces_of(text, model.config.segmentation) for text in texts]
    encodings = iter(model.encoder.encodings([piece for own in pieces for _, piece in own]))
    config, length = model.config, model.config.segment_length
    width = config.slots_per_block * config.compression
    for text, own in zip(texts, pieces, strict=True):
        segments, places = [], []
        for origin, _ in own:
            encoding = next(encodings)
            ids = encoding.ids
            starts = [origin + start for start, _ in encoding.offsets]
            cuts = boundaries_of(text, starts, length, config.segmentation, config.segment_shift)
            for first, stop in pairwise(cuts):
                segments.append(ids[first:stop])
                places.append((origin, encoding, first))
        check_tokens(segments)
        blocks = []
        # Positions include the padding of short segments, as slots do.
        for place, start in enumerate(range(0, len(segments) * length, width)):
            spans = []
            for number in range(start // length, min(-(-(start + width) // length), len(segments))):
                first = max(start - number * length, 0)
                stop = min(start + width - number * length, len(segments[number]))
                if first < stop:
                    origin, encoding, offset = places[number]
                    begin = encoding.token_to_chars(offset + first)
                    end = encoding.token_to_chars(offset + stop - 1)
                    assert begin is not None and end is not None
                    spans.append((origin + begin[0], origin + end[1]))
            if spans:
                blocks.append((place, spans[0][0], spans[-1][1]))
        yield segments, blocks

"""Batches of examples with blocks, and their frozen states.

Letters: B batch, S segments of a batch, T tokens, N blocks, J slots of a block, Q question tokens,
P prefix and answer tokens, A answer tokens, X extraction layers, E encoder width.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.config import Condition
from sedem.errors import DataError
from sedem.method.encoder import encode
from sedem.training.block_dataset import BlockDataset, BlockItem
from sedem.training.state_cache import StateCache
from sedem.training.targets import targets


class BlockBatch(TypedDict):
    """A batch of examples with blocks, passed to `forward` as keyword arguments.

    Attributes:
        segment_ids: segments of all examples `[S, T]`.
        segment_mask: False where a token is padding `[S, T]`.
        slot_index: slots of each block, counted over all segments; -1 is padding `[B, N, J]`.
        slot_tokens: real tokens behind each slot `[B, N, J]`.
        blocks: False where a block is padding `[B, N]`.
        evidence: e_n, whether a block holds evidence `[B, N]`.
        question_ids: questions in encoder tokens `[B, Q]`.
        question_mask: False where a token is padding `[B, Q]`.
        ids: prefix and answer in decoder tokens, padded on the left `[B, P]`.
        valid: False where `ids` is padding `[B, P]`.
        labels: tokens to predict at the last positions `[B, A]`.
        coins: a random number from 0 to 1 for each example `[B]`.
        budget: K.
        condition: form in which the decoder reads the selected blocks.
        texts: text of each block, for each example; empty if they are read as memory.
        states: frozen states of the segments `[X, S, T, E]`; computed if absent.
        question_states: frozen states of the questions `[X, B, Q, E]`; computed if absent.
    """

    segment_ids: Tensor
    segment_mask: Tensor
    slot_index: Tensor
    slot_tokens: Tensor
    blocks: Tensor
    evidence: Tensor
    question_ids: Tensor
    question_mask: Tensor
    ids: Tensor
    valid: Tensor
    labels: Tensor
    coins: Tensor
    budget: int
    condition: Condition
    texts: list[list[str]]
    states: NotRequired[Tensor]
    question_states: NotRequired[Tensor]


class BlockCollator:
    """Turns examples into a `BlockBatch`.

    Args:
        dataset: the dataset that the examples come from.
        max_blocks: maximum blocks of one example; evidence blocks are kept, others are sampled.
        budgets: K of a batch is drawn from these.
        seed: of sampling. A sample depends only on the seed and the examples of the batch, and for
            a batch of one on the epoch, so a resumed run samples the same.
        cache: folder of frozen states; None computes them in every step.
        conditions: weights with which a batch draws the form in which the decoder reads the
            selected blocks; None means always as memory.

    Raises:
        DataError: the dataset is empty.
    """

    def __init__(
        self,
        dataset: BlockDataset,
        *,
        max_blocks: int,
        budgets: Sequence[int],
        seed: int,
        cache: Path | None,
        conditions: Mapping[Condition, float] | None = None,
    ) -> None:
        if not len(dataset):
            raise DataError("no example is left to train on; see what was dropped and why")
        self.dataset = dataset
        self.max_blocks = max_blocks
        self.budgets = tuple(budgets)
        self.conditions: dict[Condition, float] = dict(conditions or {"memory": 1.0})
        self.seed = seed
        self.states: StateCache | None = None
        self.question_states: StateCache | None = None
        if cache is not None:
            encoder, layers = dataset.model.encoder, dataset.model.config.extract_layers
            self.states = StateCache.open(encoder, layers, dataset.segments, cache, "segments")
            self.question_states = StateCache.open(
                encoder, layers, dataset.questions, cache, "questions"
            )

    def __call__(self, items: list[BlockItem], epoch: int = 0) -> dict[str, Any]:
        """The entries of a `BlockBatch`.

        Args:
            items: the examples.
            epoch: passes over the data before this one.
        """
        drawn_for = f"{self.seed}:{[item.question for item in items]}"
        # Several examples meet others in every epoch, which is another draw already. One alone
        # would have the same other blocks around it for ever.
        if len(items) == 1 and epoch:
            drawn_for += f":{epoch}"
        rng = random.Random(drawn_for)
        sampled = [self._sample_blocks(item, rng) for item in items]
        segments = sorted(
            {
                segment
                for item, positions in zip(items, sampled, strict=True)
                for position in positions
                for segment in self._segments(item.blocks[position])
            }
        )
        compression = self.dataset.model.config.compression
        longest = max(len(self.dataset.segments[segment]) for segment in segments)
        slots = -(-longest // compression)
        batch: dict[str, Any] = self._arrange_blocks(items, sampled, segments, slots)
        batch["budget"] = rng.choice(self.budgets)
        batch["coins"] = torch.tensor([rng.random() for _ in items])
        (batch["condition"],) = rng.choices([*self.conditions], [*self.conditions.values()])
        batch["texts"] = []
        if batch["condition"] != "memory":
            batch["texts"] = [
                [self._text(item.blocks[position]) for position in positions]
                for item, positions in zip(items, sampled, strict=True)
            ]
        batch["segment_ids"], batch["segment_mask"] = _padded(
            [self.dataset.segments[segment] for segment in segments], slots * compression
        )
        questions = [item.question for item in items]
        batch["question_ids"], batch["question_mask"] = _padded(
            [self.dataset.questions[question] for question in questions]
        )
        if self.states is not None and self.question_states is not None:
            states = self.states.batch(segments)
            missing = slots * compression - states.shape[2]
            batch["states"] = torch.nn.functional.pad(states, (0, 0, 0, missing))
            batch["question_states"] = self.question_states.batch(questions)
        return {**batch, **targets([(item.prefix, item.answer) for item in items])}

    def _arrange_blocks(
        self, items: list[BlockItem], sampled: list[list[int]], segments: list[int], slots: int
    ) -> dict[str, Tensor]:
        """Index of each block's slots among the slots of the batch, token counts and labels.

        Args:
            items: the examples.
            sampled: positions of the sampled blocks of each example.
            segments: indices of the batch's segments in the dataset.
            slots: slots of a segment in the batch.
        """
        config = self.dataset.model.config
        batch_rows = {segment: row for row, segment in enumerate(segments)}
        shape = (len(items), max(map(len, sampled)), config.slots_per_block)
        slot_index = torch.full(shape, -1)
        slot_tokens = torch.zeros(shape, dtype=torch.long)
        evidence = torch.zeros(shape[:2], dtype=torch.bool)
        blocks = torch.zeros(shape[:2], dtype=torch.bool)
        for b, (item, positions) in enumerate(zip(items, sampled, strict=True)):
            for n, position in enumerate(positions):
                number, row = item.blocks[position]
                document = self.dataset.documents[number]
                slot_tokens[b, n] = torch.tensor(document.blocks[row].slot_tokens)
                slots_J = document.slots[row]
                rows_J = torch.tensor(
                    [
                        batch_rows[document.first_segment + s // config.slots] if s >= 0 else 0
                        for s in slots_J.tolist()
                    ]
                )
                index_J = rows_J * slots + slots_J % config.slots
                slot_index[b, n] = torch.where(slot_tokens[b, n] > 0, index_J, -1)
                evidence[b, n] = item.evidence[position]
                blocks[b, n] = True
        return {
            "slot_index": slot_index,
            "slot_tokens": slot_tokens,
            "blocks": blocks,
            "evidence": evidence,
        }

    def _sample_blocks(self, item: BlockItem, rng: random.Random) -> list[int]:
        """Positions of at most `max_blocks` blocks of an example, in document order."""
        if len(item.blocks) <= self.max_blocks:
            return list(range(len(item.blocks)))
        positive = [i for i, label in enumerate(item.evidence) if label][: self.max_blocks]
        rest = [i for i in range(len(item.blocks)) if i not in positive]
        return sorted(positive + rng.sample(rest, self.max_blocks - len(positive)))

    def _text(self, block: tuple[int, int]) -> str:
        """The text behind a block."""
        return self.dataset.documents[block[0]].block_text(block[1])

    def _segments(self, block: tuple[int, int]) -> list[int]:
        """Indices of the segments in the dataset that a block has slots of."""
        document = self.dataset.documents[block[0]]
        slots_J = document.slots[block[1]]
        per_segment = self.dataset.model.config.slots
        return sorted(
            {document.first_segment + s // per_segment for s in slots_J.tolist() if s >= 0}
        )


def frozen_states(
    batch: BlockBatch, encoder: Backbone, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Frozen states of a batch; computed unless the batch contains them.

    Args:
        batch: the batch.
        encoder: the backbone that reads.
        layers: extraction layers.

    Returns:
        States of the segments `[X, S, T, E]` and of the questions `[X, B, Q, E]`.
    """
    states, question_states = batch.get("states"), batch.get("question_states")
    if states is None:
        states = encode(encoder, batch["segment_ids"], layers)
    if question_states is None:
        question_states = encode(encoder, batch["question_ids"], layers)
    return states, question_states


def rows_at(rows_L: Tensor, index: Tensor) -> Tensor:
    """Rows by index `[..., *row]`; index -1 gives a row of zeros."""
    padded = torch.cat([rows_L, rows_L.new_zeros(1, *rows_L.shape[1:])])
    return padded[index]


def _padded(rows: list[list[int]], length: int | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and mask, padded on the right."""
    width = length or max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = True
    return ids, mask

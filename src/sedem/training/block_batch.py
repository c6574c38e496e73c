"""Batches of examples with blocks, and their frozen states.

Letters: B batch, S segments of a batch, T tokens, N blocks, J slots of a block, Q question tokens,
P prefix and answer tokens, A answer tokens, X extraction layers, E encoder width.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        seed: seed of sampling. A sample depends only on the seed and the batch's examples, and in a
            batch of one also on the epoch, so a resumed run draws the same samples.
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
            epoch: passes over the data before this one.
        """
        drawn_for = f"{self.seed}:{[item.question for item in items]}"
        # Each epoch groups several examples differently, which already changes the draw. A single
        # example would always get the same other blocks.
        if len(items) == 1 and epoch:
            drawn_for += f":{epoch}"
        rng = random.Random(drawn_for)
        sampled = [self._sample_blocks(item, rng) for item in items]
        blocks = [
            [item.blocks[i] for i in chosen] for item, chosen in zip(items, sampled, strict=True)
        ]
        segments_NJ, places_NJ, tokens_NJ = self.dataset.slots(
            [pair for row in blocks for pair in row]
        )
        segments = np.unique(segments_NJ[segments_NJ >= 0])
        compression = self.dataset.model.config.compression
        rows = [self.dataset.segments[segment] for segment in segments.tolist()]
        slots = -(-max(map(len, rows)) // compression)
        index_NJ = np.searchsorted(segments, segments_NJ) * slots + places_NJ
        batch: dict[str, Any] = _arranged(
            items, sampled, np.where(tokens_NJ > 0, index_NJ, -1), tokens_NJ
        )
        batch["budget"] = rng.choice(self.budgets)
        batch["coins"] = torch.tensor([rng.random() for _ in items])
        (batch["condition"],) = rng.choices([*self.conditions], [*self.conditions.values()])
        batch["texts"] = []
        if batch["condition"] != "memory":
            batch["texts"] = [[self.dataset.block_text(*pair) for pair in row] for row in blocks]
        batch["segment_ids"], batch["segment_mask"] = _padded(rows, slots * compression)
        questions = [item.question for item in items]
        batch["question_ids"], batch["question_mask"] = _padded(
            [self.dataset.questions[question] for question in questions]
        )
        if self.states is not None and self.question_states is not None:
            states = self.states.batch(segments.tolist())
            missing = slots * compression - states.shape[2]
            batch["states"] = torch.nn.functional.pad(states, (0, 0, 0, missing))
            batch["question_states"] = self.question_states.batch(questions)
        return {**batch, **targets([(item.prefix, item.answer) for item in items])}

    def _sample_blocks(self, item: BlockItem, rng: random.Random) -> list[int]:
        """Positions of at most `max_blocks` blocks of an example, in document order."""
        if len(item.blocks) <= self.max_blocks:
            return list(range(len(item.blocks)))
        positive = [i for i, label in enumerate(item.evidence) if label][: self.max_blocks]
        rest = [i for i in range(len(item.blocks)) if i not in positive]
        return sorted(positive + rng.sample(rest, self.max_blocks - len(positive)))


def _arranged(
    items: list[BlockItem],
    sampled: list[list[int]],
    index_NJ: NDArray[np.int64],
    tokens_NJ: NDArray[np.int64],
) -> dict[str, Tensor]:
    """Blocks of a batch with their slots and labels, one row per example.

    Args:
        sampled: positions of the sampled blocks of each example.
        index_NJ: position of each slot of all sampled blocks among the slots of the batch.
        tokens_NJ: real tokens behind each of these slots.
    """
    counts = [len(positions) for positions in sampled]
    index, tokens = (torch.from_numpy(a).split(counts) for a in (index_NJ, tokens_NJ))
    labels = [
        torch.tensor([item.evidence[position] for position in positions])
        for item, positions in zip(items, sampled, strict=True)
    ]
    return {
        "slot_index": pad_sequence(index, batch_first=True, padding_value=-1),
        "slot_tokens": pad_sequence(tokens, batch_first=True),
        "blocks": pad_sequence([torch.ones(count, dtype=torch.bool) for count in counts], True),
        "evidence": pad_sequence(labels, batch_first=True),
    }


def frozen_states(
    batch: BlockBatch, encoder: Backbone, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Frozen states of a batch; computed unless the batch contains them.

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


def _padded(rows: Sequence[NDArray[Any]], length: int | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and mask, padded on the right."""
    width = length or max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = True
    return ids, mask

"""Batches of examples with blocks, and their frozen states.

Letters: B batch, S segments of a batch, T tokens, N blocks, J slots of a block, Q question tokens,
P prefix and answer tokens, A answer tokens, X extraction layers, E encoder width.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.answering.spans import Candidate, Passage, sentences_of_spans
from sedem.backbone.decoder import Backbone
from sedem.config import Condition
from sedem.errors import DataError
from sedem.folding import folded
from sedem.method.compressor import encode
from sedem_lab.training.block_dataset import BlockDataset, BlockItem
from sedem_lab.training.state_cache import StateCache
from sedem_lab.training.targets import padded, targets


class BlockBatch(TypedDict):
    """A batch of examples with blocks, passed to `forward` as keyword arguments."""

    segment_ids: Tensor  # segments of all examples [S, T]
    segment_mask: Tensor  # False where a token is padding [S, T]
    slot_index: Tensor  # slots of each block, counted over all segments; -1 is padding [B, N, J]
    slot_tokens: Tensor  # real tokens behind each slot [B, N, J]
    blocks: Tensor  # False where a block is padding [B, N]
    evidence: Tensor  # e_n, whether a block holds evidence [B, N]
    question_ids: Tensor  # questions in encoder tokens [B, Q]
    question_mask: Tensor  # False where a token is padding [B, Q]
    ids: Tensor  # prefix and answer in decoder tokens, padded on the left [B, P]
    valid: Tensor  # False where `ids` is padding [B, P]
    labels: Tensor  # tokens to predict at the last positions [B, A]
    coins: Tensor  # a random number from 0 to 1 for each example [B]
    budget: int  # K
    condition: Condition  # form in which the decoder reads the selected blocks
    texts: list[list[str]]  # of each block, by example; empty if nothing reads them
    sentences: list[list[str]]  # of each example, read instead of the texts; or empty
    states: NotRequired[Tensor]  # frozen states of the segments [X, S, T, E]
    question_states: NotRequired[Tensor]  # frozen states of the questions [X, B, Q, E]


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Number of tokens of segments, questions (encoder), prompts and answers (decoder)."""
    names = ("segment_mask", "question_mask", "valid")
    return torch.stack([batch[name].sum() for name in names]).sum()


class BlockCollator:
    """Turns examples into a `BlockBatch`.

    Args:
        max_blocks: maximum blocks of one example; evidence blocks are kept, others are sampled.
        budgets: K of a batch is drawn from these.
        seed: seed of sampling. A sample depends only on the seed and the batch's examples, and in a
            batch of one also on the epoch, so a resumed run draws the same samples.
        cache: folder of frozen states; None computes them in every step.
        conditions: weights with which a batch draws the form in which the decoder reads the
            selected blocks.
        texts: whether a batch has the texts of blocks that it reads as memory, too.
        sentences: share of the batches that read text which have the sentences of a second reading
            instead of whole blocks.

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
        conditions: Mapping[Condition, float] = MappingProxyType({"memory": 1.0}),
        texts: bool = False,
        sentences: float = 0.0,
    ) -> None:
        if not len(dataset):
            raise DataError("no example is left to train on; see what was dropped and why")
        self.dataset = dataset
        self.max_blocks = max_blocks
        self.budgets = tuple(budgets)
        self.conditions = dict(conditions)
        self.texts = texts
        self.sentences = sentences
        self.seed = seed
        self.states: tuple[StateCache, StateCache] | None = None
        if cache is not None:
            model = dataset.model
            segments, questions = (
                StateCache.open(
                    model.encoder, model.config.extract_layers, dataset.arrays[name], cache, name
                )
                for name in ("segments", "questions")
            )
            self.states = segments, questions

    def __call__(self, items: list[BlockItem], epoch: int = 0) -> dict[str, Any]:
        """Return the entries of a `BlockBatch`; `epoch` counts the passes before this one."""
        drawn_for = f"{self.seed}:{[item.question for item in items]}"
        # Each epoch groups several examples differently, which already changes the draw. A single
        # example would always get the same other blocks.
        if len(items) == 1 and epoch:
            drawn_for += f":{epoch}"
        rng = random.Random(drawn_for)
        # At most `max_blocks` of each example, in document order.
        sampled = []
        for item in items:
            chosen = [*range(len(item.blocks))]
            if len(chosen) > self.max_blocks:
                positive = [i for i in chosen if item.evidence[i]][: self.max_blocks]
                rest = [i for i in chosen if i not in positive]
                chosen = sorted(positive + rng.sample(rest, self.max_blocks - len(positive)))
            sampled.append(chosen)
        blocks = [
            [item.blocks[i] for i in chosen] for item, chosen in zip(items, sampled, strict=True)
        ]
        segments_NJ, places_NJ, tokens_NJ = self.dataset.slots(
            [pair for row in blocks for pair in row]
        )
        segments = np.unique(segments_NJ[segments_NJ >= 0])
        compression = self.dataset.model.config.compression
        rows = [tensor_of(self.dataset.segments[segment]) for segment in segments.tolist()]
        slots = -(-max(map(len, rows)) // compression)
        index_NJ = np.searchsorted(segments, segments_NJ) * slots + places_NJ

        def by_example(values_NJ: NDArray[np.int64], padding: int) -> Tensor:
            own = torch.from_numpy(values_NJ).split([len(chosen) for chosen in sampled])
            return pad_sequence(own, batch_first=True, padding_value=padding)

        labels = [
            torch.tensor([item.evidence[i] for i in chosen])
            for item, chosen in zip(items, sampled, strict=True)
        ]
        batch: dict[str, Any] = {
            "slot_index": by_example(np.where(tokens_NJ > 0, index_NJ, -1), -1),
            "slot_tokens": by_example(tokens_NJ, 0),
            "blocks": pad_sequence([torch.ones_like(own) for own in labels], batch_first=True),
            "evidence": pad_sequence(labels, batch_first=True),
            "budget": rng.choice(self.budgets),
            "coins": torch.tensor([rng.random() for _ in items]),
            "condition": rng.choices([*self.conditions], [*self.conditions.values()])[0],
            "texts": [],
            "sentences": [],
        }
        if self.texts or batch["condition"] != "memory":
            batch["texts"] = [[self.dataset.block_text(*pair) for pair in row] for row in blocks]
        if batch["condition"] == "text" and rng.random() < self.sentences:
            given = zip(items, batch["texts"], labels, strict=True)
            batch["sentences"] = [self._read_again(*one, rng) for one in given]
        # Segments have whole slots.
        missing = slots * compression - max(map(len, rows))
        batch["segment_ids"], batch["segment_mask"] = (
            F.pad(given, (0, missing)) for given in padded(rows, "right")
        )
        questions = [item.question for item in items]
        batch["question_ids"], batch["question_mask"] = padded(
            [tensor_of(self.dataset.questions[question]) for question in questions], "right"
        )
        if self.states is not None:
            states = self.states[0].batch(segments.tolist())
            batch["states"] = F.pad(states, (0, 0, 0, missing))
            batch["question_states"] = self.states[1].batch(questions)
        return {**batch, **targets([(item.prefix, item.answer) for item in items])}

    def _read_again(
        self, item: BlockItem, texts: Sequence[str], evidence_N: Tensor, rng: random.Random
    ) -> list[str]:
        """Draw the sentences of an example's blocks that a second reading could have, in order.

        There the best spans of memory decide. Here the first are from the blocks with evidence: the
        sentence with the answer, or else the likeliest. Then come the likeliest of the others. A
        sentence is the likelier, the more words of the question it has.
        """
        model = self.dataset.model
        question = self.dataset.questions[item.question].tolist()
        asked, answer = (
            folded(backbone.tokenizer.decode(ids, skip_special_tokens=True))
            for backbone, ids in ((model.encoder, question), (model.decoder, item.answer))
        )
        words = {*asked.split()}
        right: list[Candidate] = []
        wrong: list[tuple[float, Candidate]] = []
        for block, text in enumerate(texts):
            passage = Passage(block, block, 0, range(len(text)), text)
            spans = []
            for start, end in pairwise(passage.sentences):
                own = folded(text[start:end])
                likeness = len(words & {*own.split()}) + 2 * rng.random()
                span = Candidate(passage, start, end, tokens=0, likelihood=0.0, gap=0.0)
                spans.append((f" {answer} " in f" {own} ", likeness, span))
            spans.sort(key=lambda one: one[:2])
            if evidence_N[block] and spans:
                right.append(spans.pop()[-1])
            wrong += [(likeness, span) for _, likeness, span in spans]
        wrong.sort(key=lambda one: one[0], reverse=True)
        others = [span for _, span in wrong]
        places = sentences_of_spans(model.decoder, [*right, *others])
        return [texts[block][start:end] for block, start, end in places]


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


def tensor_of(tokens: NDArray[Any]) -> Tensor:
    """Token ids as a tensor."""
    return torch.from_numpy(tokens.astype(np.int64))

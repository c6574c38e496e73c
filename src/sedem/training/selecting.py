"""What trains a selector, whatever it selects: losses, and the blocks that answers see meanwhile.

Letters: B batch, S segments, T tokens, N blocks, J slots of a block, K selected blocks, Q question
tokens, P prefix and answer tokens, A answer tokens, X layers, E encoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.method.encoder import encode
from sedem.method.losses import selection_loss
from sedem.validation import Flag, Number, NumberAbove0, Settings

Conditioning = Literal["selected", "mixed", "gold", "gold-then-selected"]

CONDITIONING: dict[Conditioning, Callable[[float], float]] = {
    "selected": lambda progress: 0.0,
    "mixed": lambda progress: 0.5,
    "gold": lambda progress: 1.0,
    "gold-then-selected": lambda progress: max(0.0, 1.0 - 1.5 * progress),
}
"""Share of examples whose evidence is forced among the selected blocks, by training progress."""


class SelectionBatch(TypedDict):
    """A batch of examples, for a training that selects blocks: keyword arguments of its `forward`.

    Attributes:
        segment_ids: segments of all examples `[S, T]`.
        segment_mask: False where a token is padding `[S, T]`.
        slot_index: slots of each block, counted over all segments; -1 is padding `[B, N, J]`.
        slot_tokens: real tokens behind each slot `[B, N, J]`.
        blocks: False where a block is padding `[B, N]`.
        evidence: e_n `[B, N]`.
        question_ids: questions in encoder tokens `[B, Q]`.
        question_mask: `[B, Q]`.
        ids: prefix and answer in decoder tokens, padded on the left `[B, P]`.
        valid: False where `ids` is padding `[B, P]`.
        labels: tokens to predict at the last positions `[B, A]`.
        coins: a number from 0 to 1 for each example, drawn with the batch `[B]`.
        budget: K.
        states: frozen states of the segments `[X, S, T, E]`; computed when not given.
        question_states: the same of the questions `[X, B, Q, E]`.
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
    states: NotRequired[Tensor]
    question_states: NotRequired[Tensor]


def frozen_states(
    batch: SelectionBatch, encoder: Backbone, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Frozen states of a batch; computed unless the batch has them.

    Args:
        batch: the batch.
        encoder: the backbone that reads.
        layers: numbers of layers.

    Returns:
        Those of the segments `[X, S, T, E]` and of the questions `[X, B, Q, E]`.
    """
    states, question_states = batch.get("states"), batch.get("question_states")
    if states is None:
        states = encode(encoder, batch["segment_ids"], layers)
    if question_states is None:
        question_states = encode(encoder, batch["question_ids"], layers)
    return states, question_states


class SelectionLosses(Settings):
    """Weights and temperature of L_ret; the defaults are the paper's.

    Attributes:
        select: lambda_ret.
        margin_weight: lambda_margin.
        margin: gamma of L_margin.
        selection_temperature: tau of L_InfoNCE.
        normalize_scores: divide scores by the number of question tokens before L_InfoNCE; the
            margin always applies to sums.
    """

    select: Number = 1.0
    margin_weight: Number = 0.5
    margin: Number = 2.0
    selection_temperature: NumberAbove0 = 0.07
    normalize_scores: Flag = False

    def of(
        self, scores_BN: Tensor, evidence_BN: Tensor, blocks_BN: Tensor, question_mask_BQ: Tensor
    ) -> Tensor:
        """L_ret; with `normalize_scores` InfoNCE sees means, the margin still sums."""
        temperature: float | Tensor = self.selection_temperature
        if self.normalize_scores:
            temperature = self.selection_temperature * question_mask_BQ.sum(1, keepdim=True)
        return selection_loss(
            scores_BN,
            evidence_BN,
            blocks_BN,
            temperature=temperature,
            margin=self.margin,
            margin_weight=self.margin_weight,
        )


class ConditionedLosses(SelectionLosses):
    """The same beside a reader of raw text.

    Attributes:
        conditioning: which paragraphs the reader learns from; a name in `CONDITIONING`.
    """

    conditioning: Conditioning = "gold-then-selected"


def conditioned(
    scores_BN: Tensor, evidence_BN: Tensor, coins_B: Tensor, share: float, budget: int
) -> Tensor:
    """The blocks that condition each answer `[B, K]`, best first.

    Args:
        scores_BN: s_n.
        evidence_BN: e_n.
        coins_B: a number from 0 to 1 for each example.
        share: of examples whose evidence goes first.
        budget: K.
    """
    forced_BN = evidence_BN & (coins_B < share)[:, None]
    # Above every score: a cosine sum never exceeds the number of question tokens.
    scores_BN = torch.where(forced_BN, scores_BN + 1e6, scores_BN)
    return scores_BN.sort(dim=1, descending=True, stable=True).indices[:, :budget]


def recall(scores_BN: Tensor, evidence_BN: Tensor, budget: int) -> Tensor:
    """Share of the examples with evidence that have some among their own K best blocks."""
    own_BK = scores_BN.topk(min(budget, scores_BN.shape[1])).indices
    found_B = evidence_BN.gather(1, own_BK).any(1)[evidence_BN.any(1)]
    return found_B.float().mean() if len(found_B) else scores_BN.new_zeros(())


def rows_at(rows_L: Tensor, index: Tensor) -> Tensor:
    """Rows by index `[..., *row]`; index -1 is a row of zeros."""
    padded = torch.cat([rows_L, rows_L.new_zeros(1, *rows_L.shape[1:])])
    return padded[index]

"""Training queries beside a frozen selector: its keys stay, so banks stay valid.

Everything but the queries is frozen, so a question is encoded once and the training takes minutes.

Letters: Q question tokens, E width, N blocks of a question's documents, J slots of a block, R
heads, H width of a head, M blocks of all documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from sedem.guidance import READ_ONCE_RANK, Queries
from sedem.method.losses import info_nce_loss
from sedem.method.selector import Selector, block_scores

EPOCHS, BATCH = 4, 8
RATE = 3e-3
TEMPERATURE = 0.07
"""Of a score divided by the number of question tokens, as in stage 2."""

Question = TypeVar("Question")


@dataclass(frozen=True)
class QueryQuestion:
    """A question, and the blocks of its documents.

    Attributes:
        hidden: states of the question's tokens `[Q, E]`.
        blocks: its blocks among those of all documents `[N]`.
        evidence: which of them have evidence `[N]`.
        keys: keys of all documents `[M, J, R, H]`.
        slots: False where a slot is padding `[M, J]`.
    """

    hidden: Tensor
    blocks: Tensor
    evidence: Tensor
    keys: Tensor
    slots: Tensor

    def loss(self, part: Queries, selector: Selector) -> Tensor:
        """L_InfoNCE of its blocks."""
        keys_NJRH, slots_NJ = self.keys[self.blocks], self.slots[self.blocks]
        scores_1N = scores_of(part, selector, self.hidden, keys_NJRH, slots_NJ)[None]
        blocks_1N = torch.ones_like(scores_1N, dtype=torch.bool)
        temperature = TEMPERATURE * len(self.hidden)
        return info_nce_loss(scores_1N, self.evidence[None], blocks_1N, temperature)


def scores_of(
    part: Queries, selector: Selector, hidden_QE: Tensor, keys_NJRH: Tensor, slots_NJ: Tensor
) -> Tensor:
    """s_n of blocks by the queries of a part `[N]`."""
    query_1QRH = part.queries(selector, hidden_QE.float()[None])
    mask_1Q = torch.ones(query_1QRH.shape[:2], dtype=torch.bool)
    return block_scores(query_1QRH, mask_1Q, keys_NJRH.float()[None], slots_NJ[None])[0]


def fit_queries(selector: Selector, questions: Sequence[QueryQuestion]) -> Queries:
    """Train queries from the states of some questions."""
    part = Queries(selector, READ_ONCE_RANK)
    descend(
        [{"params": list(part.parameters()), "lr": RATE}],
        questions,
        lambda one: one.loss(part, selector),
        random.Random(0),
    )
    return part.requires_grad_(False)


def descend(
    parameters: list[dict[str, Any]],
    questions: Sequence[Question],
    loss_of: Callable[[Question], Tensor],
    rng: random.Random,
) -> None:
    """Minimize the mean loss of some questions, with rates that fall to zero.

    Args:
        parameters: groups of an optimizer.
    """
    optimizer = torch.optim.AdamW(parameters)
    steps = EPOCHS * -(-len(questions) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order = list(questions)
    for _ in range(EPOCHS):
        rng.shuffle(order)
        for start in range(0, len(order), BATCH):
            losses = [loss_of(one) for one in order[start : start + BATCH]]
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

"""Training the second hop: its W_Q, the weights of its scores, and when it is needed.

Questions teach W_Q if documents besides that of their first block have evidence: their blocks are
what is to be found. All questions teach when there is something left to find.

Letters: Q question tokens, E encoder width, N blocks of a question's documents, J slots of a block,
R heads, H width of a head, F features.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.guidance import SecondHop
from sedem.method.selector import Selector
from sedem_lab.training.queries import RATE, descend, scores_of

WEIGHTS_RATE = 1e-2
TEMPERATURE = 0.015
"""Of a score divided by the number of question tokens. With that of stage 2, 0.07, the second hop
finds less."""


@dataclass(frozen=True)
class HopQuestion:
    """A question after its first hop, and the blocks of its documents.

    Attributes:
        hidden: states of the question as it is read after the first block `[Q, E]`.
        keys: keys of the blocks `[N, J, R, H]`.
        slots: False where a slot is padding `[N, J]`.
        states: s_n `[N]`.
        words: BM25 of the question's words `[N]`.
        named: BM25 of the first block's words `[N]`.
        total: what the first hop selects by `[N]`.
        first: the first block.
        left: blocks with evidence in other documents than that of the first `[N]`.
        documents: the document of each block `[N]`.
        evidence: which documents have evidence.
        features: features of whether there is something left to find `[F]`.
    """

    hidden: Tensor
    keys: Tensor
    slots: Tensor
    states: Tensor
    words: Tensor
    named: Tensor
    total: Tensor
    first: int
    left: Tensor
    documents: Tensor
    evidence: frozenset[int]
    features: Tensor

    def scores(self, part: SecondHop, selector: Selector) -> Tensor:
        """What the blocks are selected by in the second hop `[N]`."""
        again_N = scores_of(part, selector, self.hidden, self.keys, self.slots)
        return part(again_N, self.states, self.words, self.named)

    def loss(self, part: SecondHop, selector: Selector) -> Tensor:
        """Negative log-probability that one of the blocks to find is next, the first left out.

        One is enough, other than in L_InfoNCE, which asks for each: that finds fewer.
        """
        logits_N = self.scores(part, selector) / (TEMPERATURE * len(self.hidden))
        is_first_N = torch.arange(len(logits_N)) == self.first
        log_N = logits_N.masked_fill(is_first_N, -torch.inf).log_softmax(-1)
        return -log_N[self.left].logsumexp(-1)


def fit_second_hop(selector: Selector, questions: Sequence[HopQuestion]) -> SecondHop:
    """Train a second hop for a frozen selector.

    Args:
        questions: those with one step teach only when to stop; at least one must have two.
    """
    part, rng = SecondHop(selector), random.Random(0)
    taught = [one for one in questions if bool(one.left.any())]
    done = [one for one in questions if not bool(one.left.any())]
    # As many of each, so that the probability does not depend on what the questions are taken from.
    several = min(len(taught), len(done))
    judged = rng.sample(taught, several) + rng.sample(done, several)
    if judged:
        left_B = torch.arange(2 * several) < several
        part.open.fit(torch.stack([one.features for one in judged]), left_B)
    descend(
        [
            {"params": [part.down.weight, part.up.weight], "lr": RATE},
            {"params": [part.weights], "lr": WEIGHTS_RATE, "weight_decay": 0.0},
        ],
        taught,
        lambda one: one.loss(part, selector),
        rng,
    )
    return part.requires_grad_(False)


@torch.no_grad()
def all_found(
    part: SecondHop, selector: Selector, questions: Sequence[HopQuestion], k: int
) -> dict[str, list[bool]]:
    """For each question, whether its best blocks have the evidence of all documents, by hops."""
    found: dict[str, list[bool]] = {"1": [], "2": [], "auto": []}
    for one in questions:
        again_N = one.scores(part, selector)
        again_N[one.first] = torch.inf
        scores = {"1": one.total, "2": again_N}
        scores["auto"] = again_N if float(part.open(one.features)) >= 0.5 else one.total
        for hops, scores_N in scores.items():
            best = scores_N.topk(min(k, len(scores_N))).indices.tolist()
            found[hops].append(one.evidence <= set(one.documents[best].tolist()))
    return found

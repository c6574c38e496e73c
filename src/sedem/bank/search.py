"""What questions score the blocks of their banks: all of them exactly, or a large bank's best.

Letters: B questions, Q question tokens, N blocks, E encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sedem.bank import coarse_search as candidates
from sedem.bank.memory_bank import MemoryBank
from sedem.errors import BankError
from sedem.bank.key_index import bank_scores
from sedem.method.selector import resolve_budget

if TYPE_CHECKING:
    from sedem.inference.requests import Request
    from sedem.model import SeDeM


@torch.no_grad()
def score_questions(
    model: SeDeM, bank: MemoryBank, hidden_BQE: Tensor, mask_BQ: Tensor, *, every: bool = True
) -> Tensor:
    """Scores `[B, N]` of a bank's blocks for several questions, in one pass over the bank.

    Args:
        model: whose selector.
        bank: is asked.
        hidden_BQE: states of the questions.
        mask_BQ: False where a token is padding.
        every: score every block exactly; else, in a large bank, only candidates, and every other
            block has -inf.

    Raises:
        BankError: the bank is empty.
    """
    if not len(bank):
        raise BankError("the bank holds no documents; add some with 'sedem build BANK FILE...'")
    query_BQRH = model.selector.queries(hidden_BQE)
    if every or len(bank) <= candidates.FROM:
        return bank_scores(bank, model.selector, query_BQRH, mask_BQ)
    return candidates.candidate_scores(bank, model.selector, query_BQRH, mask_BQ)


def score_requests(
    model: SeDeM, requests: Sequence[Request], hidden_BQE: Tensor, mask_BQ: Tensor
) -> list[Tensor]:
    """Scores `[N]` for each request; questions to one bank are scored together."""
    together: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        together.setdefault(id(request.bank), []).append(row)
    scores: dict[int, Tensor] = {}
    for rows in together.values():
        bank = requests[rows[0]].bank
        every = any(_needs_every_score(model, requests[row]) for row in rows)
        found_BN = score_questions(model, bank, hidden_BQE[rows], mask_BQ[rows], every=every)
        scores |= zip(rows, found_BN, strict=True)
    return [scores[row] for row in range(len(requests))]


def _needs_every_score(model: SeDeM, request: Request) -> bool:
    if request.blocks is not None or request.ranking:
        return True
    k = model.config.k if request.k is None else request.k
    return resolve_budget(k, len(request.bank)) > candidates.COUNT

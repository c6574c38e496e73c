"""What questions score the blocks of their banks: all of them exactly, or a large bank's best.

Letters: B questions, Q question tokens, N blocks, E encoder width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.bank import coarse_search
from sedem.bank.key_index import bank_scores
from sedem.bank.memory_bank import MemoryBank
from sedem.errors import BankError
from sedem.method.selector import Selector


@torch.no_grad()
def score_questions(
    selector: Selector, bank: MemoryBank, hidden_BQE: Tensor, mask_BQ: Tensor, *, every: bool = True
) -> Tensor:
    """Scores `[B, N]` of a bank's blocks for several questions, in one pass over the bank.

    Args:
        selector: of the model that is asked.
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
    query_BQRH = selector.queries(hidden_BQE)
    if every or len(bank) <= coarse_search.FROM:
        return bank_scores(bank, selector, query_BQRH, mask_BQ)
    return coarse_search.candidate_scores(bank, selector, query_BQRH, mask_BQ)

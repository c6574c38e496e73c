"""Score a bank's blocks for some questions: every block, or only a large bank's candidates.

Letters: B questions, Q question tokens, N blocks, E encoder width, R heads, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.bank import coarse_search
from sedem.bank.keys import key_index, key_parts
from sedem.bank.memory_bank import BankReader
from sedem.bank.scores import key_scores
from sedem.errors import BankError
from sedem.method.selector import Selector


@torch.no_grad()
def score_questions(
    selector: Selector, bank: BankReader, hidden_BQE: Tensor, mask_BQ: Tensor, *, every: bool = True
) -> Tensor:
    """Score a bank's blocks for several questions in one pass over the bank.

    Args:
        selector: the selector of the model that answers.
        bank: the bank to search.
        hidden_BQE: states of the questions.
        mask_BQ: False where a question token is padding.
        every: whether to score every block even of a large bank. Otherwise, in a bank of more than
            `coarse_search.FROM` blocks, only each question's candidates are scored.

    Returns:
        fp32 scores `[B, N]`; -inf for a block that is not a candidate.

    Raises:
        BankError: the bank is empty.
    """
    if not len(bank):
        raise BankError("the bank holds no documents; add some with 'sedem build BANK FILE...'")
    query_BQRH = selector.queries(hidden_BQE)
    if every or len(bank) <= coarse_search.FROM:
        return _all_scores(bank, selector, query_BQRH, mask_BQ)
    return coarse_search.candidate_scores(bank, selector, query_BQRH, mask_BQ)


def _all_scores(
    bank: BankReader, selector: Selector, query_BQRH: Tensor, query_mask_BQ: Tensor
) -> Tensor:
    index, slots = key_index(bank, selector), bank.blocks.slots
    scores = [
        key_scores(query_BQRH, query_mask_BQ, part, index.padding_of(blocks, slots))
        for blocks, part in key_parts(bank, selector)
    ]
    return torch.cat(scores, 1)

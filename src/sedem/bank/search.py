"""Score a bank's blocks for some questions: every block, or only a large bank's candidates.

In a large bank, pooled keys give the candidates: the keys of neighbouring slots in a block are
averaged and scaled to unit length. A question is compared with them in the same way as with keys.
docs/performance.md reports how many of the best blocks were measured to be among the candidates.

Letters: B questions, Q question tokens, N blocks, E encoder width, J slots of a block, G pooled
keys of a block, R heads, H width of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.keys import key_index, key_parts, keys_of
from sedem.bank.memory_bank import BankReader
from sedem.bank.scores import key_scores
from sedem.errors import BankError
from sedem.method.selector import Selector
from sedem.quantization import BFLOAT16, Quantized, join, quantize

COARSE_FROM = 100_000
"""Largest bank in which all blocks are scored; larger banks are searched for candidates."""
CANDIDATES = 4096
"""Candidates for each question."""
GROUPS = 8
"""Pooled keys per block, G; see `pool_keys` for the case that it does not divide J."""


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
            `COARSE_FROM` blocks, only each question's candidates are scored.

    Returns:
        fp32 scores `[B, N]`; -inf for a block that is not a candidate.

    Raises:
        BankError: the bank is empty.
    """
    if not len(bank):
        raise BankError("the bank holds no documents; add some with 'sedem build BANK FILE...'")
    query_BQRH = selector.queries(hidden_BQE)
    if not every and len(bank) > COARSE_FROM:
        return _candidate_scores(bank, selector, query_BQRH, mask_BQ)
    index, slots = key_index(bank, selector), bank.blocks.slots
    scores = [
        key_scores(query_BQRH, mask_BQ, part, index.padding_of(blocks, slots))
        for blocks, part in key_parts(bank, selector)
    ]
    return torch.cat(scores, 1)


def _candidate_scores(
    bank: BankReader, selector: Selector, query_BQRH: Tensor, mask_BQ: Tensor
) -> Tensor:
    """Score each question's candidates exactly `[B, N]`; other blocks score -inf."""
    coarse_BN = key_scores(query_BQRH, mask_BQ, *_pooled(bank, selector))
    scores_BN = torch.full_like(coarse_BN, -torch.inf)
    for row, coarse_N in enumerate(coarse_BN):
        candidates = coarse_N.topk(min(CANDIDATES, len(bank))).indices.sort().values.tolist()
        padding_P = (bank.slot_tokens(candidates).flatten() == 0).nonzero()[:, 0]
        keys_NJRH = keys_of(bank, selector, candidates)
        question = slice(row, row + 1)
        exact_1N = key_scores(query_BQRH[question], mask_BQ[question], keys_NJRH, padding_P)
        scores_BN[row, candidates] = exact_1N[0]
    return scores_BN


def _pooled(bank: BankReader, selector: Selector) -> tuple[Quantized, Tensor]:
    """Return pooled keys of all blocks, and the indices of padding among them."""
    index, slots = key_index(bank, selector), bank.blocks.slots
    if index.pooled is None:
        # Pooling converts to float32, so cached keys, which are one part, are split into ranges.
        parts = [
            pool_keys(
                part[rows.start : rows.stop],
                index.padding_of(blocks[rows.start : rows.stop], slots),
            )
            for blocks, part in key_parts(bank, selector)
            for rows in scan_ranges(len(part))
        ]
        pooled, is_padding = zip(*parts, strict=True)
        index.pooled = join(pooled), torch.cat(is_padding).flatten().nonzero()[:, 0]
    return index.pooled


def pool_keys(
    keys_NJRH: Quantized, padding_P: Tensor, most: int = GROUPS
) -> tuple[Quantized, Tensor]:
    """Average each block's keys over G groups of neighbouring slots.

    Args:
        keys_NJRH: unit vectors.
        padding_P: indices of padding among the N * J slots.
        most: G is the greatest common divisor of this and J.

    Returns:
        The means over real slots, scaled to unit vectors `[N, G, R, H]` in bfloat16, and which
        groups hold only padding `[N, G]`, on the CPU.
    """
    blocks, slots = keys_NJRH.values.shape[:2]
    groups = math.gcd(slots, most)
    real_L = torch.ones(blocks * slots, dtype=torch.bool)
    real_L[padding_P] = False
    real_NGS = real_L.view(blocks, groups, -1)
    keys_NGSRH = keys_NJRH.dequantize().float().unflatten(1, (groups, -1))
    weights_NGS = (real_NGS / real_NGS.sum(-1, keepdim=True).clamp_min(1)).to(keys_NGSRH)
    means_NGRH = torch.einsum("ngsrh,ngs->ngrh", keys_NGSRH, weights_NGS)
    # A mean of dissimilar keys is short; unscaled, it would lose to a mean of similar keys.
    return quantize(F.normalize(means_NGRH, dim=-1), BFLOAT16), ~real_NGS.any(-1)

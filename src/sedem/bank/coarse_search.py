"""A first look at large banks: pooled keys name candidates, which alone are scored exactly.

A block's keys are averaged in runs of neighbouring slots; a question is compared with these means,
made unit vectors, as it would be with slots. What it misses was measured: docs/bank-format.md.

Letters: B questions, Q question tokens, N blocks, J slots of a block, G pooled keys of a block,
R heads, H width of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.key_index import key_index, key_parts, keys_of
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.scores import key_scores
from sedem.method.selector import Selector
from sedem.quantization import BFLOAT16, Quantized, join, quantize

FROM = 100_000
"""Blocks up to which every block is scored; above, candidates are looked for."""

COUNT = 4096
"""Candidates of a question."""

GROUPS = 8
"""Pooled keys of a block, G."""


@torch.no_grad()
def candidate_scores(
    bank: MemoryBank, selector: Selector, query_BQRH: Tensor, query_mask_BQ: Tensor
) -> Tensor:
    """Exact scores `[B, N]` of each question's candidates; every other block has -inf.

    Args:
        bank: is asked.
        selector: of the model that is asked.
        query_BQRH: unit vectors, one a question token and head.
        query_mask_BQ: False where a question token is padding.
    """
    rough_BN = _rough_scores(bank, selector, query_BQRH, query_mask_BQ)
    scores_BN = torch.full_like(rough_BN, -torch.inf)
    for row, rough_N in enumerate(rough_BN):
        found = rough_N.topk(min(COUNT, len(bank))).indices.sort().values.tolist()
        padding_P = (bank.slot_tokens(found).flatten() == 0).nonzero()[:, 0]
        keys_NJRH = keys_of(bank, selector, found)
        one = slice(row, row + 1)
        exact_1N = key_scores(query_BQRH[one], query_mask_BQ[one], keys_NJRH, padding_P)
        scores_BN[row, found] = exact_1N[0]
    return scores_BN


def _rough_scores(
    bank: MemoryBank, selector: Selector, query_BQRH: Tensor, query_mask_BQ: Tensor
) -> Tensor:
    keys, slots = key_index(bank, selector), len(bank.blocks[0].slot_tokens)
    if keys.pooled is None:
        # Cached keys come as one part, and pooling converts what it is given to float32.
        parts = [
            pool_keys(
                part[some.start : some.stop],
                keys.padding_of(indices[some.start : some.stop], slots),
            )
            for indices, part in key_parts(bank, selector)
            for some in scan_ranges(len(part))
        ]
        means, empty = zip(*parts, strict=True)
        keys.pooled = join(means), torch.cat(empty).flatten().nonzero()[:, 0]
    return key_scores(query_BQRH, query_mask_BQ, *keys.pooled)


def pool_keys(
    keys_NJRH: Quantized, padding_P: Tensor, most: int = GROUPS
) -> tuple[Quantized, Tensor]:
    """Means of a block's keys in G runs of neighbouring slots.

    Args:
        keys_NJRH: unit vectors.
        padding_P: which of the N * J slots are padding.
        most: G, or what divides J as well.

    Returns:
        Unit vectors `[N, G, R, H]` along the means of real slots as bfloat16, and which runs are
        padding alone `[N, G]`, on the CPU.
    """
    blocks, slots = keys_NJRH.values.shape[:2]
    groups = math.gcd(slots, most)
    real_L = torch.ones(blocks * slots, dtype=torch.bool)
    real_L[padding_P] = False
    real_NGS = real_L.view(blocks, groups, -1)
    keys_NGSRH = keys_NJRH.dequantize().float().unflatten(1, (groups, -1))
    weights_NGS = (real_NGS / real_NGS.sum(-1, keepdim=True).clamp_min(1)).to(keys_NGSRH)
    means_NGRH = torch.einsum("ngsrh,ngs->ngrh", keys_NGSRH, weights_NGS)
    # Without its length a mean of unlike slots would lose to one of like slots.
    return quantize(F.normalize(means_NGRH, dim=-1), BFLOAT16), ~real_NGS.any(-1)

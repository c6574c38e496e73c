"""T tokens of a segment as M slots of C: pooling, and what is real behind a slot.

Letters: S segments, T tokens, C tokens of a slot, M = T / C slots, K blocks, J slots of a block,
E width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool(states_STE: Tensor, mask_ST: Tensor, compression: int) -> Tensor:
    """Local mean pooling: mean of each run of C states (section 3.1, second equation).

    A slot that padding reaches into is the mean of its real tokens; one of padding alone is zero.

    Args:
        states_STE: one state a token.
        mask_ST: False where a token is padding.
        compression: C.

    Returns:
        `[S, M, E]`.
    """
    mask_SMC1 = mask_ST.unflatten(1, (-1, compression))[..., None]
    states_SMCE = states_STE.unflatten(1, (-1, compression))
    total_SME = (states_SMCE * mask_SMC1).sum(2)
    return total_SME / mask_SMC1.sum(2).clamp_min(1)


def slot_tokens(mask_ST: Tensor, compression: int) -> Tensor:
    """Real tokens behind each slot `[S, M]`: C, fewer in a short segment, 0 for padding."""
    return mask_ST.unflatten(1, (-1, compression)).sum(2)


def state_mask(slot_tokens_KJ: Tensor, compression: int) -> Tensor:
    """Which restored states stand for real tokens.

    Args:
        slot_tokens_KJ: real tokens behind each slot `[..., K, J]`.
        compression: C.

    Returns:
        `[..., K, J * C]`, False where the state stands for padding.
    """
    rank_C = torch.arange(compression, device=slot_tokens_KJ.device)
    return (rank_C < slot_tokens_KJ[..., None]).flatten(-2)

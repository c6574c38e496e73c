"""Mean pooling of T tokens into M slots of C, and the number of real tokens behind each slot.

Letters: S segments, T tokens, C tokens per slot, M = T / C slots, K blocks, J slots per block, E
width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool(states_STE: Tensor, mask_ST: Tensor, compression: int) -> Tensor:
    """Mean of each run of C states: h-bar (section 3.1, equation 2), and Pool_C of section 4.

    A slot with some padding is the mean of its real tokens; a slot of only padding is zero.

    Args:
        mask_ST: False where a token is padding.
        compression: C.

    Returns:
        Pooled states `[S, M, E]`.
    """
    mask_SMC1 = mask_ST.unflatten(1, (-1, compression))[..., None]
    states_SMCE = states_STE.unflatten(1, (-1, compression))
    total_SME = (states_SMCE * mask_SMC1).sum(2)
    return total_SME / mask_SMC1.sum(2).clamp_min(1)


def slot_tokens(mask_ST: Tensor, compression: int) -> Tensor:
    """Real tokens of each slot `[S, M]`: C, fewer at the end of a short segment, 0 for padding."""
    return mask_ST.unflatten(1, (-1, compression)).sum(2)


def state_mask(slot_tokens_KJ: Tensor, compression: int) -> Tensor:
    """Return which restored states stand for real tokens.

    Args:
        slot_tokens_KJ: real tokens of each slot `[..., K, J]`.
        compression: states per slot, C.

    Returns:
        `[..., K, J * C]`, False where a state stands for padding.
    """
    rank_C = torch.arange(compression, device=slot_tokens_KJ.device)
    return (rank_C < slot_tokens_KJ[..., None]).flatten(-2)

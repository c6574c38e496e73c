"""Questions and blocks with padding, for tests of scores."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(generator: torch.Generator, *shape: int) -> Tensor:
    vectors = torch.randn(*shape, generator=generator)
    return vectors / vectors.norm(dim=-1, keepdim=True)


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two questions of 3 and 2 tokens against 4 blocks of 3 slots, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    query_BQRH, keys_BNJRH = unit(generator, 2, 3, 2, 4), unit(generator, 2, 4, 3, 2, 4)
    query_mask_BQ = torch.tensor([[True, True, True], [True, True, False]])
    slot_mask_BNJ = torch.ones(2, 4, 3, dtype=torch.bool)
    slot_mask_BNJ[0, 3, 1:] = False
    slot_mask_BNJ[1, 2, 2] = False
    slot_mask_BNJ[1, 3] = False
    return query_BQRH, query_mask_BQ, keys_BNJRH, slot_mask_BNJ

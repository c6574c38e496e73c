"""A KV cache that drops columns and re-indexes the positions of the others, leaving no gaps.

Letters: B batch, K cached columns, N columns kept of a forward call, H key heads, E width of a
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass(frozen=True)
class ReindexedCache:
    """Cached keys and values, at positions 0, 1, 2 ... in every row.

    Attributes:
        layers: keys and values of each layer `[B, H, K, E]`; empty before the first call.
        valid: False where a column is padding `[B, K]`.
    """

    layers: list[tuple[Tensor, Tensor]]
    valid: Tensor

    def extended(
        self, cache: DynamicCache, kept: Tensor, active_B: Tensor, rotary: nn.Module
    ) -> ReindexedCache:
        """Append some columns of a forward call at the next free positions.

        Cached keys carry the rotation of the position where they were computed. Rotations add up,
        so rotating a key by the difference moves it to its new position.

        Args:
            cache: the columns of this cache, followed by those of the call.
            kept: indices of the call's columns to append.
            active_B: False for rows whose appended columns are padding.
        """
        before = self.valid.shape[1]
        moved_1N = (torch.arange(len(kept), device=kept.device) - kept)[None]
        angles = rotary(kept.new_zeros(1, dtype=torch.float), position_ids=moved_1N)
        # Some rotary embeddings also scale keys; cached keys are already scaled.
        cos_1NE, sin_1NE = (x / rotary.attention_scaling for x in angles)
        layers = []
        for layer in cache.layers:
            keys_BHNE = layer.keys[:, :, before + kept]
            first, second = keys_BHNE.float().chunk(2, dim=-1)
            rotated_BHNE = torch.cat([first, second], dim=-1) * cos_1NE
            rotated_BHNE = rotated_BHNE + torch.cat([-second, first], dim=-1) * sin_1NE
            new = (rotated_BHNE.to(keys_BHNE.dtype), layer.values[:, :, before + kept])
            past = (layer.keys[:, :, :before], layer.values[:, :, :before])
            layers.append(
                (torch.cat([past[0], new[0]], dim=2), torch.cat([past[1], new[1]], dim=2))
            )
        valid_BK = torch.cat([self.valid, active_B[:, None].expand(-1, len(kept))], dim=1)
        return ReindexedCache(layers, valid_BK)

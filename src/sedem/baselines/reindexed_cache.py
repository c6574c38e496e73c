"""Keys and values of text that was read: some are kept, and move up to positions without gaps.

Letters: B batch, K columns held, N columns that are kept of a call, H key heads, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass(frozen=True)
class Held:
    """Keys and values that stand for what was read, at positions from 0 on in every row.

    Attributes:
        layers: keys and values of each layer `[B, H, K, E]`; none before anything was read.
        valid: False where a column is padding `[B, K]`.
    """

    layers: list[tuple[Tensor, Tensor]]
    valid: Tensor

    def grown(self, cache: DynamicCache, kept: Tensor, active_B: Tensor, rotary: nn.Module) -> Held:
        """These, and some columns of the call after them, moved up to follow them.

        Keys are cached turned to the positions at which they were read. Rotations add up, so
        turning one on by the difference puts it at its new position.

        Args:
            cache: these columns, then those of the call.
            kept: which of the call's columns stay.
            active_B: False where a row only went along.
            rotary: the backbone's angles.
        """
        before = self.valid.shape[1]
        moved_1N = (torch.arange(len(kept), device=kept.device) - kept)[None]
        angles = rotary(kept.new_zeros(1, dtype=torch.float), position_ids=moved_1N)
        # Some kinds of rotation scale keys as well; these are scaled already.
        cos_1NE, sin_1NE = (x / rotary.attention_scaling for x in angles)
        layers = []
        for layer in cache.layers:
            keys_BHNE = layer.keys[:, :, before + kept]
            first, second = keys_BHNE.float().chunk(2, dim=-1)
            turned_BHNE = torch.cat([first, second], dim=-1) * cos_1NE
            turned_BHNE = turned_BHNE + torch.cat([-second, first], dim=-1) * sin_1NE
            new = (turned_BHNE.to(keys_BHNE.dtype), layer.values[:, :, before + kept])
            past = (layer.keys[:, :, :before], layer.values[:, :, :before])
            layers.append(
                (torch.cat([past[0], new[0]], dim=2), torch.cat([past[1], new[1]], dim=2))
            )
        grown_BK = torch.cat([self.valid, active_B[:, None].expand(-1, len(kept))], dim=1)
        return Held(layers, grown_BK)

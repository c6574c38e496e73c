"""Keys and values of independent blocks, through fused layers; see `guidance.independent`.

Letters: N blocks, J slots per block, U restored states, L layers above injection, G key heads, H
head width, D decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sedem.backbone.masks import KeyAxis
from sedem.engine.decoder import FusedDecoder
from sedem.engine.interface import BlockSource
from sedem.engine.layers import biases_of, run_layers
from sedem.method.pooling import state_mask

TOGETHER = 8
"""Blocks per call on a GPU; a CPU computes each block alone."""


class BlockWalk:
    """Computes keys and values of blocks, each block always in calls of the same shape.

    The shape determines the order in which a kernel adds up. On a CPU the result is therefore
    bitwise the same, regardless of when and with which other blocks it is computed.

    Args:
        decoder: its layers above injection are run.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self.decoder = decoder
        self.together = 1 if decoder.device.type == "cpu" else TOGETHER
        self._start_11D: Tensor | None = None

    def sizes(self, bank: BlockSource, blocks: Sequence[int]) -> list[int]:
        """Number of states of each block, without padding."""
        return self._real(bank, blocks).sum(1).tolist()

    @torch.no_grad()
    def compute(self, bank: BlockSource, blocks: Sequence[int]) -> list[Tensor]:
        """Return keys and values `[L, 2, G, U, H]` of each block.

        Args:
            bank: has their memory.
            blocks: their indices.

        Returns:
            One tensor for each block; keys are rotated to positions from 1.
        """
        computed: list[Tensor] = []
        for first in range(0, len(blocks), self.together):
            group = list(blocks[first : first + self.together])
            # A GPU's call is always full, so that its shape is always the same.
            full = group + [group[0]] * (self.together - len(group))
            computed += self._walk(bank, full)[: len(group)]
        return computed

    def _walk(self, bank: BlockSource, blocks: Sequence[int]) -> list[Tensor]:
        decoder = self.decoder
        real_NU = self._real(bank, blocks)
        sizes = real_NU.sum(1).tolist()
        # States of real tokens first; attention is causal, so padding after them has no effect.
        order_NU = real_NU.long().argsort(dim=1, descending=True, stable=True)
        if len(blocks) == 1:
            order_NU = order_NU[:, : sizes[0]]
        memory_NJD = bank.memory(blocks).to(decoder.device, torch.float32)
        restored_NUD = decoder.decompress(memory_NJD).to(decoder.dtype)
        rows_N1 = torch.arange(len(blocks))[:, None]
        start_N1D = self._start().expand(len(blocks), -1, -1)
        hidden_NPD = torch.cat([start_N1D, restored_NUD[rows_N1, order_NU]], dim=1)
        positions_1P = torch.arange(hidden_NPD.shape[1], device=decoder.device)[None]
        valid_1P = torch.ones_like(positions_1P, dtype=torch.bool)
        axis = KeyAxis(positions_1P, valid_1P, padded=False, span=positions_1P.shape[1])
        layers, rope = decoder.upper, decoder.rope(hidden_NPD, positions_1P)
        stored: list[Tensor] = []

        def store(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            stored.append(torch.stack([key[:, :, 1:], value[:, :, 1:]], dim=1))
            return key, value

        biases = biases_of(layers, axis, positions_1P, valid_1P, hidden_NPD.dtype)
        hidden_NPD = run_layers(layers[:-1], hidden_NPD, rope, biases, store)
        # The states after the last layer are not needed.
        store(len(layers) - 1, *layers[-1].project(hidden_NPD, rope)[1:])
        every_NL2GUH = torch.stack(stored, dim=1)
        return [
            block[..., :size, :].contiguous()
            for block, size in zip(every_NL2GUH, sizes, strict=True)
        ]

    def _real(self, bank: BlockSource, blocks: Sequence[int]) -> Tensor:
        return state_mask(bank.slot_tokens(blocks), self.decoder.states_per_slot)

    def _start(self) -> Tensor:
        """State of the start token at the injection layer `[1, 1, D]`."""
        if self._start_11D is None:
            decoder = self.decoder
            ids_11 = torch.full((1, 1), decoder.bos_token_id, device=decoder.device)
            position_11 = torch.zeros_like(ids_11)
            axis = KeyAxis(position_11, position_11 == 0, padded=False, span=1)
            hidden_11D = decoder.embed(ids_11)
            self._start_11D = run_layers(
                decoder.lower,
                hidden_11D,
                decoder.rope(hidden_11D, position_11),
                biases_of(decoder.lower, axis, position_11, axis.valid, hidden_11D.dtype),
            )
        return self._start_11D

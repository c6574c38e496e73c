"""The decoder for inference: fused layers, and the parts that feed the layers above injection.

Letters: B batch, P positions of one call, S slots, U restored states, D width, V vocabulary,
K blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.config import SedemConfig
from sedem.engine.layers import FusedLayer, signed_rope


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder for inference, with the decompressor that feeds its middle layers.

    Attributes:
        config: has the injection layer, the context of blocks and the place of the start token.
        layers: all layers, adapters merged.
        bos_token_id: the start token.
        decompress: module from slots `[..., S, D]` to states `[..., U, D]`.
        states_per_slot: U / S.
        guide: from scores `[B, K]` to attention biases `[B, K]`; None adds nothing.
        embedding: token embeddings `[V, D]`.
        rotary: module from positions to cosine and sine.
        norm: the norm after the last layer.
        head: module from states to logits.
        steps: the same decoder with other matrices for single positions; None means this one.
    """

    config: SedemConfig
    layers: list[FusedLayer]
    bos_token_id: int
    decompress: nn.Module
    states_per_slot: int
    guide: Callable[[Tensor], Tensor] | None
    embedding: Tensor
    rotary: nn.Module
    norm: nn.Module
    head: nn.Module
    steps: FusedDecoder | None = None

    @property
    def lower(self) -> list[FusedLayer]:
        """The layers below injection; they see only text."""
        return self.layers[: self.config.inject_layer]

    @property
    def upper(self) -> list[FusedLayer]:
        """The layers above injection; they see memory too."""
        return self.layers[self.config.inject_layer :]

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of its states."""
        return self.embedding.dtype

    def embed(self, ids_BP: Tensor) -> Tensor:
        """Return token embeddings `[B, P, D]`."""
        return F.embedding(ids_BP, self.embedding)

    def rope(self, hidden_BPD: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary factors of some positions."""
        return signed_rope(*self.rotary(hidden_BPD, position_ids=positions_BP))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return next-token logits `[B, V]` for states after the last layer."""
        return self.head(self.norm(hidden_BD))

"""The frozen encoder for inference alone: fused layers up to the extraction layer and no further.

Letters: B batch, T tokens, E width, X extraction layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.backbone.masks import KeyAxis
from sedem.engine.cuda_graphs import Pool, Replay
from sedem.engine.layers import FusedLayer, biases_of, run_layers, signed_rope


@dataclass(frozen=True)
class FusedEncoder:
    """The first layers of a backbone without adapters.

    Attributes:
        layers: as many as are run.
        extract_layers: numbers of layers run whose states are wanted.
        bos_token_id: the token that stands in front.
        embedding: of tokens `[V, E]`.
        rotary: positions to cosine and sine.
    """

    layers: list[FusedLayer]
    extract_layers: tuple[int, ...]
    bos_token_id: int
    embedding: Tensor
    rotary: nn.Module

    def states(self, ids_BT: Tensor) -> Tensor:
        """What `encoder.encode` gives: states `[X, B, T, E]`, the start token's dropped."""
        start_B1 = ids_BT.new_full((ids_BT.shape[0], 1), self.bos_token_id)
        hidden_BPE = F.embedding(torch.cat([start_B1, ids_BT], dim=1), self.embedding)
        positions_1P = torch.arange(hidden_BPE.shape[1], device=ids_BT.device)[None]
        valid_1P = torch.ones_like(positions_1P, dtype=torch.bool)
        axis = KeyAxis(positions_1P, valid_1P, padded=False, span=positions_1P.shape[1])
        biases = biases_of(self.layers, axis, positions_1P, valid_1P, hidden_BPE.dtype)
        rope = signed_rope(*self.rotary(hidden_BPE, position_ids=positions_1P))
        states: dict[int, Tensor] = {}
        done = 0
        for layer in sorted(set(self.extract_layers)):
            hidden_BPE = run_layers(self.layers[done:layer], hidden_BPE, rope, biases)
            states[layer], done = hidden_BPE, layer
        return torch.stack([states[layer][:, 1:] for layer in self.extract_layers])


class QuestionBuffers:
    """Questions of one bucket, encoded in buffers of fixed size.

    Args:
        encoder: what runs.
        rows: B.
        tokens: T.
        graph: whether to capture a CUDA graph.
        pool: memory that graphs share.
    """

    def __init__(
        self,
        encoder: FusedEncoder,
        rows: int,
        tokens: int,
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        embedding, kinds = encoder.embedding, len(encoder.extract_layers)
        self.encoder = encoder
        self.ids = torch.zeros(rows, tokens, dtype=torch.long, device=embedding.device)
        self.states = embedding.new_zeros(kinds, rows, tokens, embedding.shape[1])
        self._run = Replay(self.buffers, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All of its tensors."""
        return [self.ids, self.states]

    def encode(self, ids_BT: Tensor) -> Tensor:
        """States `[X, B, T, E]` of no more and no longer questions than the bucket holds."""
        rows, tokens = ids_BT.shape
        self.ids.zero_()
        self.ids[:rows, :tokens] = ids_BT
        self._run(self._encode)
        return self.states[:, :rows, :tokens].clone()

    def _encode(self) -> None:
        self.states.copy_(self.encoder.states(self.ids))

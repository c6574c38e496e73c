"""The frozen encoder for inference: fused layers up to the last extraction layer.

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
from sedem.engine.upload import Upload


@dataclass(frozen=True)
class FusedEncoder:
    """The first layers of a backbone, without adapters.

    Attributes:
        layers: the layers up to the last extraction layer.
        extract_layers: numbers of layers after which states are extracted, one for each of X.
        bos_token_id: the token before every text.
        embedding: token embeddings `[V, E]`.
        rotary: module from positions to cosine and sine.
    """

    layers: list[FusedLayer]
    extract_layers: tuple[int, ...]
    bos_token_id: int
    embedding: Tensor
    rotary: nn.Module

    def states(self, ids_BT: Tensor) -> Tensor:
        """Return states `[X, B, T, E]` without the start token's, like `method.encoder.encode`."""
        start_B1 = ids_BT.new_full((ids_BT.shape[0], 1), self.bos_token_id)
        hidden_BPE = F.embedding(torch.cat([start_B1, ids_BT], dim=1), self.embedding)
        positions_1P = torch.arange(hidden_BPE.shape[1], device=ids_BT.device)[None]
        valid_1P = torch.ones_like(positions_1P, dtype=torch.bool)
        axis = KeyAxis(positions_1P, valid_1P, padded=False, span=positions_1P.shape[1])
        biases = biases_of(self.layers, axis, positions_1P, valid_1P, hidden_BPE.dtype)
        rope = signed_rope(*self.rotary(hidden_BPE, position_ids=positions_1P))
        states: dict[int, Tensor] = {}
        depth = 0
        for layer in sorted(set(self.extract_layers)):
            hidden_BPE = run_layers(self.layers[depth:layer], hidden_BPE, rope, biases)
            states[layer], depth = hidden_BPE, layer
        return torch.stack([states[layer][:, 1:] for layer in self.extract_layers])


class QuestionBuffers:
    """Fixed buffers in which questions of at most a given number and length are encoded.

    Args:
        encoder: the encoder.
        rows: B, the maximum number of questions.
        tokens: T, the maximum number of tokens per question.
        graph: whether to capture the encoding as a CUDA graph.
        pool: memory that graphs share.

    Attributes:
        ids: token ids `[B, T]`, zero where a question has ended.
        states: their states `[X, B, T, E]`.
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
        embedding, layers = encoder.embedding, len(encoder.extract_layers)
        self.encoder = encoder
        self.upload = Upload(embedding.device, {"ids": ((rows, tokens), torch.long)})
        self.ids = self.upload.device["ids"]
        self.states = embedding.new_zeros(layers, rows, tokens, embedding.shape[1])
        self._replay_encode = Replay(self.buffers, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        return [self.upload.buffer, self.states]

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return a copy of the states `[X, B, T, E]` of questions that fit into the buffers.

        Args:
            ids_BT: token ids on the CPU.
        """
        rows, tokens = ids_BT.shape
        self.upload.begin()
        ids = self.upload.host["ids"].zero_()
        ids[:rows, :tokens] = ids_BT
        self.upload.send()
        self._replay_encode(self._encode)
        return self.states[:, :rows, :tokens].clone()

    def _encode(self) -> None:
        self.states.copy_(self.encoder.states(self.ids))

"""Encoder and decoder for inference: matrices joined, adapters merged, no copy of a weight.

Each module's weight becomes a view into the fused matrix, so Hugging Face's modules keep working.
Layers that a frozen encoder also needs keep their frozen attention next to the merged one, and
share the rest.

Letters: B batch, P positions of one call, T tokens, S slots, U restored states, E encoder width,
D decoder width, V vocabulary, K blocks, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.config import SedemConfig
from sedem.engine.buffers import Pool, Replay, Upload
from sedem.engine.layers import FusedLayer, biases_of, run_layers, signed_rope
from sedem.method.encoder import encode
from sedem.modules import SedemModules

ADAPTER = "default"


@dataclass(frozen=True)
class FusedEncoder:
    """The first layers of a backbone, without adapters.

    Attributes:
        layers: the layers up to the last extraction layer.
        extract_layers: numbers of layers after which states are extracted, one for each of X.
        embedding: token embeddings `[V, E]`.
        rotary: module from positions to cosine and sine.
    """

    layers: list[FusedLayer]
    extract_layers: tuple[int, ...]
    bos_token_id: int
    embedding: Tensor
    rotary: nn.Module

    def embed(self, ids_BP: Tensor) -> Tensor:
        """Return token embeddings `[B, P, E]`."""
        return F.embedding(ids_BP, self.embedding)

    def run(self, hidden_BPD: Tensor, first: int, last: int, positions_BP: Tensor) -> Tensor:
        """Run layers `first` to `last` on texts without padding, as `Backbone.run`."""
        # Positions of all rows are the same.
        positions_1P = positions_BP[:1]
        valid_1P = torch.ones_like(positions_1P, dtype=torch.bool)
        axis = KeyAxis(positions_1P, valid_1P, padded=False, span=positions_1P.shape[1])
        layers = self.layers[first:last]
        rope = signed_rope(*self.rotary(hidden_BPD, position_ids=positions_1P))
        biases = biases_of(layers, axis, positions_1P, valid_1P, hidden_BPD.dtype)
        return run_layers(layers, hidden_BPD, rope, biases)

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Do nothing, because there are no adapters."""
        yield

    def states(self, ids_BT: Tensor) -> Tensor:
        """Return states `[X, B, T, E]` without the start token's."""
        return encode(self, ids_BT, self.extract_layers)


class QuestionBuffers:
    """Fixed buffers in which questions of at most a given number and length are encoded.

    Args:
        rows: B, the maximum number of questions.
        tokens: T, the maximum number of tokens per question.
        graph: whether to capture the encoding as a CUDA graph.

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
        return [self.ids, self.states]

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


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder for inference, with the decompressor that feeds its middle layers.

    Attributes:
        config: has the injection layer, the context of blocks and the place of the start token.
        decompress: module from slots `[..., S, D]` to states `[..., U, D]`.
        guide: from scores `[B, K]` to attention biases `[B, K]`; None adds nothing.
        embedding: token embeddings `[V, D]`.
        rotary: module from positions to cosine and sine.
        norm: the norm after the last layer.
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


def fuse_modules(model: SedemModules) -> tuple[FusedEncoder, FusedDecoder]:
    """Fuse the encoder and the decoder of a model; layers share weights where possible."""
    config, encoder, decoder = model.config, model.encoder, model.decoder
    frozen = frozen_layers(encoder, config.extract_layer)
    fused_encoder = FusedEncoder(
        frozen,
        config.extract_layers,
        encoder.bos_token_id,
        encoder.model.get_input_embeddings().weight,
        encoder.model.get_decoder().rotary_emb,
    )
    if encoder is not decoder:
        encoder.truncate(config.extract_layer)
    fused_decoder = FusedDecoder(
        config,
        adapted_layers(decoder, frozen if encoder is decoder else ()),
        decoder.bos_token_id,
        _for_inference(model.decompressor, decoder),
        model.decompressor.states_per_slot,
        model.guidance,
        decoder.model.get_input_embeddings().weight,
        decoder.model.get_decoder().rotary_emb,
        decoder.model.get_decoder().norm,
        decoder.model.get_output_embeddings(),
    )
    return fused_encoder, fused_decoder


class Rounded(nn.Module):
    """A copy of a part in another type; its inputs are cast too."""

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.part, self.dtype = deepcopy(part).to(dtype), dtype

    def forward(self, states: Tensor) -> Tensor:
        """Run the copy."""
        return self.part(states.to(self.dtype))


def frozen_layers(backbone: Backbone, depth: int) -> list[FusedLayer]:
    """Fuse the first `depth` layers without adapters."""
    return [_fuse(backbone, index, merge=False) for index in range(depth)]


def adapted_layers(backbone: Backbone, frozen: Sequence[FusedLayer]) -> list[FusedLayer]:
    """Fuse all layers with their adapters merged, in float32 and rounded once.

    Args:
        frozen: its first layers if it is the encoder too, otherwise empty. They stay as they are,
            next to merged copies. Above them, merged weights replace the frozen ones.
    """
    shared = [_merged_copy(backbone, index, layer) for index, layer in enumerate(frozen)]
    above = range(len(frozen), backbone.depth)
    backbone.merged_from = len(frozen) if backbone.has_lora else None
    return shared + [_fuse(backbone, index, merge=True) for index in above]


def _fuse(backbone: Backbone, index: int, *, merge: bool) -> FusedLayer:
    layer = backbone.model.get_decoder().layers[index]
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    if merge:
        for projection in projections:
            _merge_in_place(projection)
    query, key, value, out = (_base_linear(projection) for projection in projections)
    width = attention.head_dim
    heads, key_heads = len(query.weight) // width, len(key.weight) // width
    qkv, qkv_bias = _join(query, key, value)
    gate_up, gate_up_bias = _join(mlp.gate_proj, mlp.up_proj)
    return FusedLayer(
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out.weight,
        out_bias=out.bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        head_norm=_head_norm(attention, heads, key_heads),
        heads=heads,
        key_heads=key_heads,
        eps=layer.input_layernorm.variance_epsilon,
        activation=mlp.act_fn,
        window=backbone.window(index),
    )


def _merged_copy(backbone: Backbone, index: int, frozen: FusedLayer) -> FusedLayer:
    """The layer with its own attention weights, adapters merged; all else is shared."""
    if not backbone.has_lora:
        return frozen
    attention = backbone.model.get_decoder().layers[index].self_attn
    rows = [_merged_weight(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return replace(frozen, qkv=torch.cat(rows), out=_merged_weight(attention.o_proj))


def _merge_in_place(projection: Any) -> None:
    if _is_adapted(projection):
        _base_linear(projection).weight.data = _merged_weight(projection)
        # PEFT then runs the module without its adapter.
        projection.merged_adapters = [ADAPTER]


def _merged_weight(projection: Any) -> Tensor:
    weight: Tensor = _base_linear(projection).weight.data
    delta: Tensor = projection.get_delta_weight(ADAPTER)
    return (weight.float() + delta.float()).to(weight.dtype)


def _base_linear(projection: Any) -> nn.Linear:
    return projection.base_layer if _is_adapted(projection) else projection


def _is_adapted(projection: Any) -> bool:
    return hasattr(projection, "base_layer")


def _join(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Join the weights and the biases of some projections, which become views of the result."""
    weight = _join_rows([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, _join_rows(biases) if biases else None


def _join_rows(parameters: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    views = joined.split([len(parameter.data) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return joined


def _head_norm(attention: Any, heads: int, key_heads: int) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
    return torch.cat([query.expand(heads, -1), key.expand(key_heads, -1)])


def _for_inference(decompressor: nn.Module, decoder: Backbone) -> nn.Module:
    """The decompressor, in the decoder's type on a GPU, where float32 products are slow."""
    on_cpu = decoder.device.type == "cpu"
    return decompressor if on_cpu else Rounded(decompressor, decoder.dtype)

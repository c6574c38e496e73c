"""Llama-style decoders for inference: fused matrices, merged adapters, no copy of a weight.

The arithmetic equals that of Hugging Face's layers, operation by operation. In float32 on a CPU,
the states of a batch without padding are bitwise equal. Each module's weight becomes a view into
the fused matrix, so Hugging Face's modules keep working. Layers that a frozen encoder also needs
keep their frozen attention next to the merged one, and share the rest.

Letters: B batch, P positions of one call, Q of them whose states are needed, K keys or blocks, T
tokens, S slots, U restored states, E encoder width, D decoder width, F query heads, G query heads
per key head, H head width, V vocabulary, X extraction layers.
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

from sedem.backbone.decoder import Backbone, KeyAxis, KeyValues
from sedem.config import SedemConfig
from sedem.engine.device import between_pieces
from sedem.engine.interface import WIDE
from sedem.method.compressor import encode
from sedem.modules import SedemModules

ADAPTER = "default"

Bias = Tensor | None
"""Added to attention logits `[B, 1, P, K]`; None means plain causal attention."""

COMPARED = 8
"""Positions that are compared at a time with all columns of a very long memory."""

MATRICES = ("qkv", "out", "gate_up", "down")
"""Names of a layer's matrices."""


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer.

    Attributes:
        qkv: query, key and value projections, concatenated by rows.
        gate_up: gate and up projections, concatenated by rows.
        attention_norm: scale of the norm before attention `[D]`.
        mlp_norm: scale of the norm before the MLP `[D]`.
        head_norm: scales of the norms of query and key heads `[heads + key_heads, H]`, or None.
        key_heads: number of key and of value heads.
        window: number of positions that attention sees, its own included; None means all.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norm: Tensor | None
    heads: int
    key_heads: int
    head_width: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    window: int | None

    def linear(self, name: str, states: Tensor) -> Tensor:
        """Multiply states with one of `MATRICES` and add its bias."""
        return F.linear(states, getattr(self, name), getattr(self, f"{name}_bias"))

    def project(
        self, hidden_BPD: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries `[B, F, P, H]`, rotated keys and values `[B, heads, P, H]`.

        Args:
            rope: cosine and sine of the positions; the sine has the sign of the half of each head
                that rolls over.
        """
        normed = F.rms_norm(hidden_BPD, self.attention_norm.shape, self.attention_norm, self.eps)
        heads = self.linear("qkv", normed).unflatten(-1, (-1, self.head_width))
        rotated, value = heads.split([self.heads + self.key_heads, self.key_heads], dim=2)
        if self.head_norm is not None:
            rotated = F.rms_norm(rotated, rotated.shape[-1:], None, self.eps) * self.head_norm
        # Queries and keys at once.
        cosine, sine = rope
        half = self.head_width // 2
        rotated = (rotated * cosine).add_(rotated.roll(half, -1).mul_(sine))
        query, key = rotated.split([self.heads, self.key_heads], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def finish(self, hidden_BPD: Tensor, mixed_BPD: Tensor) -> Tensor:
        """Return the states after this layer, from those before it and its heads' outputs."""
        hidden_BPD = hidden_BPD + self.linear("out", mixed_BPD)
        normed = F.rms_norm(hidden_BPD, self.mlp_norm.shape, self.mlp_norm, self.eps)
        gate, up = self.linear("gate_up", normed).chunk(2, dim=-1)
        return hidden_BPD + self.linear("down", self.activation(gate) * up)


def attend(query_BFPH: Tensor, key: Tensor, value: Tensor, bias: Bias) -> Tensor:
    """Grouped-query attention `[B, P, F * H]`.

    A single position copies neither keys nor values: the query heads of a key head become its rows.
    Several positions with a bias repeat them, since fused kernels support no bias with groups. GPU
    kernels also do not support groups in float32. For a very long memory on a CPU, they repeat only
    those of one key head at a time, as views.
    """
    rows, heads, count, width = query_BFPH.shape
    groups = heads // key.shape[1]
    if bias is None:
        if groups > 1 and query_BFPH.is_cuda and query_BFPH.dtype == torch.float32:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(
            query_BFPH, key, value, is_causal=True, enable_gqa=key.shape[1] < heads
        )
    elif count == 1:
        grouped = query_BFPH.reshape(rows, -1, groups, width)
        mixed = F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias)
        return mixed.reshape(rows, 1, heads * width)
    elif key.shape[2] > WIDE and not key.is_cuda:
        parts = []
        for head, own in enumerate(query_BFPH.split(groups, dim=1)):
            k, v = (t[:, head : head + 1].expand(-1, groups, -1, -1) for t in (key, value))
            parts.append(F.scaled_dot_product_attention(own, k, v, attn_mask=bias))
            between_pieces()
        mixed = torch.cat(parts, dim=1)
    else:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query_BFPH, key, value, attn_mask=bias)
    return mixed.transpose(1, 2).reshape(rows, count, heads * width)


def biases_of(
    layers: Sequence[FusedLayer],
    keys: KeyAxis,
    positions_BP: Tensor,
    valid_BP: Tensor,
    dtype: torch.dtype,
    block_BP: Tensor | None = None,
) -> dict[int | None, Bias]:
    """Return one bias for each window size among the layers.

    Args:
        valid_BP: False where a position is padding.
        block_BP: block of each position of this call, -1 for text; None if all are text.

    Returns:
        Biases by window; None where causal attention over this call's columns is enough, because
        `keys` has no others, is plain and spans no more than the window.
    """
    biases: dict[int | None, Bias] = {}
    count, columns = positions_BP.shape[1], keys.positions.shape[1]
    for window in {layer.window for layer in layers}:
        if keys.plain and columns == count and (window is None or keys.span <= window):
            biases[window] = None
            continue
        parts = []
        # What is compared for a very long memory is much larger than the bias.
        for first in range(0, count, count if columns <= WIDE else COMPARED):
            some = slice(first, first + (count if columns <= WIDE else COMPARED))
            block_Bp = None if block_BP is None else block_BP[:, some]
            visible = keys.visible_to(positions_BP[:, some], valid_BP[:, some], window, block_Bp)
            parts.append(keys.added_to(visible, dtype, block_BP=block_Bp))
        biases[window] = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, None]
    return biases


@dataclass(frozen=True)
class FusedLayers:
    """Layers that run as those of a `Backbone` do.

    Attributes:
        embedding: token embeddings `[V, D]`.
        rotary: module from positions to cosine and sine.
    """

    layers: list[FusedLayer]
    bos_token_id: int
    embedding: Tensor
    rotary: nn.Module

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the states."""
        return self.embedding.dtype

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Do nothing: what runs without adapters has layers of its own."""
        yield

    def embed(self, ids_BP: Tensor) -> Tensor:
        """Return token embeddings `[B, P, D]`."""
        return F.embedding(ids_BP, self.embedding)

    def run(
        self,
        hidden_BPD: Tensor,
        first: int,
        last: int,
        positions_BP: Tensor,
        valid_BP: Tensor | None = None,
        keys: KeyAxis | None = None,
        cache: KeyValues | None = None,
        block_BP: Tensor | None = None,
        only_BQ: Tensor | None = None,
    ) -> Tensor:
        """Run layers first + 1 to last; see `Backbone.run`.

        Without `keys`, the positions of all rows are the same. The last layer computes only the
        positions in `only_BQ`, of which there is at most one in each row.
        """
        if first == last:
            return hidden_BPD
        if keys is None:
            positions_BP = positions_BP[:1]
            valid_BP = torch.ones_like(positions_BP, dtype=torch.bool)
            keys = KeyAxis(positions_BP, valid_BP, padded=False, span=positions_BP.shape[1])
        assert valid_BP is not None
        layers = self.layers[first:last]
        cosine_BPH, sine_BPH = self.rotary(hidden_BPD, position_ids=positions_BP)
        first_half, second_half = sine_BPH.chunk(2, dim=-1)
        signed_BPH = torch.cat([-first_half, second_half], dim=-1)
        rope = cosine_BPH[:, :, None], signed_BPH[:, :, None]
        biases = biases_of(layers, keys, positions_BP, valid_BP, hidden_BPD.dtype, block_BP)
        query, key, value = layers[0].project(hidden_BPD, rope)
        for index, layer in enumerate(layers, start=first):
            between_pieces()
            bias, alone = biases[layer.window], only_BQ if index == last - 1 else None
            if cache is not None:
                key, value = cache.update(key, value, index)
            if alone is not None:
                hidden_BPD = torch.take_along_dim(hidden_BPD, alone[..., None], 1)
                if not alone.shape[1]:
                    return hidden_BPD
            if alone is not None and bias is not None:
                query, bias = (
                    torch.take_along_dim(t, alone[:, None, :, None], 2) for t in (query, bias)
                )
            mixed = attend(query, key, value, bias)
            if alone is not None and bias is None:
                # Without a mask, all positions attend: causal attention counts from the first.
                mixed = torch.take_along_dim(mixed, alone[..., None], 1)
            hidden_BPD = layer.finish(hidden_BPD, mixed)
            if index < last - 1:
                query, key, value = layers[index + 1 - first].project(hidden_BPD, rope)
        return hidden_BPD


@dataclass(frozen=True)
class FusedEncoder(FusedLayers):
    """The first layers of a backbone, without adapters.

    Attributes:
        extract_layers: numbers of layers after which states are extracted, one for each of X.
    """

    extract_layers: tuple[int, ...]

    def states(self, ids_BT: Tensor) -> Tensor:
        """Return states `[X, B, T, E]` without the start token's."""
        return encode(self, ids_BT, self.extract_layers)


@dataclass(frozen=True)
class FusedDecoder(FusedLayers):
    """A decoder for inference, with the decompressor that feeds its middle layers.

    Attributes:
        model: has the configuration, which may change after its layers are fused.
        decompress: module from slots `[..., S, D]` to states `[..., U, D]`.
        guide: from scores `[B, K]` to attention biases `[B, K]`; None adds nothing.
        steps: the same decoder with other matrices for single positions; None means this one.
    """

    model: SedemModules
    decompress: nn.Module
    states_per_slot: int
    guide: Callable[[Tensor], Tensor] | None
    norm: nn.Module
    head: nn.Module
    steps: FusedDecoder | None = None

    @property
    def config(self) -> SedemConfig:
        """The model's configuration as it is now."""
        return self.model.config

    @property
    def upper(self) -> list[FusedLayer]:
        """The layers above injection; they see memory too."""
        return self.layers[self.config.inject_layer :]

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return next-token logits `[B, V]` for states after the last layer."""
        return self.head(self.norm(hidden_BD))


def fuse_modules(model: SedemModules) -> tuple[FusedEncoder, FusedDecoder]:
    """Fuse the encoder and the decoder of a model; layers share weights where possible."""
    config, encoder, decoder = model.config, model.encoder, model.decoder
    frozen = [_fuse(encoder, index, merge=False) for index in range(config.extract_layer)]
    # Layers that the encoder needs too stay as they are. With adapters, they stand next to copies
    # whose attention is merged. Above them, merged weights replace the frozen ones.
    shared = frozen if encoder is decoder else []
    layers = [*shared]
    for index, layer in enumerate(shared if decoder.has_lora else []):
        own = decoder.model.get_decoder().layers[index].self_attn
        rows = [_merged_weight(p) for p in (own.q_proj, own.k_proj, own.v_proj)]
        layers[index] = replace(layer, qkv=torch.cat(rows), out=_merged_weight(own.o_proj))
    layers += [_fuse(decoder, index, merge=True) for index in range(len(shared), decoder.depth)]
    decoder.merged_from = len(shared) if decoder.has_lora else None
    fused_encoder = FusedEncoder(
        frozen,
        encoder.bos_token_id,
        encoder.model.get_input_embeddings().weight,
        encoder.model.get_decoder().rotary_emb,
        config.extract_layers,
    )
    if encoder is not decoder:
        encoder.truncate(config.extract_layer)
    # Products in float32 are slow on a GPU.
    decompressor: nn.Module = model.decompressor
    if decoder.device.type != "cpu":
        decompressor = Rounded(decompressor, decoder.dtype)
    fused_decoder = FusedDecoder(
        layers,
        decoder.bos_token_id,
        decoder.model.get_input_embeddings().weight,
        decoder.model.get_decoder().rotary_emb,
        model,
        decompressor,
        model.decompressor.states_per_slot,
        model.guidance,
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


def _fuse(backbone: Backbone, index: int, *, merge: bool) -> FusedLayer:
    layer = backbone.model.get_decoder().layers[index]
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    for projection in projections:
        if merge and hasattr(projection, "base_layer"):
            projection.base_layer.weight.data = _merged_weight(projection)
            # PEFT then runs the module without its adapter.
            projection.merged_adapters = [ADAPTER]
    # The linear map that an adapter adds to; the projection itself without one.
    query, key, value, out = (getattr(p, "base_layer", p) for p in projections)
    width = attention.head_dim
    heads, key_heads = len(query.weight) // width, len(key.weight) // width
    head_norm = None
    if hasattr(attention, "q_norm"):
        query_norm, key_norm = attention.q_norm.weight.data, attention.k_norm.weight.data
        head_norm = torch.cat([query_norm.expand(heads, -1), key_norm.expand(key_heads, -1)])
    gate, up = mlp.gate_proj, mlp.up_proj
    return FusedLayer(
        qkv=_join(query.weight, key.weight, value.weight),
        qkv_bias=None if query.bias is None else _join(query.bias, key.bias, value.bias),
        out=out.weight,
        out_bias=out.bias,
        gate_up=_join(gate.weight, up.weight),
        gate_up_bias=None if gate.bias is None else _join(gate.bias, up.bias),
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        head_norm=head_norm,
        heads=heads,
        key_heads=key_heads,
        head_width=width,
        eps=layer.input_layernorm.variance_epsilon,
        activation=mlp.act_fn,
        window=backbone.window(index),
    )


def _merged_weight(projection: Any) -> Tensor:
    weight: Tensor = projection.base_layer.weight.data
    delta: Tensor = projection.get_delta_weight(ADAPTER)
    return (weight.float() + delta.float()).to(weight.dtype)


def _join(*parameters: Tensor) -> Tensor:
    """Join the rows of some weights or biases, which become views of the result."""
    joined = torch.cat([parameter.data for parameter in parameters])
    views = joined.split([len(parameter.data) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return joined

"""Fuse Hugging Face's encoder and decoder: matrices joined, adapters merged, no copy.

Each module's weight becomes a view into the fused matrix, so the modules keep working. Layers that
a frozen encoder also needs keep their frozen attention next to the merged one, and share the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.engine.decoder import FusedDecoder
from sedem.engine.encoder import FusedEncoder
from sedem.engine.layers import FusedLayer
from sedem.modules import SedemModules

ADAPTER = "default"


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
        backbone: the decoder.
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

"""A Hugging Face decoder's weights as fused layers: fused, adapters merged, nothing kept twice.

Fused matrices take the place of the modules' own: each module's weight becomes a view into one, so
the modules go on working. Layers that a frozen encoder needs keep their frozen attention beside the
merged one, and share all else with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.engine.layers import FusedLayer

ADAPTER = "default"


def frozen_layers(backbone: Backbone, depth: int) -> list[FusedLayer]:
    """The first `depth` layers without adapters."""
    return [_fuse(backbone, index, merge=False) for index in range(depth)]


def adapted_layers(backbone: Backbone, frozen: Sequence[FusedLayer]) -> list[FusedLayer]:
    """All layers with their adapters merged, the product in float32 and rounded once.

    Args:
        backbone: the decoder.
        frozen: its first layers, if it is the encoder too: they stay as they are. Above them
            nothing needs the frozen weights any more, and merged ones take their place.
    """
    shared = [_merge_beside(backbone, index, layer) for index, layer in enumerate(frozen)]
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
    query, key, value, out = (_linear(projection) for projection in projections)
    width = attention.head_dim
    heads, key_heads = len(query.weight) // width, len(key.weight) // width
    qkv, qkv_bias = _joined(query, key, value)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
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


def _merge_beside(backbone: Backbone, index: int, frozen: FusedLayer) -> FusedLayer:
    if not backbone.has_lora:
        return frozen
    attention = backbone.model.get_decoder().layers[index].self_attn
    rows = [_merged(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return replace(frozen, qkv=torch.cat(rows), out=_merged(attention.o_proj))


def _merge_in_place(projection: nn.Module) -> None:
    if isinstance(projection, LoraLayer):
        _linear(projection).weight.data = _merged(projection)
        # PEFT then runs the module without its factors.
        projection.merged_adapters = [ADAPTER]


def _merged(projection: LoraLayer) -> Tensor:
    weight: Tensor = _linear(projection).weight.data
    delta: Tensor = projection.get_delta_weight(ADAPTER)
    return (weight.float() + delta.float()).to(weight.dtype)


def _linear(projection: Any) -> nn.Linear:
    return projection.base_layer if isinstance(projection, LoraLayer) else projection


def _joined(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of some projections below one another, theirs as views into it."""
    weight = _adopt([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    return weight, _adopt(biases) if biases else None


def _adopt(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    views = whole.split([len(parameter.data) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return whole


def _head_norm(attention: Any, heads: int, key_heads: int) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
    return torch.cat([query.expand(heads, -1), key.expand(key_heads, -1)])

"""A model that works without any training: states are read and injected at the same layer. Ours."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.modules import SedemModules

SEED = 0
"""Seed of the selector's random projections, so that each backbone has one untrained model."""


WORD_WEIGHT = 0.2
"""Weight of the words of a question beside untrained states, fitted as experiments/log.md says."""

Model = TypeVar("Model", bound=SedemModules)


def untrained(
    kind: type[Model],
    backbone: Backbone,
    *,
    layer: int | None = None,
    chat_template: bool | None = None,
    **settings: Any,
) -> Model:
    """Build the parts of a model that needs no training.

    A slot is the state of one token, unchanged, so nothing is compressed. Blocks are independent:
    above the layer, the decoder computes for a block exactly what it computes when it reads the
    block's text alone. The selector compares states in the same random projections, beside words,
    and its scores guide attention.

    Args:
        layer: number of layers to run before states are read, and before they are injected; None
            means half of them.
        chat_template: whether questions use the tokenizer's chat template; None means that they do
            if it has one.
        settings: other settings of the configuration, such as segment_length and k.

    Raises:
        ConfigError: there is no layer before the given one, or none after it.
    """
    layer = backbone.depth // 2 if layer is None else layer
    if not 1 <= layer < backbone.depth:
        raise ConfigError(
            f"layer is {layer}, but backbone '{backbone.name}' has {backbone.depth} layers; give a "
            f"layer from 1 to {backbone.depth - 1}, so that some are before and some after it"
        )
    if chat_template is None:
        chat_template = bool(backbone.tokenizer.chat_template)
    config = SedemConfig(
        encoder=backbone.name,
        extract_layers=(layer,),
        inject_layer=layer,
        compression=1,
        decompressor="identity",
        block_context="independent",
        guidance=True,
        chat_template=chat_template,
        selection="both",
        word_weight=WORD_WEIGHT,
        lora_rank=0,
    ).with_changes(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return kind(config, backbone, backbone).eval()

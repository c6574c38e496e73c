"""The trained parts of one model, joined with the backbones they work on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.guidance import (
    READ_ONCE_RANK,
    Confidence,
    Guidance,
    Queries,
    SecondHop,
    SecondReading,
    SpanScorer,
)
from sedem.method.compressor import LayerMixture, build_compressor
from sedem.method.injection import build_decompressor
from sedem.method.selector import build_selector


class SedemModules(nn.Module):
    """The parts of one model: backbones, compressor C, selector R and decompressor D (section 3).

    Hidden states of the encoder go through `mixture` and `compressor` into a bank; `selector`
    scores its blocks for a question; `decompressor` restores the selected blocks for the decoder.
    The trained parts stay in float32 for backbones of any type, so that a bank's fingerprint does
    not depend on the machine.

    Args:
        decoder: the backbone that answers; the same object in the same-backbone setting.

    Raises:
        ConfigError: a layer, a width or the prompt of the configuration does not suit a backbone.
    """

    def __init__(self, config: SedemConfig, encoder: Backbone, decoder: Backbone) -> None:
        super().__init__()
        check_layers(config, encoder, decoder)
        self.config = config
        self.encoder = encoder
        self.decoder = decoder
        self.mixture = LayerMixture(
            len(config.extract_layers), learned=config.layer_mixing == "learned"
        )
        self.compressor = build_compressor(config, encoder.width, decoder.width)
        self.selector = build_selector(config, encoder.width, decoder.width)
        self.decompressor = build_decompressor(config, decoder.width)
        self.guidance = Guidance() if config.guidance else None
        self.confidence = Confidence() if config.confidence else None
        self.second_hop = SecondHop(self.selector) if config.second_hop else None
        self.read_once = Queries(self.selector, READ_ONCE_RANK) if config.read_once else None
        self.spans = SpanScorer()
        self.second_reading = SecondReading() if config.second_reading else None
        self._digest: tuple[tuple[int, ...], str] | None = None

    def forget_fitted(self) -> None:
        """Remove the parts that `sedem calibrate` fits."""
        self.confidence = self.second_hop = self.read_once = self.second_reading = None
        self.spans = SpanScorer()

    @property
    def device(self) -> torch.device:
        """Device of the decoder."""
        return self.decoder.device

    def parts(self) -> nn.ModuleDict:
        """The trained parts without the adapters, by their names in sedem.safetensors."""
        names = [
            "mixture", "compressor", "selector", "decompressor", "guidance", "confidence",
            "second_hop", "read_once", *(["spans"] if self.config.spans else []), "second_reading",
        ]  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return nn.ModuleDict({name: part for name, part in found.items() if part is not None})

    def queries(self, hidden_BQE: Tensor) -> Tensor:
        """Unit queries `[B, Q, R, H]` from the states of questions that blocks are selected by."""
        if self.read_once is None:
            return self.selector.queries(hidden_BQE)
        return self.read_once.queries(self.selector, hidden_BQE)

    def fingerprint(self) -> str:
        """Hash of all that memory depends on: encoder, tokenizer, `made_by` and trained weights.

        Only a model with the bank's fingerprint can use a bank. The hash is recomputed when a
        weight of the mixture or of the compressor has changed.
        """
        tensors = [
            t
            for part in (self.mixture, self.compressor)
            for t in part.state_dict(keep_vars=True).values()
        ]
        state = tuple(value for t in tensors for value in (t.data_ptr(), t._version))
        if self._digest is None or self._digest[0] != state:
            digest = hashlib.sha256(json.dumps(self.made_by(), sort_keys=True).encode())
            digest.update(self.encoder.digest.encode())
            for tensor in tensors:
                exact = tensor.detach().to("cpu", torch.float32).contiguous()
                digest.update(exact.numpy().tobytes())
            self._digest = (state, digest.hexdigest())
        return self._digest[1]

    def made_by(self) -> dict[str, Any]:
        """The settings that memory depends on, as a bank records them."""
        config = self.config
        return {
            "extract_layers": list(config.extract_layers),
            "segment_length": config.segment_length,
            **({"segment_shift": config.segment_shift} if config.segment_shift else {}),
            "compression": config.compression,
            "block_slots": config.slots_per_block,
            "compressor": config.compressor,
            "width": self.decoder.width,
        }


def check_layers(config: SedemConfig, encoder: Backbone, decoder: Backbone) -> None:
    """Check that a configuration suits its backbones.

    Raises:
        ConfigError: a layer or a width does not suit (the message has both numbers), or the decoder
            lacks a usable chat template that the configuration requires.
    """
    if config.extract_layer > encoder.depth:
        raise ConfigError(
            f"extract_layers reaches {config.extract_layer}, encoder '{encoder.name}' has "
            f"{encoder.depth} layers"
        )
    if config.inject_layer >= decoder.depth:
        raise ConfigError(
            f"inject_layer is {config.inject_layer}, decoder '{decoder.name}' has {decoder.depth} "
            "layers; at least one must come after it"
        )
    if config.segment_length >= encoder.max_positions:
        raise ConfigError(
            f"segment_length {config.segment_length} and a start token exceed the "
            f"{encoder.max_positions} positions of encoder '{encoder.name}'"
        )
    if config.compressor == "query" and decoder.width % config.compressor_heads:
        raise ConfigError(
            f"decoder width {decoder.width} is not a multiple of compressor_heads "
            f"{config.compressor_heads}"
        )
    if config.selector_dim is None and decoder.width % config.selector_heads:
        raise ConfigError(
            f"decoder width {decoder.width} is not a multiple of selector_heads "
            f"{config.selector_heads}; set selector_dim"
        )
    if config.chat_template:
        _ = decoder.chat  # raises if the template is missing or unusable

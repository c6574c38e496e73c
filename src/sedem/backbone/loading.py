"""Opening backbones: from a folder, in full or as int8 rows, or from the hub; do they suit?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from sedem.backbone.decoder import ATTENTION, Backbone, check_family
from sedem.backbone.safetensors import check_weights, dequantize_int8, load_weights
from sedem.errors import CheckpointError, ConfigError

INT8_FILE = "model.int8.safetensors"


def open_backbone(
    name: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
) -> Backbone:
    """Open a backbone from a folder or the hub.

    A folder may hold the weights as int8 rows with a scale a row (`model.int8.safetensors`).

    Args:
        name: folder or hub id.
        revision: hub revision.
        dtype: type of weights and hidden states.
        device: where to put it.
        attention: "sdpa" or "eager".

    Raises:
        ConfigError: it cannot be found or its layout is not supported.
        CheckpointError: its weights or its tokenizer are missing or damaged.
    """
    if attention not in ATTENTION:
        raise ConfigError(f"attention is '{attention}'; it can be {' or '.join(ATTENTION)}")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        absent = "is neither a folder here nor to be had from the hub"
        problem = "cannot be opened" if Path(name).is_dir() else absent
        raise ConfigError(f"backbone '{name}' {problem}: {reason}") from None
    check_family(config.model_type, name)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    packed = Path(name) / INT8_FILE
    if packed.is_file():
        model = _from_int8(packed, config, options)
    else:
        model = _from_pretrained(name, revision, options)
    with _reading("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    return Backbone(model.to(device), tokenizer, name, revision)


def _from_int8(packed: Path, config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, **options)
    weights = dequantize_int8(load_weights(packed), options["dtype"], str(packed))
    if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    check_weights(model.state_dict(), weights, str(packed))
    model.load_state_dict(weights)
    return model


def _from_pretrained(name: str, revision: str | None, options: dict[str, Any]) -> PreTrainedModel:
    with _reading("weights", name):
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told of below, with both shapes
            **options,
        )
    if info["missing_keys"]:
        raise CheckpointError(
            f"backbone '{name}' lacks {len(info['missing_keys'])} weights, "
            f"'{sorted(info['missing_keys'])[0]}' among them; fetch it again"
        )
    if info["mismatched_keys"]:
        weight, given, needed = min(info["mismatched_keys"])
        raise CheckpointError(
            f"backbone '{name}' does not fit its config.json: {weight} has shape "
            f"{list(given)}, {list(needed)} is needed"
        )
    return model


@contextmanager
def _reading(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"the {what} of backbone '{name}' cannot be read ({reason}); fetch it again"
        ) from None

"""Sizes in a config.json, which determine the memory allocated before any weight is read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from sedem.errors import CheckpointError, ConfigError
from sedem.validation import WholeAbove0, WidthAbove0, explain

MOST_LAYERS = 1000
LARGEST_SIZE = 2**22
"""Limits of a backbone's layers, and of its vocabulary and the width of its MLPs."""

Layers = Annotated[WidthAbove0, Field(le=MOST_LAYERS)]
Inner = Annotated[WholeAbove0, Field(le=LARGEST_SIZE)]


class Sizes(BaseModel):
    """The sizes of any layout; a file may lack some."""

    num_hidden_layers: Layers | None = None
    hidden_size: WidthAbove0 | None = None
    intermediate_size: Inner | None = None
    vocab_size: Inner | None = None
    num_attention_heads: WidthAbove0 | None = None
    num_key_value_heads: WidthAbove0 | None = None
    head_dim: WidthAbove0 | None = None
    max_position_embeddings: WholeAbove0 | None = None


def check_sizes(entries: Any, source: str) -> None:
    """Refuse sizes that no model has.

    Args:
        entries: what config.json holds.
        source: its path, for the message.

    Raises:
        ConfigError: a size is not a whole number above 0, or is too large.
    """
    try:
        Sizes.model_validate(entries)
    except ValidationError as error:
        raise ConfigError(explain(error, f"'{source}'", Sizes)) from None


def check_layers(layers: int, tensors: int, source: str) -> None:
    """Refuse more layers than there are tensors, because building them would take long.

    Args:
        layers: number of layers in config.json.
        tensors: number of tensors in the weight files.
        source: where they are, for the message.

    Raises:
        CheckpointError: there are more layers than tensors.
    """
    if layers > tensors:
        raise CheckpointError(
            f"'{source}' does not fit its config.json: that has {layers:,} layers, the weights are "
            f"{tensors:,} tensors"
        )

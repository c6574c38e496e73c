"""The trained baselines by name; a method's module is imported when its class is requested."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sedem.errors import ConfigError

if TYPE_CHECKING:
    from sedem.baselines.trained import TrainedReader

TRAINED: dict[str, tuple[str, str]] = {
    "full-context-tuned": (
        "full_context_tuned.FullContextTuned",
        "the backbone with LoRA reads every document as text",
    ),
    "rag": ("rag.RAG", "a selector like SeDeM's finds K paragraphs, a tuned reader reads them"),
    "icae": ("icae.ICAE", "compresses segments into memory tokens for the frozen backbone"),
    "hmt": ("hmt.HMT", "reads segment after segment and recalls earlier memory"),
    "500x": (
        "compressor_500x.Compressor500x",
        "compresses 500 tokens into keys and values of four for the frozen backbone",
    ),
    "beacon": (
        "beacon.ActivationBeacon",
        "compresses windows into keys and values of beacon tokens",
    ),
    "comprexit": (
        "comprexit.ComprExIT",
        "fuses the states of all layers and moves them to soft tokens",
    ),
}
"""By name: module and class in this package, and a description for users."""


def reader_class(name: str) -> type[TrainedReader]:
    """Return the class of a trained baseline.

    Raises:
        ConfigError: no trained baseline has that name.
    """
    if name not in TRAINED:
        raise ConfigError(f"there is no trained method '{name}'; there are {', '.join(TRAINED)}")
    module, _, found = TRAINED[name][0].partition(".")
    kind: type[TrainedReader] = getattr(importlib.import_module(f"sedem.baselines.{module}"), found)
    return kind

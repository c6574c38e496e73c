"""The trained baselines by name; a method's module is imported when its class is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sedem.errors import ConfigError

if TYPE_CHECKING:
    from sedem.baselines.trained import TrainedReader

TRAINED: dict[str, tuple[str, str]] = {
    "full-context-tuned": (
        "full_context_tuned.FullContextTuned",
        "the backbone with LoRA, trained on questions, reads every document as text",
    ),
    "rag": ("rag.RAG", "a selector as SeDeM's picks K paragraphs, the adapted backbone reads them"),
    "icae": ("icae.ICAE", "segments of text into memory tokens for the frozen backbone"),
    "hmt": ("hmt.HMT", "segment after segment, with memory that is recalled"),
    "500x": (
        "compressor_500x.Compressor500x",
        "500 tokens into keys and values of four for the frozen backbone",
    ),
    "beacon": ("beacon.ActivationBeacon", "windows of text into keys and values of beacon tokens"),
    "comprexit": ("comprexit.ComprExIT", "states of all layers fused, and moved to soft tokens"),
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

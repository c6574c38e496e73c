"""What the harness asks of a method, and the settings that every method is opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sedem.backbone.decoder import Backbone
from sedem.data.examples import Example
from sedem.errors import ConfigError
from sedem.types import Answer, Reader

CONTROLS = ("selected", "gold", "gold-documents", "wrong", "none")


@dataclass(frozen=True)
class Setting:
    """How a method is evaluated.

    Attributes:
        checkpoint: folder or hub id of the model; its backbone is what raw-text methods read with.
            A trained baseline has checkpoints of its own.
        k: selection budget; None means the model's own, and 2 paragraphs for BM25.
        control: which blocks SeDeM uses: the selector's own, those with evidence first, the
            selector's own of the documents with evidence alone, those without evidence, or none at
            all. Trained baselines read all documents, or with "gold" those with evidence alone,
            which is the same input as "gold-documents" with every block.
        max_new_tokens: answer limit.
        dtype: type of the backbone.
        batch: examples answered together, where a method can.
        shift: tokens by which SeDeM moves every boundary between segments.
        device: where backbones run; None means a GPU if there is one.
        engine: what runs SeDeM; raw-text methods have one way only.
        memory: what SeDeM stores slots as: bfloat16, int8 or fp8.
    """

    checkpoint: str
    k: int | str | None = None
    control: str = "selected"
    max_new_tokens: int = 64
    dtype: str = "float32"
    batch: int = 32
    shift: int = 0
    device: str | None = None
    engine: str = "auto"
    memory: str = "bfloat16"


def refuse(method: str, setting: Setting, *names: str) -> None:
    """Refuse settings that a method has not: a result would record them as used.

    Args:
        method: its name.
        setting: what was asked for.
        names: fields that the method has not.

    Raises:
        ConfigError: one of them was given.
    """
    for name in names:
        value = getattr(setting, name)
        if value != getattr(Setting, name):
            raise ConfigError(f"{name} is {value!r}, but {method} has no {name}; leave it out")


class Method(Protocol):
    """What the harness asks: answers to a batch of examples.

    Attributes:
        batch: examples answered together.
        backbone: what answers; sizes of memory are held against its own. None when not known.
        reader: the same method one question at a time, which is what the bench takes the times of.
    """

    batch: int
    backbone: Backbone | None
    reader: Reader

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents."""
        ...

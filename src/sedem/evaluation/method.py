"""The protocol that the harness evaluates, and checks that its implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.data.examples import Example
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.types import Answer, Reader


def refuse(method: str, settings: MethodSettings, *names: str) -> None:
    """Check that settings that a method ignores have their default values.

    Otherwise a result would record a setting that had no effect.

    Args:
        method: its name.
        settings: what the method is opened with.
        names: the settings that it ignores.

    Raises:
        ConfigError: one of them is not the default.
    """
    for name in names:
        value = getattr(settings, name)
        if value != MethodSettings.model_fields[name].default:
            raise ConfigError(f"{name} is {value!r}, but {method} has no {name}; leave it out")


def decoding_of(settings: MethodSettings) -> Decoding:
    """Greedy decoding up to the answer limit."""
    if settings.max_new_tokens is None:
        return Decoding()
    return Decoding(max_new_tokens=settings.max_new_tokens)


class Method(Protocol):
    """Answers batches of examples.

    Attributes:
        batch: number of examples answered together.
        backbone: the backbone that answers, or None if unknown. Sizes of memory are compared with
            its keys and values.
        reader: the same method for one question at a time, which the bench measures.
    """

    batch: int
    backbone: Backbone | None
    reader: Reader

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents."""
        ...

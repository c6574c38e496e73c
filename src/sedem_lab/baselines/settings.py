"""Settings of the baselines, and the config.json of a checkpoint that stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from sedem.backbone.decoder import LORA_TARGETS
from sedem.checkpoint.folder import EXTRA_ENTRIES, entries_of, versions
from sedem.config import CONFIG_FILE, Settings, Share, WholeAbove0, WidthFrom0
from sedem.errors import CheckpointError, ConfigError
from sedem.method.selector import resolve_budget

PROJECTIONS = (*LORA_TARGETS, "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer that can have adapters."""

METHOD = "method"


def _projection(name: str) -> str:
    if name not in PROJECTIONS:
        known = ", ".join(PROJECTIONS)
        raise PydanticCustomError("projection", "it can be {known}", {"known": known})
    return name


LoraTargets = tuple[Annotated[str, AfterValidator(_projection)], ...]
"""Names of matrices that have adapters, each one of `PROJECTIONS`."""


def _budget(k: Any) -> Any:
    try:
        resolve_budget(k, 1)
    except ConfigError:
        needed = "it must be a whole number of at least 1, or 'all'"
        raise PydanticCustomError("budget", needed) from None
    return k


SelectionBudget = Annotated[int | str, BeforeValidator(_budget)]
"""A selection budget (k): a whole number of at least 1, or "all"."""


class ReaderConfig(Settings):
    """Settings that all trained baselines share; each method adds its own.

    A subclass sets `free` to the names of settings that training may change when it starts from a
    checkpoint, and `adapted` to whether the method has adapters.

    Attributes:
        lora_rank: rank of the adapters; 0 means no adapters.
        lora_alpha: numerator of the adapters' scaling.
        lora_targets: matrices of every layer that have adapters.
        lora_dropout: dropout probability of the adapters' inputs.
    """

    backbone: str
    backbone_revision: str | None = None
    lora_rank: WidthFrom0 = 0
    lora_alpha: WholeAbove0 = 1
    lora_targets: LoraTargets = tuple(LORA_TARGETS)
    lora_dropout: Share = 0.0

    free: ClassVar[frozenset[str]] = frozenset()
    adapted: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.lora_rank and not self.adapted:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, but this method has no adapters; leave it out"
            )
        return self

    def save(self, folder: Path, method: str) -> None:
        """Write config.json, with the name of the method and the versions."""
        entries = {METHOD: method, **self.to_dict(), **versions()}
        (folder / CONFIG_FILE).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read config.json.

        Raises:
            CheckpointError: the file is missing or not readable.
            ConfigError: a setting is unknown or not allowed.
        """
        known = {METHOD, *EXTRA_ENTRIES}
        settings = {name: value for name, value in entries_of(folder).items() if name not in known}
        return cls.from_entries(settings, str(folder / CONFIG_FILE))


def method_of(folder: Path) -> str:
    """Name of the method that a checkpoint belongs to; "sedem" for this project's own.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    entries = entries_of(folder)
    if METHOD not in entries and "extract_layers" not in entries:
        raise CheckpointError(
            f"'{folder / CONFIG_FILE}' names no method; give a folder that 'sedem train' wrote"
        )
    return str(entries.get(METHOD, "sedem"))

"""Settings of a trained baseline, checked, and the config.json that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sedem.backbone.lora import LORA_TARGETS
from sedem.config import CONFIG_FILE, from_mapping
from sedem.errors import CheckpointError, ConfigError

Config = TypeVar("Config", bound="ReaderConfig")

PROJECTIONS = (*LORA_TARGETS, "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer that adapters can stand on."""

METHOD = "method"
EXTRA_ENTRIES = frozenset({METHOD, "sedem_version", "transformers_version"})


@dataclass(frozen=True)
class ReaderConfig:
    """What every trained baseline can be set to; a method adds its own settings.

    A subclass names its whole numbers in `least` and its shares in `shares`, and they are checked;
    in `free` what a run may set otherwise than the checkpoint that it starts from; and in `adapted`
    whether the method has adapters at all.

    Attributes:
        backbone: folder or hub id.
        backbone_revision: hub revision.
        lora_rank: rank of the adapters; 0 means none.
        lora_alpha: numerator of their scaling.
        lora_targets: matrices of every layer that have adapters.
        lora_dropout: share of their inputs that is dropped in training.
    """

    backbone: str
    backbone_revision: str | None = None
    lora_rank: int = 0
    lora_alpha: int = 1
    lora_targets: tuple[str, ...] = tuple(LORA_TARGETS)
    lora_dropout: float = 0.0

    least: ClassVar[Mapping[str, int]] = {}
    shares: ClassVar[tuple[str, ...]] = ()
    free: ClassVar[frozenset[str]] = frozenset()
    adapted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in {"lora_rank": 0, "lora_alpha": 1, **self.least}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number of at least {least}"
                )
        if self.lora_rank and not self.adapted:
            raise ConfigError(
                f"lora_rank is {self.lora_rank}, but this method has no adapters; leave it out"
            )
        for name in ("lora_dropout", *self.shares):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value!r}; it is a share, from 0 to 1")
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        for target in self.lora_targets:
            if target not in PROJECTIONS:
                raise ConfigError(
                    f"lora_targets has '{target}'; it can have {', '.join(PROJECTIONS)}"
                )

    def save(self, folder: Path, method: str) -> None:
        """Write config.json, with the name of the method and the versions."""
        versions = {f"{name}_version": version(name) for name in ("sedem", "transformers")}
        entries = {METHOD: method, **asdict(self), **versions}
        (folder / CONFIG_FILE).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls: type[Config], folder: Path) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: it is missing or cannot be read.
            ConfigError: a setting is not known or not possible.
        """
        entries = _entries(folder)
        settings = {name: value for name, value in entries.items() if name not in EXTRA_ENTRIES}
        return from_mapping(cls, settings, str(folder / CONFIG_FILE))


def method_of(folder: Path) -> str:
    """Whose checkpoint a folder is, "sedem" for one of this project's own method.

    Raises:
        CheckpointError: it is none.
    """
    entries = _entries(folder)
    if METHOD not in entries and "extract_layers" not in entries:
        raise CheckpointError(
            f"'{folder / CONFIG_FILE}' names no method; give a folder that 'sedem train' wrote"
        )
    return str(entries.get(METHOD, "sedem"))


def _entries(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"'{folder}' has no {CONFIG_FILE}; give a folder that 'sedem train' wrote"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' is not readable JSON ({error})") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"'{path}' holds no settings; fetch the checkpoint again")
    return entries

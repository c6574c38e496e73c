"""Backbone names that are valid on every machine, and the folders that ship with sedem."""

from __future__ import annotations

from pathlib import Path

from sedem.config import SedemConfig

BACKBONE = "backbone"
"""The folder of a backbone inside a checkpoint."""


def shipped_folders(kind: str) -> list[Path]:
    """Folders of "checkpoints" or "recipes" that ship with sedem, in its wheel or source tree."""
    package = Path(__file__).parents[1]
    places = (package / kind, package.parents[1] / kind)
    return [place for place in places if place.is_dir()]


def portable_name(name: str) -> str:
    """The name of a backbone as a checkpoint stores it, the same from any working folder.

    Returns:
        The name of a shipped backbone, such as "sedem-nano/backbone", the absolute path of any
        other folder or file, and a hub id as it is.
    """
    if not Path(name).exists():
        return name
    folder = Path(name).resolve()
    for place in shipped_folders("checkpoints"):
        if folder.is_relative_to(place):
            return folder.relative_to(place).as_posix()
    return str(folder)


def portable(config: SedemConfig) -> SedemConfig:
    """A configuration whose backbones have portable names.

    The backbone inside a checkpoint keeps its name, which is relative to that checkpoint.
    """
    if config.encoder == BACKBONE and not config.cross_model:
        return config
    decoder = config.decoder and portable_name(config.decoder)
    return config.with_changes(encoder=portable_name(config.encoder), decoder=decoder)

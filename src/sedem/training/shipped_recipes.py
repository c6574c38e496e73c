"""The recipes that ship with sedem, by names such as "nano/stage1"."""

from __future__ import annotations

from pathlib import Path

from sedem.checkpoint.portable import shipped_folders
from sedem.errors import ConfigError
from sedem.training.recipe import read_entries
from sedem.validation import nearest

LAUNCH = "launch"
"""The folder of files for `accelerate launch`, which set the number of training processes."""


def shipped_recipes() -> dict[str, Path]:
    """The file of each recipe by its name, in alphabetical order."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for folder in shipped_folders("recipes")
        for path in sorted(folder.rglob("*.yaml"))
        # Neither a shared base of recipes nor a file for accelerate is a recipe.
        if not path.name.startswith("_") and path.parent.name != LAUNCH
    }


def launch_file(name: str) -> Path:
    """The file with which `accelerate launch` starts a training run.

    Args:
        name: a name such as "eight-gpus".

    Raises:
        ConfigError: there is no such file.
    """
    known = {
        path.stem: path
        for folder in shipped_folders("recipes")
        for path in sorted((folder / LAUNCH).glob("*.yaml"))
    }
    if name not in known:
        raise ConfigError(f"there is no launch file '{name}'; there are {', '.join(known)}")
    return known[name]


def shipped_recipe(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: a name such as "nano/stage1".

    Raises:
        ConfigError: there is no such recipe.
    """
    known = shipped_recipes()
    if name not in known:
        near = nearest(name, known)
        raise ConfigError(
            f"no recipe '{name}' ships with sedem"
            + (
                f"; did you mean '{near}'?"
                if near
                else "; 'sedem train --list' lists those that do"
            )
        )
    return known[name]


def what_trains(path: Path) -> str:
    """The word after `sedem train` for a recipe: "stage1", "stage2" or a baseline."""
    entries = read_entries(path)
    return str(entries.get("method") or ("stage2" if "data" in entries else "stage1"))

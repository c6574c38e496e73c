"""The recipes that ship with sedem, by names such as "nano/stage1"."""

from __future__ import annotations

from pathlib import Path

from sedem.checkpoint.folder import shipped_folders
from sedem.config import nearest
from sedem.errors import ConfigError
from sedem_lab.training.recipe import BACKBONES, read_entries, variants

DEFAULT_BACKBONE = "llama-3.2-1b"
"""The backbone of recipes that have several, unless another is named."""
LAUNCH = "launch"
"""The folder of files for `accelerate launch`, which set the number of training processes."""


def shipped_recipes() -> dict[str, Path]:
    """The path of each recipe by its name, in alphabetical order; see `shipped_recipe`."""
    names = {
        path.relative_to(_folder()).with_suffix("").as_posix()
        for file in _folder().rglob("*.yaml")
        # Neither a shared base of recipes nor a file for accelerate is a recipe.
        if file.parent.name not in (LAUNCH, BACKBONES)
        for path in (file, *variants(file))
        if not path.name.startswith("_")
    }
    return {name: _path(name) for name in sorted(names)}


def backbones_of(name: str) -> list[str]:
    """The backbones that a recipe can be trained on; empty if it names its own."""
    path = _folder() / f"{name}.yaml"
    kind = "baseline" if "method" in read_entries(path) else "sedem"
    files = path.parent.joinpath(BACKBONES).glob("*.yaml")
    return sorted(file.stem for file in files if kind in read_entries(file))


def _folder() -> Path:
    return shipped_folders("recipes")[0]


def _path(name: str, backbone: str = DEFAULT_BACKBONE) -> Path:
    path = _folder() / f"{name}.yaml"
    if not (path.parent / BACKBONES).is_dir():
        return path
    return path.parent / backbone / path.name


def launch_file(name: str) -> Path:
    """The file with which `accelerate launch` starts a training run, such as "eight-gpus".

    Raises:
        ConfigError: there is no such file.
    """
    known = {path.stem: path for path in sorted((_folder() / LAUNCH).glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"there is no launch file '{name}'; there are {', '.join(known)}")
    return known[name]


def shipped_recipe(name: str) -> Path:
    """The path of a recipe.

    Args:
        name: a name such as "nano/stage1"; "paper/llama-3.2-3b/stage1" also names one of
            `backbones_of` the recipe, in place of the first.

    Raises:
        ConfigError: there is no such recipe, or it has no such backbone.
    """
    known, words = shipped_recipes(), name.split("/")
    common, backbone = f"{words[0]}/{words[-1]}", "".join(words[1:-1])
    if common not in known or len(words) > 3:
        near = nearest(name, known)
        hint = f"did you mean '{near}'?" if near else "'sedem train --list' lists those that do"
        raise ConfigError(f"no recipe '{name}' ships with sedem; {hint}")
    if len(words) == 2:
        return known[common]
    choices = backbones_of(common)
    if not choices:
        raise ConfigError(f"recipe '{common}' names its own backbone; change it with --set")
    if backbone not in choices:
        raise ConfigError(
            f"recipe '{common}' has no backbone '{backbone}'; there are {', '.join(choices)}"
        )
    return _path(common, backbone)

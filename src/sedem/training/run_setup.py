"""What a training run needs before its first step: an output folder, a device, a valid start."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from sedem.errors import ConfigError
from sedem.training.checkpoints import checkpoints
from sedem.training.recipe import Optimization, Recipe, as_yaml, read_entries

RECIPE_FILE = "recipe.yaml"
FINAL = "final"


def start_run(recipe: Recipe) -> Path:
    """Claim the output folder of a run, write the recipe there, and seed random numbers.

    A folder without any checkpoint is free: a run that failed early, say on missing data, does not
    block it.

    Returns:
        The output folder.

    Raises:
        ConfigError: the folder contains a run with other settings.
    """
    output = Path(recipe.run.output)
    written = output / RECIPE_FILE
    has_checkpoint = (output / FINAL).is_dir() or bool(checkpoints(output))
    if has_checkpoint and written.is_file() and read_entries(written) != recipe.to_dict():
        raise ConfigError(
            f"'{output}' holds a run with other settings (compare '{written}'); "
            "set run.output to another folder, or remove this one"
        )
    output.mkdir(parents=True, exist_ok=True)
    written.write_text(as_yaml(recipe), encoding="utf-8")
    set_seed(recipe.optimization.seed)
    return output


def backbone_options(optimization: Optimization) -> dict[str, Any]:
    """The `dtype` and `device` that a run opens its backbones with."""
    return {
        "dtype": getattr(torch, optimization.backbone_dtype),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def check_start(wanted: Any, found: Any, free: AbstractSet[str], checkpoint: str) -> None:
    """Check that a checkpoint has the settings of the recipe that starts from it.

    Args:
        wanted: `model` of the recipe.
        found: configuration of the checkpoint.
        free: settings that may differ.
        checkpoint: its folder, for the message.

    Raises:
        ConfigError: a setting differs and is not in `free`.
    """
    for name, value in vars(wanted).items():
        if name not in free and value != getattr(found, name):
            raise ConfigError(
                f"model.{name} is {value} in the recipe, checkpoint '{checkpoint}' has "
                f"{getattr(found, name)}"
            )

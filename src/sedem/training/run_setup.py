"""What a training run needs before its first step: an output folder, a device, a valid start."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import set_seed

from sedem.durable_files import write_text
from sedem.errors import ConfigError
from sedem.training.checkpoints import checkpoints
from sedem.training.recipe import Optimization, Recipe, as_yaml, read_entries

RECIPE_FILE = "recipe.yaml"
FINAL = "final"
FREE = (
    "run.output",
    "run.log_every",
    "run.save_every",
    "run.keep",
    "run.workers",
    "cache",
    "optimization.shard_backbone",
)
"""Settings that a resumed run may change, because no weight depends on them."""


def processes() -> PartialState:
    """The processes that train together, as started by a launcher such as torchrun.

    The first call connects them. Without a launcher there is a single process.
    """
    return PartialState(cpu=not torch.cuda.is_available())


def start_run(recipe: Recipe) -> Path:
    """Claim the output folder of a run, write the recipe there, and seed random numbers.

    A folder without any checkpoint is free: a run that failed early, such as on missing data, does
    not block it. A resumed run may change the settings of `FREE`.

    Returns:
        The output folder.

    Raises:
        ConfigError: the folder contains a run with other settings, or the batches of a step cannot
            be divided among the processes.
    """
    own = processes()
    share_of_batches(recipe.optimization, own.num_processes)
    output = Path(recipe.run.output)
    written = output / RECIPE_FILE
    has_checkpoint = (output / FINAL).is_dir() or bool(checkpoints(output))
    if has_checkpoint and written.is_file() and (changed := _changed(recipe, written)):
        raise ConfigError(
            f"'{output}' holds a run with other settings ({changed}; compare '{written}'); "
            "set run.output to another folder, or remove this one"
        )
    if own.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        write_text(written, as_yaml(recipe))
    own.wait_for_everyone()
    set_seed(recipe.optimization.seed)
    return output


def share_of_batches(optimization: Optimization, count: int) -> int:
    """Return the batches of a step that each process runs.

    A step has `accumulation` batches, whatever the number of processes. So a recipe means the same
    training on one GPU and on several, and a run can resume on another number of them.

    Args:
        optimization: gives the batches of a step.

    Raises:
        ConfigError: the batches cannot be divided equally.
    """
    if optimization.accumulation % count:
        raise ConfigError(
            f"optimization.accumulation is {optimization.accumulation}, but {count} processes "
            f"share the batches of a step: make it a multiple of {count} and "
            "optimization.batch_size as much smaller, or start another number of processes"
        )
    return optimization.accumulation // count


def shards_backbone(optimization: Optimization) -> bool:
    """Whether the processes of a run divide the frozen layers; a single one keeps them whole."""
    return optimization.shard_backbone and processes().num_processes > 1


def backbone_options(optimization: Optimization) -> dict[str, Any]:
    """The `dtype` and `device` with which a process opens its backbones.

    Backbones that `shard` divides are opened on the CPU, because a whole one may not fit on a GPU.
    """
    return {
        "dtype": getattr(torch, optimization.backbone_dtype),
        "device": "cpu" if shards_backbone(optimization) else processes().device,
    }


def check_start(wanted: Any, found: Any, free: AbstractSet[str], checkpoint: str) -> None:
    """Check that a checkpoint has the settings of the recipe that starts from it.

    Args:
        wanted: `model` of the recipe.
        checkpoint: folder of the checkpoint, for the message.

    Raises:
        ConfigError: a setting differs and is not in `free`.
    """
    for name, value in vars(wanted).items():
        if name not in free and value != getattr(found, name):
            raise ConfigError(
                f"model.{name} is {value} in the recipe, checkpoint '{checkpoint}' has "
                f"{getattr(found, name)}"
            )


def _changed(recipe: Recipe, written: Path) -> str:
    """Differences from the recipe that a folder was trained with; empty if there are none.

    A setting that the written recipe lacks, because a newer version added it, had its default.
    """
    old, new = _flat(read_entries(written)), _flat(recipe.to_dict())
    had_defaults = new.keys() - old.keys() - _flat(recipe.without_defaults()).keys()
    names = [name for name in {**old, **new} if name not in {*FREE, *had_defaults}]
    return ", ".join(
        f"{name} was {old.get(name)}, is {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    )


def _flat(entries: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their dotted names; a list is one value."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        inner = _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else None
        flat |= {f"{before}{name}": value} if inner is None else inner
    return flat

"""What a training run needs before its first step: an output folder, a device, a valid start."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import set_seed

from sedem.durable_files import write_text
from sedem.errors import ConfigError
from sedem.model import SeDeM
from sedem_lab.training.checkpoints import checkpoints
from sedem_lab.training.recipe import Optimization, Recipe, as_yaml, read_entries

RECIPE_FILE = "recipe.yaml"
FINAL = "final"
FREE = (
    "run.output",
    "run.log_every",
    "run.save_every",
    "run.keep",
    "run.workers",
    "run.trackers",
    "run.push_to",
    "cache",
    "optimization.shard_backbone",
    "optimization.checkpointing",
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
    if ((output / FINAL).is_dir() or checkpoints(output)) and written.is_file():
        old, new = flat(read_entries(written)), flat(recipe.to_dict())
        # A setting that the written recipe lacks, as a newer version added it, had its default.
        had_defaults = new.keys() - old.keys() - flat(recipe.without_defaults()).keys()
        changed = ", ".join(
            f"{name} was {old.get(name)}, is {new.get(name)}"
            for name in {**old, **new}
            if name not in {*FREE, *had_defaults} and old.get(name) != new.get(name)
        )
        if changed:
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


# Frozen layers in parts: each process keeps a share of every layer (FSDP2). A layer is gathered
# when it runs and dropped afterwards. Trained parts, embeddings and the head stay whole in every
# process, so checkpoints are the same as in any other run. All processes must run the same layers
# in the same order, because they gather each layer together.


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


def shard(model: SeDeM, optimization: Optimization) -> None:
    """Divide the layers of a model's backbones among the processes, if the recipe says so.

    Args:
        model: opened with `backbone_options`, with adapters attached; it is moved to this process's
            device.
    """
    if not shards_backbone(optimization):
        return
    own = processes()
    mesh = init_device_mesh(own.device.type, (own.num_processes,))
    for backbone in {model.encoder, model.decoder}:
        for layer in backbone.model.get_decoder().layers:
            # Only one layer at a time is whole on the device.
            adapters = {p for name, p in layer.named_parameters() if "lora_" in name}
            # By default, gathered weights would be dropped only after the backward pass.
            fully_shard(layer, mesh=mesh, ignored_params=adapters, reshard_after_forward=True)
    model.to(own.device)


def divided(module: nn.Module) -> list[str]:
    """Names of the weights that are divided among the processes."""
    return [name for name, p in module.named_parameters() if isinstance(p, DTensor)]


def averaging(module: nn.Module) -> nn.Module:
    """Wrap a sharded module so that the gradients of whole weights are averaged over processes."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, divided(module))
    return cast(nn.Module, DistributedDataParallel(module, find_unused_parameters=True))


def check_start(wanted: Any, found: Any, free: AbstractSet[str], checkpoint: str) -> None:
    """Check that a checkpoint has the settings of the recipe that starts from it.

    Raises:
        ConfigError: a setting differs and is not in `free`.
    """
    for name, value in vars(wanted).items():
        if name not in free and value != getattr(found, name):
            raise ConfigError(
                f"model.{name} is {value} in the recipe, checkpoint '{checkpoint}' has "
                f"{getattr(found, name)}"
            )


def flat(entries: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their dotted names; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        inner = flat(value, f"{before}{name}.") if isinstance(value, Mapping) else None
        found |= {f"{before}{name}": value} if inner is None else inner
    return found

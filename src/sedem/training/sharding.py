"""Frozen layers in parts: each process keeps a share of every layer (FSDP2).

A layer is gathered when it runs and dropped afterwards. Trained parts, embeddings and the head
stay whole in every process, so checkpoints are the same as in any other run. All processes must
run the same layers in the same order, because they gather each layer together.
"""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sedem.model import SeDeM
from sedem.training.recipe import Optimization
from sedem.training.run_setup import processes, shards_backbone


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


def is_sharded(module: nn.Module) -> bool:
    """Whether some weights of a module are divided among the processes."""
    return bool(_divided(module))


def averaging(module: nn.Module) -> nn.Module:
    """Wrap a sharded module so that the gradients of whole weights are averaged over processes."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, _divided(module))
    return cast(nn.Module, DistributedDataParallel(module, find_unused_parameters=True))


def _divided(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if isinstance(p, DTensor)]

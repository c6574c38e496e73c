"""Memory and FLOPs of a training step, and whether its layers must be checkpointed to fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset

from sedem.backbone.decoder import Backbone
from sedem.backbone.meta import counting
from sedem.durable_files import bytes_text
from sedem_lab.training.example_dataset import lengths_of
from sedem_lab.training.recipe import Optimization
from sedem_lab.training.run_setup import processes, shards_backbone

logger = logging.getLogger(__name__)

ROOM = 0.92
"""Share of a GPU's memory that tensors can take; fragments and CUDA itself take the rest."""


@dataclass(frozen=True)
class Step:
    """What one batch of a training step takes.

    Attributes:
        flops: FLOPs of its forward and backward pass.
        peak_bytes: most bytes at once: weights, gradients, AdamW's two averages, activations.
    """

    flops: int
    peak_bytes: int

    def fits(self, memory: int) -> bool:
        """Whether a GPU with so many bytes is large enough."""
        return self.peak_bytes <= ROOM * memory


def measure_step(stage: nn.Module, batch: Mapping[str, Any], *, mixed: bool) -> Step:
    """Run a batch through a stage without its numbers, and count.

    Args:
        stage: a `Trainable`; it may be on any device and is not changed.
        batch: the arguments of its `forward`, on the CPU.
        mixed: whether it trains in mixed precision (`Optimization.bf16`).
    """
    named = [*stage.named_parameters(), *stage.named_buffers()]
    weights = {name: _without_numbers(tensor) for name, tensor in named}
    trained = [tensor for tensor in weights.values() if tensor.requires_grad]
    for tensor in trained:
        tensor.grad = torch.empty_like(tensor)  # as in every step but the first
    kept = [*weights.values(), *(cast(Tensor, tensor.grad) for tensor in trained)]
    with counting(kept, mixed=mixed) as counter:
        functional_call(_Step(stage), {f"stage.{n}": t for n, t in weights.items()}, (batch,))
    held = sum(t.nbytes for t in kept) + 2 * sum(t.nbytes for t in trained)
    return Step(counter.flops, held + counter.peak_bytes)


def _without_numbers(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if tensor.is_floating_point() else empty


class _Step(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, batch: Mapping[str, Any]) -> None:
        self.stage(**batch)["loss"].backward()


def set_checkpointing(stage: nn.Module, optimization: Optimization, data: Dataset[Any]) -> None:
    """Turn gradient checkpointing on or off, as a recipe says, in every backbone of a stage.

    "auto" turns it on where the longest batch of `data` would not fit the GPU without it. Backbones
    that are divided among GPUs are large, and always have it.
    """
    chosen, device = optimization.checkpointing, processes().device
    if chosen == "auto":
        chosen = device.type == "cuda" and (
            shards_backbone(optimization) or not _fits(stage, optimization, data, device)
        )
    checkpoint_layers(stage, chosen)


def checkpoint_layers(stage: nn.Module, on: bool) -> None:
    """Turn gradient checkpointing on or off in every backbone of a stage."""
    for module in stage.modules():
        if isinstance(module, Backbone):
            module.checkpointing = on


def _fits(stage: nn.Module, optimization: Optimization, data: Any, device: torch.device) -> bool:
    order, rows = np.arange(len(data)), optimization.batch_size  # windows are of one length
    if (lengths := lengths_of(data)) is not None:
        order = np.argsort(-lengths, kind="stable")
        rows = optimization.rows(int(lengths[order[0]]))
    batch = cast(Any, stage).collate([data[n] for n in order[:rows].tolist()])
    step = measure_step(stage, batch, mixed=optimization.bf16)
    memory = torch.cuda.get_device_properties(device).total_memory
    logger.info(
        "the longest batch takes %s of the GPU's %s; gradient checkpointing is %s",
        *map(bytes_text, (step.peak_bytes, memory)),
        "off" if step.fits(memory) else "on",
    )
    return step.fits(memory)

"""Memory and FLOPs of a training step, and whether its layers must be checkpointed to fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset

from sedem.backbone.decoder import Backbone
from sedem.durable_files import bytes_text
from sedem_lab.evaluation.meta import counting
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
    weights = {}
    for name, tensor in named:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        floats = tensor.is_floating_point()
        weights[name] = nn.Parameter(empty, tensor.requires_grad) if floats else empty
    trained = [tensor for tensor in weights.values() if tensor.requires_grad]
    for tensor in trained:
        tensor.grad = torch.empty_like(tensor)  # as in every step but the first
    kept = [*weights.values(), *(cast(Tensor, tensor.grad) for tensor in trained)]
    with counting(kept, mixed=mixed) as counter:
        functional_call(_Step(stage), {f"stage.{n}": t for n, t in weights.items()}, (batch,))
    held = sum(t.nbytes for t in kept) + 2 * sum(t.nbytes for t in trained)
    return Step(counter.flops, held + counter.peak_bytes)


class _Step(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, batch: Mapping[str, Any]) -> None:
        self.stage(**batch)["loss"].backward()


def set_checkpointing(stage: Any, optimization: Optimization, data: Dataset[Any]) -> None:
    """Turn gradient checkpointing on or off, as a recipe says, in every backbone of a stage.

    "auto" turns it on where the longest batch of `data` would not fit the GPU without it. Backbones
    that are divided among GPUs are large, and always have it.
    """
    chosen, device = optimization.checkpointing, processes().device
    if chosen == "auto":
        chosen = device.type == "cuda" and shards_backbone(optimization)
        if device.type == "cuda" and not chosen:
            order, rows = np.arange(len(cast(Sized, data))), optimization.batch_size
            if (lengths := lengths_of(data)) is not None:  # windows are of one length
                order = np.argsort(-lengths, kind="stable")
                rows = optimization.rows(int(lengths[order[0]]))
            batch = stage.collate([data[n] for n in order[:rows].tolist()])
            step = measure_step(stage, batch, mixed=optimization.bf16)
            memory = torch.cuda.get_device_properties(device).total_memory
            chosen = not step.fits(memory)
            logger.info(
                "the longest batch takes %s of the GPU's %s; gradient checkpointing is %s",
                *map(bytes_text, (step.peak_bytes, memory)),
                "on" if chosen else "off",
            )
    checkpoint_layers(stage, chosen)


def checkpoint_layers(stage: nn.Module, on: bool) -> None:
    """Turn gradient checkpointing on or off in every backbone of a stage."""
    for module in stage.modules():
        if isinstance(module, Backbone):
            module.checkpointing = on

"""The cost of a trained baseline: parameters, counted on the meta device, and FLOPs."""

from __future__ import annotations

from typing import Any

import torch

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.evaluation.baseline_flops import baseline_flops
from sedem.evaluation.cost import backbone_shape, backbone_size


def baseline_cost(method: str, backbone: str) -> dict[str, Any]:
    """Parameters and FLOPs of a trained baseline with default settings, which are the paper's.

    Args:
        method: a method with a FLOPs formula.
        backbone: a preset with one backbone, a folder or a hub id.

    Returns:
        `backbone`, `method`, `parameters` and `flops`.

    Raises:
        ConfigError: the method has no FLOPs formula, or the backbone is unknown.
    """
    flops = baseline_flops(method, backbone)
    return {
        "backbone": backbone,
        "method": method,
        "parameters": baseline_parameters(method, backbone),
        "flops": flops,
    }


def baseline_parameters(
    method: str, backbone: str, config: ReaderConfig | None = None
) -> dict[str, Any]:
    """The parameters that a method trains, and those that the paper's table of overheads counts.

    Args:
        method: a trained baseline.
        backbone: a preset with one backbone, a folder or a hub id.
        config: its settings; None means the defaults, which are the paper's.

    Returns:
        Trained parameters in `parts` and in `lora`, and their `total`; `without_lora`, which each
        method counts as the paper's table does, and `percent_without_lora` of the `backbone`.

    Raises:
        ConfigError: the method or the backbone is unknown.
    """
    kind, shape = reader_class(method), backbone_shape(backbone)
    config = config or kind.Config(backbone=backbone)
    with torch.device("meta"):
        parts = sum(p.numel() for p in kind.build_parts(config, shape).parameters())
    size, lora = backbone_size(shape, config.lora_rank, config.lora_targets)
    overhead = kind.overhead(config, shape)
    return {
        "parts": parts,
        "lora": lora,
        "total": parts + lora,
        "without_lora": overhead,
        "percent_without_lora": 100 * overhead / size,
        "backbone": size,
    }

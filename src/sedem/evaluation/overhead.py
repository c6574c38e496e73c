"""What a trained baseline costs: parameters counted on the meta device, and FLOPs."""

from __future__ import annotations

from typing import Any

import torch

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.evaluation.baseline_flops import baseline_flops
from sedem.evaluation.cost import backbone_shape, backbone_size


def baseline_cost(method: str, backbone: str) -> dict[str, Any]:
    """Parameters and FLOPs of a trained baseline at its defaults, which are the paper's settings.

    Args:
        method: one whose FLOPs are counted.
        backbone: a preset of one backbone, a folder or a hub id.

    Returns:
        `backbone`, `method`, `parameters` and `flops`.

    Raises:
        ConfigError: the method's FLOPs are not counted, or there is no such backbone.
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
    """What a method trains, and what the paper's table of overheads counts of it.

    Args:
        method: a trained baseline.
        backbone: a preset of one backbone, a folder or a hub id.
        config: its settings; None means their defaults, which are the paper's.

    Returns:
        `parts` and `lora` that are trained, their `total`, `without_lora` as the paper's table
        counts it, which is the method's own to say, `percent_without_lora` of the `backbone`.

    Raises:
        ConfigError: there is no such method or backbone.
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

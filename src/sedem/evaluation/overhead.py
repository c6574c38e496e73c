"""Parameters that a trained baseline adds to a backbone, counted on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from sedem.baselines.catalog import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.evaluation.cost import backbone_size, shape_file


def baseline_parameters(
    method: str, backbone: str, config: ReaderConfig | None = None
) -> dict[str, Any]:
    """What a method trains, and what the paper's table of overheads counts of it.

    Args:
        method: a trained baseline.
        backbone: "llama-3.2-1b" or "llama-3.2-3b".
        config: its settings; None means their defaults, which are the paper's.

    Returns:
        `parts` and `lora` that are trained, their `total`, `without_lora` as the paper's table
        counts it, which is the method's own to say, `percent_without_lora` of the `backbone`.

    Raises:
        ConfigError: there is no such method.
    """
    kind, shape = reader_class(method), shape_file(backbone)
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

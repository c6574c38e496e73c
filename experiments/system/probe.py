"""A probe of the nano backbone at the two ends of the depth study's grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.system.scales import Scale, tiny_backbone
from sedem.provenance import provenance

STEPS = (20,)
"""Budgets in steps; each has a probe of its own."""
SHORT = {"batch_size": 8, "held_out": 64}
SMOKE = {"batch_size": 2, "held_out": 2, "segment_length": 32, "continuation": 16}


def steps_of(scale: Scale) -> tuple[int, ...]:
    """The budgets that are tried at a scale."""
    return (2,) if scale.name == "smoke" else STEPS


def ends_of_grid(scale: Scale) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers with the lowest and the highest continuation loss of the depth study at nano."""
    return (scale.layer(10), scale.layer(10)), (scale.layer(14), scale.layer(16))


def measure_probe(scale: Scale, data: Path) -> dict[str, Any]:
    """Probe both pairs with every budget, on the training text of the study's models.

    Args:
        scale: gives backbone and text.
        data: folder of the data files.

    Returns:
        By budget and pair, as "20 steps" and "4-4": the losses after it.
    """
    from sedem.data.corpus import read_texts
    from sedem.training.probe import ProbeSettings, probe
    from sedem.training.recipe import load_recipe
    from sedem.training.stages import Stage1Recipe

    if scale.name == "smoke":
        tiny_backbone()
    path = scale.recipe("stage1", scale.backbones[0], scale.ablation[0])
    recipe = load_recipe(Stage1Recipe, path, [*scale.overrides, *scale.stage1])
    found: dict[str, Any] = {}
    for steps in steps_of(scale):
        settings = ProbeSettings(
            layers=ends_of_grid(scale),
            compressions=(recipe.model.compression,),
            steps=steps,
            **(SMOKE if scale.name == "smoke" else SHORT),
        )
        result = probe(
            recipe.model.encoder,
            read_texts(data / recipe.text.path, recipe.text.exclude_titles),
            settings,
            scale.runs / "probe" / str(steps),
            lambda done, total: None,
        )
        rows = {f"{row['extract_layers'][0]}-{row['inject_layer']}": row for row in result["runs"]}
        found[f"{steps} steps"] = {"settings": result["settings"], "ends": result["ends"], **rows}
    return {**found, **provenance()}

"""How models learn: the cost of a training stage, learning rates of baselines, and a probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.system.cells import Cell
from experiments.system.models import run_of_stage
from experiments.system.scales import Scale, recipe_exists, tiny_backbone
from sedem.data.corpus import read_texts
from sedem.provenance import provenance
from sedem.training import baseline
from sedem.training.baseline import load_baseline_recipe
from sedem.training.recipe import load_recipe
from sedem.training.stages import Stage1Recipe

ALWAYS = 3
"""Number of lowest rates that are always tried."""
PROBED = {"batch_size": 8, "held_out": 64}
PROBED_AT_SMOKE = {"batch_size": 2, "held_out": 2, "segment_length": 32, "continuation": 16}


def training(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The cost of a training stage."""
    assert cell.variant is not None
    folder = run_of_stage(cell.variant, scale, cell.stage, data)
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return {"optimization": summary.pop("recipe")["optimization"], **summary}


def search(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Held-out losses of a baseline's first stage after a few steps, at several learning rates.

    The lowest rates are always tried. The next higher one is tried while the highest so far is the
    best. Every part has the same rate. The method's own loss on held-out training data is compared,
    so rates of different methods cannot be compared.
    """
    if scale.name == "smoke":
        tiny_backbone()
    assert cell.variant is not None
    backbone, stage = cell.variant.backbone or scale.backbones[0], "text"
    path = scale.baseline_recipe(cell.method, stage, backbone)
    if not recipe_exists(path):  # not every method has a recipe on text
        stage = "questions"
        path = scale.baseline_recipe(cell.method, stage, backbone)
    losses: dict[str, dict[str, float]] = {}
    for rate in scale.rates:
        if len(losses) >= ALWAYS and best_rate({"rates": losses}) != float([*losses][-1]):
            break
        overrides = [*scale.baselines[stage], *scale.search[stage], f"data_root={data}"]
        parts = load_baseline_recipe(cell.method, path, overrides).optimization.learning_rates
        rates = ", ".join(f"{part}: {rate:.1e}" for part in parts)
        output = scale.runs / "search" / f"{cell.method}-{rate_name(rate)}"
        overrides += [f"optimization.learning_rates={{{rates}}}", f"run.output={output}"]
        if not (output / "training.json").is_file():
            baseline.train_baseline(load_baseline_recipe(cell.method, path, overrides))
        summary = json.loads((output / "training.json").read_text(encoding="utf-8"))
        losses[rate_name(rate)] = {
            "loss": summary["evaluation"]["eval_loss"],
            "seconds": summary["seconds"],
        }
    return {
        "stage": stage,
        "steps": summary["steps"],
        "examples_seen": summary["examples_seen"],
        "seed": summary["recipe"]["optimization"]["seed"],
        "rates": losses,
        **provenance(),
    }


def rate_name(rate: float) -> str:
    """A rate's name in a result."""
    return f"{rate:.0e}"


def best_rate(result: dict[str, Any]) -> float:
    """The rate with the lowest loss."""
    rates = result["rates"]
    return float(min(rates, key=lambda name: rates[name]["loss"]))


def steps_of(scale: Scale) -> tuple[int, ...]:
    """The budgets of `probe`, in steps; each has a probe of its own."""
    return (2,) if scale.name == "smoke" else (20,)


def ends_of_grid(scale: Scale) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers with the lowest and the highest continuation loss of the depth study at nano."""
    return (scale.layer(10), scale.layer(10)), (scale.layer(14), scale.layer(16))


def probe(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Losses after `sedem probe` of both ends of the depth grid, by budget and pair of layers.

    A budget is named "20 steps", a pair "4-4". The text is that of the study's models.
    """
    from sedem.training.probe import ProbeSettings
    from sedem.training.probe import probe as run_probe

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
            **(PROBED_AT_SMOKE if scale.name == "smoke" else PROBED),
        )
        result = run_probe(
            recipe.model.encoder,
            read_texts(data / recipe.text.path, recipe.text.exclude_titles),
            settings,
            scale.runs / "probe" / str(steps),
            lambda done, total: None,
        )
        rows = {f"{row['extract_layers'][0]}-{row['inject_layer']}": row for row in result["runs"]}
        found[f"{steps} steps"] = {"settings": result["settings"], "ends": result["ends"], **rows}
    return {**found, **provenance()}

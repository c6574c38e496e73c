"""The search for a trained baseline's learning rate: short runs on training data only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.system.scales import Scale, tiny_backbone
from sedem.provenance import provenance

ALWAYS = 3
"""Number of lowest rates that are always tried."""


def key(rate: float) -> str:
    """A rate's name in a result."""
    return f"{rate:.0e}"


def first_stage(method: str, scale: Scale, backbone: str) -> str:
    """The first stage of a method: "text", or "questions" if it has no recipe for text."""
    text = scale.baseline_recipe(method, "text", backbone)
    return "text" if text.is_file() else "questions"


def search(method: str, scale: Scale, backbone: str, data: Path) -> dict[str, Any]:
    """Train a method's first stage for a few steps at several rates.

    The lowest rates are always tried. The next higher one is tried while the highest so far is the
    best. Every part has the same rate. The method's own loss on held-out training data is compared,
    so rates of different methods cannot be compared.

    Args:
        method: a trained baseline.
        scale: gives recipes, rates and steps.
        backbone: a backbone of the scale.
        data: folder that the recipes' data paths are relative to.
    """
    from sedem.training.baseline import load_baseline_recipe, train_baseline

    if scale.name == "smoke":
        tiny_backbone()
    stage = first_stage(method, scale, backbone)
    path = scale.baseline_recipe(method, stage, backbone)
    losses: dict[str, dict[str, float]] = {}
    for rate in scale.rates:
        if len(losses) >= ALWAYS and best({"rates": losses}) != float([*losses][-1]):
            break
        overrides = [*scale.baselines[stage], *scale.search[stage], f"data_root={data}"]
        parts = load_baseline_recipe(method, path, overrides).optimization.learning_rates
        rates = ", ".join(f"{part}: {rate:.1e}" for part in parts)
        output = scale.runs / "search" / f"{method}-{key(rate)}"
        overrides += [f"optimization.learning_rates={{{rates}}}", f"run.output={output}"]
        if not (output / "training.json").is_file():
            train_baseline(load_baseline_recipe(method, path, overrides))
        summary = json.loads((output / "training.json").read_text(encoding="utf-8"))
        losses[key(rate)] = {
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


def best(result: dict[str, Any]) -> float:
    """The rate with the lowest loss."""
    rates = result["rates"]
    return float(min(rates, key=lambda name: rates[name]["loss"]))

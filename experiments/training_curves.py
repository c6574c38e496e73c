"""How the trained baselines learned. The paper has no such figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.system.cells import Cell
from experiments.system.peers import answer_cell
from experiments.system.scales import Scale, recipe_exists
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model
from sedem.baselines.registry import TRAINED
from sedem.pictures import pyplot_module, save

SET = "2wiki"
STAGES = {"text": ("training.before", "windows"), "questions": ("training", "questions")}
"""Training stages, with their key in a result and the unit of their examples."""


def numbers(scale: Scale) -> list[Number]:
    """Examples and minutes of each stage, by method."""
    result = []
    for method, cell in _cells(scale).items():
        for stage, (place, unit) in STAGES.items():
            if stage == "text" and not _has_text(scale, method):
                continue
            seen, seconds = f"{place}.examples_seen", f"{place}.seconds"
            result.append(Number(method, f"{unit} seen", None, cell, seen, digits=0))
            result.append(Number(method, f"minutes on {stage}", None, cell, seconds, 60))
    return result


def losses(scale: Scale) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Examples seen and loss, by stage and method; what was not measured is left out."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {stage: {} for stage in STAGES}
    for method, cell in _cells(scale).items():
        training = (cell.read(scale) or {}).get("training")
        if not training:
            continue
        curves["questions"][method] = _losses(training)
        if training.get("before"):
            curves["text"][method] = _losses(training["before"])
    return curves


def draw(scale: Scale, path: Path) -> None:
    """Draw one panel per stage and one line per method."""
    pyplot = pyplot_module()
    curves = losses(scale)
    figure, axes = pyplot.subplots(1, len(STAGES), figsize=(9, 3.6))
    colours = dict(zip(TRAINED, pyplot.get_cmap("tab10").colors, strict=False))
    for axis, (stage, (_, unit)) in zip(axes, STAGES.items(), strict=True):
        for method, points in curves[stage].items():
            axis.plot(*zip(*points, strict=True), color=colours[method], label=method)
        axis.set_xlabel(f"{unit} seen")
        axis.set_ylabel("training loss")
        axis.set_title(f"on {stage}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    # Every method is trained on questions, so the last panel labels them all.
    shown = axes[-1].get_legend_handles_labels()
    figure.legend(*shown, loc="lower center", ncols=len(TRAINED), fontsize=8, frameon=False)
    save(figure, path)


def _cells(scale: Scale) -> dict[str, Cell]:
    found = {method: answer_cell(scale, main_model(scale), SET, method) for method in TRAINED}
    return {method: cell for method, cell in found.items() if cell is not None}


def _has_text(scale: Scale, method: str) -> bool:
    return recipe_exists(scale.baseline_recipe(method, "text", scale.backbones[0]))


def _losses(training: dict[str, Any]) -> list[tuple[int, float]]:
    """Each loss is the mean since the previous one."""
    each = training["examples_seen"] / training["steps"]
    log = (entry for entry in training["log"] if "loss" in entry)
    return [(round(each * entry["step"]), entry["loss"]) for entry in log]


STUDY = Study(
    "training_curves",
    "How the trained baselines learned",
    numbers,
    "The paper gives no numbers. The methods train on different losses, which do not compare. "
    "Only those on questions are alike: the loss of the same answers. RAG adds its selector's.",
    draw=draw,
)

if __name__ == "__main__":
    command(STUDY)()

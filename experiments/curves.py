"""How the trained baselines learned: losses by examples seen, from the results' own logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import peers
from experiments.scales import Scale
from experiments.variants import main
from sedem.baselines.registry import TRAINED

STAGES = ("text", "questions")


def logged(scale: Scale) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Examples seen and loss, by stage, by method; what is not measured is left out."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {stage: {} for stage in STAGES}
    for method in TRAINED:
        cell = peers.own(scale, main(scale.backbones[0]), "2wiki", method)
        result = cell.read(scale) if cell else None
        training = (result or {}).get("training")
        if not training:
            continue
        curves["questions"][method] = _losses(training)
        if training.get("before"):
            curves["text"][method] = _losses(training["before"])
    return curves


def draw(scale: Scale, path: Path) -> None:
    """One panel a stage, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sedem"
    from matplotlib import pyplot

    curves = logged(scale)
    figure, axes = pyplot.subplots(1, len(STAGES), figsize=(9, 3.6))
    colours = dict(zip(TRAINED, pyplot.get_cmap("tab10").colors, strict=False))
    for axis, stage, unit in zip(axes, STAGES, ("windows", "questions"), strict=True):
        for method, points in curves[stage].items():
            axis.plot(*zip(*points, strict=True), color=colours[method], label=method)
        axis.set_xlabel(f"{unit} seen")
        axis.set_ylabel("training loss")
        axis.set_title(f"on {stage}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    # Every method learns from questions, so the last panel has them all.
    shown = axes[-1].get_legend_handles_labels()
    figure.legend(*shown, loc="lower center", ncols=len(TRAINED), fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _losses(training: dict[str, Any]) -> list[tuple[int, float]]:
    """Each is the mean since the one before."""
    batch = training["examples_seen"] // training["steps"]
    return [(batch * entry["step"], entry["loss"]) for entry in training["log"] if "loss" in entry]

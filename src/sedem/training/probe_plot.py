"""The plot of a probe: loss by injection and extraction layer, and by bytes per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sedem.pictures import pyplot_module, save

COLORS = ("#1b6ca8", "#b7791f", "#2f855a", "#9b2c2c", "#6b46c1", "#4a5568")
GREY = "#718096"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a probe.

    The left panel compares layers at the largest compression, the right one the compressions at the
    recommended layers. Lower is better. Dotted lines are the two ends: with nothing, and with the
    text itself. The dashed line is the loss with the decoder's own states, without any memory.

    Args:
        result: what `probe` found.
        path: the file; its suffix sets the format.
    """
    pyplot = pyplot_module()
    figure, (depths, sizes) = pyplot.subplots(
        1, 2, figsize=(10, 4.4), sharey=True, layout="constrained"
    )
    _depths(depths, result)
    _sizes(sizes, result)
    for axis in (depths, sizes):
        _ends(axis, result["ends"])
        axis.grid(alpha=0.3)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    depths.set_ylabel("held-out loss, nats a token")
    handles, labels = depths.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    backbone, steps = result["backbone"], result["settings"]["steps"]
    name = Path(backbone["name"]).name
    figure.suptitle(f"{name}, {backbone['layers']} layers, {steps} steps a run", fontsize=10)
    save(figure, path)


def _depths(axis: Any, result: dict[str, Any]) -> None:
    largest = max(row["compression"] for row in result["runs"])
    rows = [row for row in result["runs"] if row["compression"] == largest]
    rows.sort(key=lambda row: row["inject_layer"])
    for number, extract in enumerate(sorted({row["extract_layers"][0] for row in rows})):
        own = [row for row in rows if row["extract_layers"][0] == extract]
        color = COLORS[number % len(COLORS)]
        axis.plot(
            *_points(own, "memory"), "o-", color=color, label=f"extracted after layer {extract}"
        )
    axis.plot(*_points(rows, "true_states"), "--", color=GREY, label="own states, not a memory")
    axis.set_xticks(sorted({row["inject_layer"] for row in rows}))
    axis.set(title=f"layers, at C={largest}", xlabel="injected after layer")


def _points(rows: list[dict[str, Any]], condition: str) -> tuple[list[int], list[float]]:
    return (
        [row["inject_layer"] for row in rows],
        [row["continuation"][condition]["mean"] for row in rows],
    )


def _sizes(axis: Any, result: dict[str, Any]) -> None:
    chosen = result["recommended"]
    layers = chosen["extract_layers"], chosen["inject_layer"]
    rows = [r for r in result["runs"] if (r["extract_layers"], r["inject_layer"]) == layers]
    rows.sort(key=lambda row: row["bytes_per_token"])
    sizes = [row["bytes_per_token"] for row in rows]
    losses = [row["continuation"]["memory"]["mean"] for row in rows]
    axis.plot(sizes, losses, "o-", color=COLORS[0])
    for row, size, loss in zip(rows, sizes, losses, strict=True):
        text = f"C={row['compression']}" + "\nrecommended" * (row == chosen)
        axis.annotate(text, (size, loss), xytext=(0, 6), textcoords="offset points", ha="center")
    # The axis is logarithmic: sizes that halve are equally spaced, so labels do not overlap.
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], minor=False)
    axis.minorticks_off()
    axis.set(
        title=f"compression, layers {layers[0][0]} to {layers[1]}", xlabel="bytes of memory a token"
    )


def _ends(axis: Any, ends: dict[str, Any]) -> None:
    for end, name in (("nothing", "nothing"), ("raw_text", "the text itself")):
        loss = ends["continuation"][end]["mean"]
        axis.axhline(loss, color=GREY, linewidth=0.9, linestyle=":")
        axis.annotate(
            name, (0.01, loss), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", color=GREY, fontsize=8,
        )  # fmt: skip

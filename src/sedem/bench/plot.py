"""The plot of a bench: time to first token against context length, log-log, for every method."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from sedem.pictures import pyplot_module, save

COLORS = ("#1b6ca8", "#b7791f", "#2f855a", "#9b2c2c", "#6b46c1", "#4a5568", "#b83280", "#0e7490")
CLOCKS = {"online_ttft_ms": "-", "prebuilt_ttft_ms": "--"}
"""The plotted measurements and their line styles."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Plot a bench, one panel per kind of time.

    Online times are solid, on the left; prebuilt times are dashed, on the right. Both are medians
    with quartiles. Thin lines are floors, which only studies compute. A marker is hollow if the
    method read only part of the context.

    Args:
        document: the document that `run_bench` returns.
        path: the file to write; its suffix sets the format.
    """
    pyplot = pyplot_module()
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(
        1, 2, figsize=(11, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    for axis, clock in zip(axes, CLOCKS, strict=True):
        for color, (method, rows) in zip(cycle(COLORS), document["results"].items(), strict=False):
            _line(axis, clock, method, rows, color)
        _axis(axis, document)
    axes[0].set(title="online: documents and question arrive together", ylabel="ms to first token")
    axes[1].set(title="prebuilt: the memory is there")
    handles, labels = axes[0].get_legend_handles_labels()
    if any(row.get("floor") for rows in document["results"].values() for row in rows.values()):
        handles.append(Line2D([], [], color="grey", linewidth=0.8))
        labels.append("computed floor")
    handles.append(Line2D([], [], color="grey", marker="o", markerfacecolor="white", linewidth=0))
    labels.append("reads only what fits or was picked")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(_title(document), fontsize=10)
    save(figure, path)


def _line(axis: Any, clock: str, method: str, rows: dict[str, Any], color: str) -> None:
    lengths = sorted(rows, key=int)
    places = [int(tokens) for tokens in lengths]
    found = [rows[tokens][clock] for tokens in lengths]
    if None in found:
        axis.plot([], [], CLOCKS[clock], color=color, label=method)
        return
    medians = [entry["median"] for entry in found]
    spread = [
        [entry["median"] - entry["q1"] for entry in found],
        [entry["q3"] - entry["median"] for entry in found],
    ]
    axis.errorbar(
        places, medians, yerr=spread, fmt=CLOCKS[clock], color=color, capsize=2, label=method,
        linewidth=1.8,
    )  # fmt: skip
    for tokens, place, median in zip(lengths, places, medians, strict=True):
        read = rows[tokens]["reads_tokens"]
        whole = read is None or read >= place
        axis.plot(place, median, "o", color=color, markerfacecolor=color if whole else "white")
    floors = [rows[tokens].get("floor") for tokens in lengths]
    if all(floors):
        axis.plot(places, [f[clock] for f in floors], CLOCKS[clock], color=color, linewidth=0.7)


def _axis(axis: Any, document: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = sorted({int(tokens) for rows in document["results"].values() for tokens in rows})
    axis.set(xscale="log", yscale="log", xlabel="context tokens")
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    # With powers of ten alone, a narrow axis could have a single tick label.
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _title(document: dict[str, Any]) -> str:
    settings, machine = document["settings"], document["machine"]
    shape = settings["backbone"]
    weights = f"{shape}, random weights" if shape else Path(settings["checkpoint"]).name
    where = machine["device"] if settings["device"] != "cpu" else machine["processor"]
    threads = f", {machine['threads']} threads" if settings["device"] == "cpu" else ""
    return f"{weights}, {settings['dtype']}, batch 1, on {where}{threads}"

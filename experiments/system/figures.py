"""Pictures of studies: our numbers with intervals, the paper's in grey."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.system.scales import Scale
from sedem_lab.pictures import pyplot_module, save

Number = Any
"""`tables.Number`, which uses this module."""

OURS, PAPER = "#1b6ca8", "#9a9a9a"
ACROSS = 4
"""Number of panels in a row."""
BESIDE = 1.07
"""Distance between two series at one value of a logarithmic axis, as a factor."""

MAGNITUDES = 20
"""A curve whose values differ by more than this factor is drawn on a logarithmic axis."""
SERIES = (OURS, "#d9822b", "#4f9d69", "#8c5fa8", "#9b2c2c", "#4a5568")
"""Colours of the curves of one panel."""

_SWEEP = re.compile(r"^(?:(?P<series>.+), )?(?P<knob>[A-Z]|load)=(?P<value>\d+|all)$")


def draw(
    numbers: Sequence[Number], scale: Scale, title: str, path: Path, spread: str = "95 %"
) -> None:
    """Draw one panel per column: curves if the rows are like "guided, K=4", else points in rows.

    `spread` says what the intervals are.
    """
    pyplot = pyplot_module()
    panels = _panels(numbers)
    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    still = [panel for panel in panels.values() if not _is_sweep(panel)]
    height = max(3.0, 1.4 + 0.3 * max(map(len, still), default=0))
    figure, axes = pyplot.subplots(
        down, across, figsize=(2.6 + 2.5 * across, height * down), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    rows = list(dict.fromkeys(n.row for panel in still for n in panel))
    series = list(dict.fromkeys(_series(n) for p in panels.values() if _is_sweep(p) for n in p))
    for place, (axis, (column, panel)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        axis.set_title(column, fontsize=9)
        if _is_sweep(panel):
            _curves(axis, panel, scale, series)
        else:
            # All panels have the same rows, so only the first of each line shows the row names.
            _points(axis, panel, scale, rows, named=place % across == 0)
        axis.spines[["top", "right"]].set_visible(False)
    found = [ours for number in numbers if (ours := number.ours(scale))]
    suffix = f"{scale.name} scale" + f", {spread}" * any(interval for _, interval in found)
    marks = [(OURS, "o", f"ours, {suffix}")]
    if len(series) > 1:
        marks = [(c, "o", f"{n}, {suffix}") for c, n in zip(SERIES, series, strict=False)]
    if any(number.paper is not None for number in numbers):
        marks.append((PAPER, "D", "paper (other backbones and sets)"))
    handles = [pyplot.Line2D([], [], color=c, marker=m, label=label) for c, m, label in marks]
    figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    legend = 0.1 + 0.2 * -(-len(handles) // 2)  # inches, two entries in a row
    figure.tight_layout(rect=(0, legend / (height * down), 1, 0.98))
    save(figure, path)


def _panels(numbers: Sequence[Number]) -> dict[str, list[Number]]:
    """Numbers by column, row panels first, because their names need the left edge.

    A column that sweeps two settings becomes two panels.
    """
    panels: dict[str, list[Number]] = {}
    for number in numbers:
        match = _SWEEP.search(number.row)
        title = f"{number.column}, by {match['knob']}" if match else number.column
        panels.setdefault(title, []).append(number)
    return dict(sorted(panels.items(), key=lambda item: _is_sweep(item[1])))


def _is_sweep(panel: list[Number]) -> bool:
    return all(_SWEEP.search(number.row) for number in panel)


def _series(number: Number) -> str:
    """The part before "K=4" in a row; empty if there is none."""
    match = _SWEEP.search(number.row)
    return (match["series"] or "") if match else ""


def _points(axis: Any, panel: list[Number], scale: Scale, rows: list[str], *, named: bool) -> None:
    for number in panel:
        _mark(axis, number, scale, -rows.index(number.row), OURS, horizontal=True)
    names = rows if named else [""] * len(rows)
    axis.set_yticks([-i for i in range(len(rows))], names, fontsize=8)
    axis.set_ylim(-len(rows) + 0.4, 0.6)
    axis.grid(axis="x", alpha=0.3)


def _curves(axis: Any, panel: list[Number], scale: Scale, series: list[str]) -> None:
    from matplotlib.ticker import LogLocator

    values = [_SWEEP.search(n.row)["value"] for n in panel]  # type: ignore[index]
    # "all" is placed one step beyond the largest number.
    beyond = 2 * max(float(value) for value in values if value != "all")
    places = [beyond if value == "all" else float(value) for value in values]
    located = list(zip(places, panel, strict=True))
    paper = [(place, number.paper) for place, number in located if number.paper is not None]
    axis.plot([x for x, _ in paper], [y for _, y in paper], color=PAPER, alpha=0.6)
    for index, (colour, name) in enumerate(zip(SERIES, series, strict=False)):
        # Shifted sideways, so that no interval hides another.
        aside = BESIDE ** (index - (len(series) - 1) / 2)
        own = [(place * aside, number) for place, number in located if _series(number) == name]
        ours = [(place, found[0]) for place, number in own if (found := number.ours(scale))]
        axis.plot([x for x, _ in ours], [y for _, y in ours], color=colour, alpha=0.6)
        for place, number in own:
            _mark(axis, number, scale, place, colour, horizontal=False)
    axis.set_xscale("log", base=2)
    ticks = dict(zip(places, values, strict=True))
    axis.set_xticks([*ticks], [*ticks.values()])
    found = [ours for number in panel if (ours := number.ours(scale))]
    values_found = [value for value, _ in found]
    if found and min(values_found) > 0 and max(values_found) > MAGNITUDES * min(values_found):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
    elif not any(interval for _, interval in found):
        axis.set_ylim(bottom=0)  # a cost: start at zero to show how much it grows
    axis.grid(alpha=0.3)


def _mark(
    axis: Any, number: Number, scale: Scale, place: float, colour: str, *, horizontal: bool
) -> None:
    ours = number.ours(scale)
    if number.paper is not None:
        at = (number.paper, place) if horizontal else (place, number.paper)
        axis.plot(*at, "D", color=PAPER, markersize=5)
    if ours is None:
        return
    mean, interval = ours
    low, high = interval or (mean, mean)
    spread = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
    at, error = ((mean, place), "xerr") if horizontal else ((place, mean), "yerr")
    axis.errorbar(*at, fmt="o", color=colour, markersize=5, capsize=2, **{error: spread})


def draw_training(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    methods: Sequence[str],
    path: Path,
) -> None:
    """Draw one panel per stage and one line per method.

    Args:
        curves: examples seen and loss, by stage (such as "text, windows") and method.
    """
    pyplot = pyplot_module()
    figure, axes = pyplot.subplots(1, len(curves), figsize=(9, 3.6))
    colours = dict(zip(methods, pyplot.get_cmap("tab10").colors, strict=False))
    for axis, (name, lines) in zip(axes, curves.items(), strict=True):
        stage, unit = name.split(", ")
        for method, points in lines.items():
            axis.plot(*zip(*points, strict=True), color=colours[method], label=method)
        axis.set_xlabel(f"{unit} seen")
        axis.set_ylabel("training loss")
        axis.set_title(f"on {stage}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    # Every method is trained on questions, so the last panel labels them all.
    shown = axes[-1].get_legend_handles_labels()
    figure.legend(*shown, loc="lower center", ncols=len(methods), fontsize=8, frameon=False)
    save(figure, path)

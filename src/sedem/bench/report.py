"""The results of a bench: a table for the terminal and for pages, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from sedem.pictures import pyplot_module, save

CLOCKS = {
    "online TTFT ms": ("online_ttft_ms", "floor"),
    "prebuilt TTFT ms": ("prebuilt_ttft_ms", "floor"),
    "decode tok/s": ("decode_tok_s", "most"),
    "build tok/s": ("build_tok_s", "most"),
}
"""Columns of times and rates, and the heading of their floor or highest possible value."""
COLORS = ("#1b6ca8", "#b7791f", "#2f855a", "#9b2c2c", "#6b46c1", "#4a5568", "#b83280", "#0e7490")
STYLES = {"online_ttft_ms": "-", "prebuilt_ttft_ms": "--"}
"""The plotted measurements and their line styles."""


def lines(document: Mapping[str, Any]) -> list[list[str]]:
    """Headings, then one line per method and context length; a dash marks a missing value.

    Floors, which only studies compute, have columns if they are in the rows.
    """
    results = document["results"]
    floors = any("floor" in row for rows in results.values() for row in rows.values())
    clocks = [[title, bound] if floors else [title] for title, (_, bound) in CLOCKS.items()]
    headings = ["tokens", "method", "reads", *(name for names in clocks for name in names)]
    headings += ["peak MB", "B/token", "questions/s (batch)"]
    lengths = dict.fromkeys(tokens for rows in results.values() for tokens in rows)
    table = [
        _cells(method, int(tokens), rows[tokens], floors)
        for tokens in lengths
        for method, rows in results.items()
        if tokens in rows
    ]
    return [headings, *table]


def _cells(method: str, tokens: int, row: Mapping[str, Any], floors: bool) -> list[str]:
    read, memory, stored = row["reads_tokens"], row["memory"], row["stored_bytes_per_token"]
    cells = [f"{tokens:,}", method, f"{read:,} of {tokens:,}" if _is_cut(row, tokens) else "all"]
    for name, _ in CLOCKS.values():
        cells.append(_with_quartiles(row[name]) if row[name] else "-")
        if floors:
            cells.append(_short((row.get("floor") or {}).get(name)))
    cells.append(f"{memory['peak_bytes'] / 1e6:,.0f}" if memory else "-")
    cells.append(f"{stored:,.1f}" if stored else "-")
    batches = [
        f"{_with_quartiles(batch['questions_per_s'])} ({size})"
        for size, batch in row.get("batches", {}).items()
    ]
    return [*cells, ", ".join(batches) or "-"]


def _is_cut(row: Mapping[str, Any], tokens: int) -> bool:
    """Whether the method read only a part of its context."""
    read = row["reads_tokens"]
    return read is not None and read < tokens


def _with_quartiles(measured: Mapping[str, float]) -> str:
    median, first, third = (_short(measured[name]) for name in ("median", "q1", "q3"))
    return f"{median} ({first}-{third})"


def _short(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return "-"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Plot time to first token against context length, log-log, one panel per kind of time.

    Online times are solid, on the left; prebuilt times are dashed, on the right. Both are medians
    with quartiles. Thin lines are floors, which only studies compute. A marker is hollow if the
    method read only part of the context.

    Args:
        document: the document that `run_bench` returns.
        path: the file to write; its suffix sets the format.
    """
    pyplot = pyplot_module()
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(
        1, 2, figsize=(11, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    results = document["results"]
    lengths = sorted({int(tokens) for rows in results.values() for tokens in rows})
    for axis, clock in zip(axes, STYLES, strict=True):
        for color, (method, rows) in zip(cycle(COLORS), results.items(), strict=False):
            _line(axis, clock, method, rows, color)
        axis.set(xscale="log", yscale="log", xlabel="context tokens")
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.minorticks_off()
        # With powers of ten alone, a narrow axis could have a single tick label.
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(title="online: documents and question arrive together", ylabel="ms to first token")
    axes[1].set(title="prebuilt: the memory is there")
    handles, labels = axes[0].get_legend_handles_labels()
    if any(row.get("floor") for rows in results.values() for row in rows.values()):
        handles.append(Line2D([], [], color="grey", linewidth=0.8))
        labels.append("computed floor")
    handles.append(Line2D([], [], color="grey", marker="o", markerfacecolor="white", linewidth=0))
    labels.append("reads only what fits or was picked")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(_title(document), fontsize=10)
    save(figure, path)


def _line(axis: Any, clock: str, method: str, rows: Mapping[str, Any], color: str) -> None:
    style, places = STYLES[clock], sorted(map(int, rows))
    shown = [rows[str(tokens)] for tokens in places]
    found = [row[clock] for row in shown]
    if None in found:
        axis.plot([], [], style, color=color, label=method)
        return
    medians = [entry["median"] for entry in found]
    spread = [
        [entry["median"] - entry["q1"] for entry in found],
        [entry["q3"] - entry["median"] for entry in found],
    ]
    axis.errorbar(
        places, medians, yerr=spread, fmt=style, color=color, capsize=2, label=method, linewidth=1.8
    )
    for tokens, row, median in zip(places, shown, medians, strict=True):
        face = "white" if _is_cut(row, tokens) else color
        axis.plot(tokens, median, "o", color=color, markerfacecolor=face)
    floors = [row.get("floor") for row in shown]
    if all(floors):
        axis.plot(places, [f[clock] for f in floors], style, color=color, linewidth=0.7)


def _title(document: Mapping[str, Any]) -> str:
    settings, machine = document["settings"], document["machine"]
    shape = settings["backbone"]
    weights = f"{shape}, random weights" if shape else Path(settings["checkpoint"]).name
    where = machine["device"] if settings["device"] != "cpu" else machine["processor"]
    threads = f", {machine['threads']} threads" if settings["device"] == "cpu" else ""
    return f"{weights}, {settings['dtype']}, batch 1, on {where}{threads}"

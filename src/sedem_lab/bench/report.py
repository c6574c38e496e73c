"""The results of a bench: a table for the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from sedem_lab.pictures import pyplot_module, save

HEADINGS = ("tokens", "method", "reads", "read, s", "first token, ms", "tokens/s", "B/token")
COLORS = ("#1b6ca8", "#b7791f", "#2f855a", "#9b2c2c", "#6b46c1", "#4a5568", "#b83280", "#0e7490")


def lines(document: Mapping[str, Any]) -> list[list[str]]:
    """One line per context length and method: medians with quartiles; a dash for no value."""
    results = document["results"]
    table = []
    for tokens in dict.fromkeys(tokens for rows in results.values() for tokens in rows):
        for method, rows in results.items():
            row, whole = rows[tokens], int(tokens)
            read = f"{row['reads_tokens']:,} of {whole:,}" if _is_cut(row, whole) else "all"
            times = (
                (row["stages"]["build_ms"], 1e3),
                (row["prebuilt_ttft_ms"], 1),
                (row["decode_tok_s"], 1),
            )
            stored = row["stored_bytes_per_token"]
            shown = [_quartiles(*time) for time in times]
            table.append([f"{whole:,}", method, read, *shown, f"{stored:,.1f}" if stored else "-"])
    return table


def _is_cut(row: Mapping[str, Any], tokens: int) -> bool:
    """Whether the method read only a part of its context."""
    return row["reads_tokens"] is not None and row["reads_tokens"] < tokens


def _quartiles(measured: Mapping[str, float] | None, per: float) -> str:
    """Format a median and its quartiles with three significant digits."""
    if measured is None:
        return "-"
    values = [measured[name] / per for name in ("median", "q1", "q3")]
    digits = 2 if values[0] < 10 else 1 if values[0] < 100 else 0
    middle, low, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle} ({low}-{high})"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Plot the time to the first token against the context, log-log.

    Solid lines are online (documents and question arrive together), dashed ones prebuilt. A marker
    is hollow if the method read only part of the context.

    Args:
        document: what `run_bench` returns.
        path: the file to write; its suffix sets the format.
    """
    figure, axis = pyplot_module().subplots(figsize=(7, 4.6), layout="constrained")
    clocks = {"online": ("online_ttft_ms", "-"), "prebuilt": ("prebuilt_ttft_ms", "--")}
    for color, (method, rows) in zip(cycle(COLORS), document["results"].items(), strict=False):
        places = sorted(map(int, rows))
        for name, (clock, style) in clocks.items():
            times = [rows[str(tokens)][clock] for tokens in places]
            middle, low, high = ([time[n] for time in times] for n in ("median", "q1", "q3"))
            axis.fill_between(places, low, high, color=color, alpha=0.15)
            axis.plot(places, middle, style, color=color, label=f"{method}, {name}")
            for tokens, time in zip(places, middle, strict=True):
                face = "white" if _is_cut(rows[str(tokens)], tokens) else color
                axis.plot(tokens, time, "o", color=color, markerfacecolor=face)
        axis.set_xscale("log")
        axis.set_xticks(places, [f"{tokens:,}" for tokens in places])
    axis.set(yscale="log", xlabel="context tokens", ylabel="ms to the first token")
    axis.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    save(figure, path)

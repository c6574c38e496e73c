"""The table of a bench as rows of cells, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CLOCKS = {
    "online TTFT ms": ("online_ttft_ms", "floor"),
    "prebuilt TTFT ms": ("prebuilt_ttft_ms", "floor"),
    "decode tok/s": ("decode_tok_s", "most"),
    "build tok/s": ("build_tok_s", "most"),
}
"""Columns of times and rates, and the heading of their floor or highest possible value."""


def lines(document: dict[str, Any]) -> list[list[str]]:
    """Headings, then one line per method and context length; a dash marks a missing value.

    Floors, which only studies compute, have columns if they are in the rows.
    """
    results = document["results"]
    floors = any("floor" in row for rows in results.values() for row in rows.values())
    clocks = [[title, bound] if floors else [title] for title, (_, bound) in CLOCKS.items()]
    headings = ["tokens", "method", "reads", *(name for names in clocks for name in names)]
    headings += ["peak MB", "B/token", "questions/s (batch)"]
    return [headings, *_rows(results, floors)]


def _rows(results: dict[str, Any], floors: bool) -> Iterator[list[str]]:
    for tokens in dict.fromkeys(tokens for rows in results.values() for tokens in rows):
        for method, rows in results.items():
            if tokens in rows:
                yield _cells(method, int(tokens), rows[tokens], floors)


def _cells(method: str, tokens: int, row: dict[str, Any], floors: bool) -> list[str]:
    read = row["reads_tokens"]
    all_read = read is None or read >= tokens
    memory, stored = row["memory"], row["stored_bytes_per_token"]
    cells = [f"{tokens:,}", method, "all" if all_read else f"{read:,} of {tokens:,}"]
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
    cells.append(", ".join(batches) or "-")
    return cells


def _with_quartiles(measured: dict[str, float]) -> str:
    median, first, third = (_short(measured[name]) for name in ("median", "q1", "q3"))
    return f"{median} ({first}-{third})"


def _short(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return "-"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"

"""The table of a bench as rows of cells, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HEADINGS = (
    "tokens",
    "method",
    "reads",
    "online TTFT ms",
    "floor",
    "prebuilt TTFT ms",
    "floor",
    "decode tok/s",
    "most",
    "build tok/s",
    "most",
    "peak MB",
    "B/token",
    "questions/s (batch)",
)


def lines(document: dict[str, Any]) -> list[list[str]]:
    """Headings, then one line per method and context length; a dash marks a missing value."""
    return [list(HEADINGS), *_rows(document)]


def _rows(document: dict[str, Any]) -> Iterator[list[str]]:
    results = document["results"]
    for tokens in dict.fromkeys(tokens for rows in results.values() for tokens in rows):
        for method, rows in results.items():
            if tokens in rows:
                yield _cells(method, int(tokens), rows[tokens])


def _cells(method: str, tokens: int, row: dict[str, Any]) -> list[str]:
    floor = row["floor"] or {}
    read = row["reads_tokens"]
    all_read = read is None or read >= tokens
    memory, stored = row["memory"], row["stored_bytes_per_token"]
    cells = [f"{tokens:,}", method, "all" if all_read else f"{read:,} of {tokens:,}"]
    for name in ("online_ttft_ms", "prebuilt_ttft_ms", "decode_tok_s", "build_tok_s"):
        measured = row[name]
        cells += [_with_quartiles(measured) if measured else "-", _short(floor.get(name))]
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

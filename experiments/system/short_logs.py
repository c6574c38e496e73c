"""Training logs with few digits, so that committed results stay small."""

from __future__ import annotations

from typing import Any

DIGITS = 4
"""Significant digits; in full, logs would be a tenth of all committed results."""


def short_logs(entries: Any, *, inside: bool = False) -> Any:
    """Entries of a result with the numbers of training logs rounded to few digits.

    Args:
        entries: the result, or a part of it.
        inside: whether it is part of a log.
    """
    if isinstance(entries, dict):
        return {
            key: short_logs(value, inside=inside or key == "log")
            for key, value in entries.items()
            if not (inside and key == "epoch")  # follows from the step
        }
    if isinstance(entries, list):
        return [short_logs(entry, inside=inside) for entry in entries]
    if inside and isinstance(entries, float):
        return float(f"{entries:.{DIGITS}g}")
    return entries

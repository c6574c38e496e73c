"""Results with few digits, so that what is committed stays small."""

from __future__ import annotations

from typing import Any

DIGITS, LOG_DIGITS = 6, 3
"""Significant digits, and those of training logs."""
LEFT_OUT = {"epoch", "learning_rate", "grad_norm"}
"""Entries of a training log that are left out; two follow from the step and the recipe."""


def few_digits(entries: Any, log: bool = False) -> Any:
    """Round the numbers of a result.

    Args:
        entries: the result, or a part of it.
        log: whether this part is of a training log.
    """
    if isinstance(entries, dict):
        return {
            key: few_digits(value, log or key == "log")
            for key, value in entries.items()
            if not (log and key in LEFT_OUT)
        }
    if isinstance(entries, list):
        return [few_digits(entry, log) for entry in entries]
    digits = LOG_DIGITS if log else DIGITS
    return float(f"{entries:.{digits}g}") if isinstance(entries, float) else entries

"""Results with few digits, so that what is committed stays small."""

from __future__ import annotations

from typing import Any

DIGITS, LOG_DIGITS = 6, 3
"""Significant digits, and those of training logs."""
LEFT_OUT = {"epoch", "learning_rate", "grad_norm"}
"""Entries of a training log that are left out; two follow from the step and the recipe."""


def few_digits(entries: Any, digits: int = DIGITS) -> Any:
    """Round the numbers of a result.

    Args:
        entries: the result, or a part of it.
        digits: significant digits of this part.
    """
    if isinstance(entries, dict):
        return {
            key: few_digits(value, LOG_DIGITS if key == "log" else digits)
            for key, value in entries.items()
            if not (digits == LOG_DIGITS and key in LEFT_OUT)
        }
    if isinstance(entries, list):
        return [few_digits(entry, digits) for entry in entries]
    return float(f"{entries:.{digits}g}") if isinstance(entries, float) else entries

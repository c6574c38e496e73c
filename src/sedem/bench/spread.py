"""Median, quartiles and extremes of a repeated measurement."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes, quartiles and count of the values.

    Args:
        values: one value per run; at least one.
    """
    first, _, third = quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    return {
        "median": median(values),
        "min": min(values),
        "q1": first,
        "q3": third,
        "max": max(values),
        "n": len(values),
    }

"""Recall of the coarse search: measured up to a bank size, extrapolated beyond it.

The extrapolation is a straight line through the log-odds of a block being found, over the logarithm
of the number of blocks. Only the measured points support it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sedem.bank.search import CANDIDATES, COARSE_FROM

Z = 1.96
"""Standard deviations of a 95 % interval."""


@dataclass(frozen=True)
class Recall:
    """How many of the best blocks are among the candidates.

    Attributes:
        percent: percentage of the best blocks.
        how: "exact search", "measured", "between measured sizes" or "extrapolated".
        low: lower end of the 95 % interval; None unless it was measured.
        high: its upper end.
    """

    percent: float
    how: str
    low: float | None = None
    high: float | None = None


def recall_at(blocks: int, percents: Mapping[int, float], best: int) -> Recall:
    """Return the share of the best blocks that is among `CANDIDATES` candidates of a bank.

    Args:
        blocks: number of blocks, N.
        percents: measured percentages by number of blocks; at least two sizes.
        best: number of best blocks that were looked for at each size.
    """
    if blocks <= max(COARSE_FROM, CANDIDATES):
        return Recall(100.0, "exact search")
    if blocks in percents:
        low, high = wilson(percents[blocks] / 100, best)
        return Recall(percents[blocks], "measured", 100 * low, 100 * high)
    slope, start = _line(percents, best)
    percent = 100 / (1 + math.exp(-(start + slope * math.log(blocks))))
    inside = min(percents) <= blocks <= max(percents)
    return Recall(percent, "between measured sizes" if inside else "extrapolated")


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share after a number of trials, by Wilson's formula."""
    centre = share + Z * Z / (2 * trials)
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return (centre - spread) / scale, (centre + spread) / scale


def _line(percents: Mapping[int, float], best: int) -> tuple[float, float]:
    """Return the slope and intercept of the log-odds over log N, by least squares."""
    places = [math.log(size) for size in percents]
    # Half a block is added to each kind, because 100 % would have infinite odds.
    found = [percent / 100 * best + 0.5 for percent in percents.values()]
    odds = [math.log(one / (best + 1 - one)) for one in found]
    middle, height = sum(places) / len(places), sum(odds) / len(odds)
    spread = sum((place - middle) ** 2 for place in places)
    crossed = sum((x - middle) * (y - height) for x, y in zip(places, odds, strict=True))
    slope = crossed / spread
    return slope, height - slope * middle

"""Two runs on the same examples: the difference in a metric, and how certain its sign is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sedem.errors import DataError
from sedem_lab.evaluation.metrics import resampled_means
from sedem_lab.evaluation.records import ANSWERS, Record, values


@dataclass(frozen=True)
class Difference:
    """Second run minus first, example by example.

    Attributes:
        interval: 95 % interval of the mean, from the paired bootstrap over examples.
        below_zero: share of the resamples with a mean below zero. Near 0 or 1 the sign is certain,
            near 0.5 it may be chance.
    """

    mean: float
    interval: tuple[float, float]
    below_zero: float
    n: int

    def to_dict(self) -> dict[str, Any]:
        """The rounded values, with JSON types."""
        return {
            "mean": round(self.mean, 2),
            "interval": [round(bound, 2) for bound in self.interval],
            "below_zero": round(self.below_zero, 4),
            "n": self.n,
        }


def compare(
    first: Sequence[Record], second: Sequence[Record], metrics: Sequence[str] = tuple(ANSWERS)
) -> dict[str, Difference]:
    """Compute how much higher the second run scores than the first.

    Args:
        metrics: names of `records.values`. An example counts if it has the metric in both runs.

    Returns:
        The difference in each metric that at least one example has in both runs.

    Raises:
        DataError: the runs are on different examples; counts those of each and the common ones.
    """
    one, other = (
        {(record["id"], record["question"], *record["references"]) for record in records}
        for records in (first, second)
    )
    if one != other:
        raise DataError(
            f"the runs have different examples: {len(one):,} and {len(other):,}, of which "
            f"{len(one & other):,} are common; evaluate both on the same records, limit and seed"
        )
    others = {record["id"]: values(record) for record in second}
    pairs = [(values(record), others[record["id"]]) for record in first]
    result = {}
    for name in metrics:
        numbers = [b[name] - a[name] for a, b in pairs if name in a and name in b]
        if not numbers:
            continue
        means = np.asarray(resampled_means(numbers))
        low, high = map(float, np.percentile(means, [2.5, 97.5]))
        below_zero, count = float((means < 0).mean()), len(numbers)
        result[name] = Difference(float(np.mean(numbers)), (low, high), below_zero, count)
    return result

"""Paired differences of runs, and the refusal of runs on different examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.evaluation.conftest import Echo, hill

from sedem.errors import DataError
from sedem_lab.evaluation.compare import compare
from sedem_lab.evaluation.records import to_record


def run(right: list[bool], first: int = 0) -> list[dict[str, Any]]:
    examples = [hill(number) for number in range(first, first + len(right))]
    return [
        to_record(example, Echo(right=good).answer([example])[0])
        for example, good in zip(examples, right, strict=True)
    ]


def test_a_difference_is_second_minus_first_example_by_example() -> None:
    first, second = run([True, False, False, True]), run([True, True, True, False])
    found = compare(first, second[::-1], ["em", "f1"])
    assert found["em"].mean == 25
    assert found["em"].n == 4
    low, high = found["em"].interval
    assert -100 <= low < 25 < high <= 100
    back = compare(second, first, ["em"])["em"]
    assert back.mean == -25
    assert back.interval == pytest.approx((-high, -low))
    assert back.to_dict()["mean"] == -25


def test_pairing_removes_the_variance_that_both_runs_share() -> None:
    """Hard examples are hard for both: the difference is surer than the two means."""
    right = (np.random.default_rng(0).random(80) < 0.5).tolist()
    better = [good or at % 10 == 0 for at, good in enumerate(right)]
    difference = compare(run(right), run(better), ["em"])["em"]
    low, high = difference.interval
    assert low > 0
    assert high - low < 12
    assert difference.below_zero == 0
    assert compare(run(better), run(right), ["em"])["em"].below_zero > 0.97


def test_only_examples_that_have_a_metric_in_both_runs_count() -> None:
    first, second = run([True, False]), run([True, False])
    same = compare(first, second)
    assert (same["f1"].mean, same["f1"].interval, same["f1"].below_zero) == (0, (0, 0), 0)
    second[0]["conditioning"] = None
    assert compare(first, second, ["conditioning"])["conditioning"].n == 1
    second[1]["conditioning"] = None
    assert compare(first, second, ["conditioning"]) == {}


def test_runs_on_different_examples_are_refused_with_the_number_in_common() -> None:
    with pytest.raises(
        DataError, match="the runs have different examples: 4 and 3, of which 2 are "
    ):
        compare(run([True] * 4), run([True] * 3, first=2))
    other = run([True] * 4)
    other[0]["question"] = "Another of the same id?"
    with pytest.raises(DataError, match="4 and 4, of which 3 are common; evaluate both on the "):
        compare(run([True] * 4), other)

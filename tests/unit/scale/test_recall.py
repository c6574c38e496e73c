"""Recall of the coarse search: exact, measured, between and beyond what was measured."""

from __future__ import annotations

import pytest

from sedem.bank.search import COARSE_FROM
from sedem.scale.recall import recall_at, wilson

PERCENTS = {100_000: 95.0, 300_000: 90.0, 1_000_000: 80.0}


def test_a_bank_that_is_searched_exactly_loses_nothing() -> None:
    found = recall_at(COARSE_FROM, PERCENTS, 80)
    assert (found.percent, found.how) == (100.0, "exact search")


def test_a_measured_size_has_its_figure_and_its_interval() -> None:
    found = recall_at(300_000, PERCENTS, 80)
    assert (found.percent, found.how) == (90.0, "measured")
    assert found.low is not None and found.high is not None
    assert 80 < found.low < 90 < found.high < 96


def test_other_sizes_say_whether_they_lie_within_what_was_measured() -> None:
    inside, outside = (recall_at(size, PERCENTS, 80) for size in (500_000, 10**9))
    assert inside.how == "between measured sizes" and 80 < inside.percent < 90
    assert outside.how == "extrapolated" and outside.percent < 80
    assert inside.low is None and outside.low is None


def test_recall_falls_with_the_bank_and_stays_a_percentage() -> None:
    found = [recall_at(10**power, PERCENTS, 80).percent for power in range(7, 13)]
    assert found == sorted(found, reverse=True)
    assert all(0 < percent < 100 for percent in found)


def test_the_line_goes_through_two_points() -> None:
    # Half a block of each kind is added, so the odds of 60 and of 40 found blocks of 80 count.
    found = recall_at(200_000, {100_000: 75.0, 400_000: 50.0}, 80)
    odds = (60.5 / 20.5 * 40.5 / 40.5) ** 0.5
    assert found.percent == pytest.approx(100 * odds / (1 + odds))


def test_wilsons_interval_of_a_known_case() -> None:
    # 9 of 10, as in tables of the formula.
    assert wilson(0.9, 10) == pytest.approx((0.596, 0.982), abs=1e-3)

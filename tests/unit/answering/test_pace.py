"""Whoever is refused is told when the queue will be short."""

from __future__ import annotations

import pytest

from sedem.answering import pace
from sedem.answering.pace import MOST, Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_it_is_the_time_that_as_many_took(clock: list[float]) -> None:
    queue = Pace()
    for _ in range(10):
        clock[0] += 0.5
        queue.left()
    assert queue.seconds(64) == 32
    assert queue.seconds(1) == 1


def test_old_times_are_forgotten(clock: list[float]) -> None:
    queue = Pace()
    for seconds in [10.0] * 64 + [0.25] * 64:
        clock[0] += seconds
        queue.left()
    assert queue.seconds(64) == 16


def test_idle_time_does_not_count(clock: list[float]) -> None:
    queue = Pace()
    clock[0] += 3600
    queue.restart()
    assert queue.seconds(64) == 1
    clock[0] += 0.1
    queue.left()
    assert queue.seconds(64) == 7


def test_nobody_is_sent_away_for_long(clock: list[float]) -> None:
    queue = Pace()
    clock[0] += 3600
    assert queue.seconds(64) == MOST

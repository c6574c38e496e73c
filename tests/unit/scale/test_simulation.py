"""The simulation agrees with the theory of queues where theory has an answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sedem.errors import ConfigError
from sedem.scale.simulation import Cluster, Seconds, Simulated, Traffic, engines_needed, simulate

SEEDS = range(8)
COUNT = 1500
INSTANT = Cluster(partitions=1, scorers=1, score=0.0, engines=1, first=0.0, answer_tokens=1.0)


def mean_of_runs(times: list[float]) -> tuple[float, float]:
    """The mean of independent runs, and half of its 99 % interval (Student, 7 degrees)."""
    return float(np.mean(times)), 3.5 * float(np.std(times, ddof=1)) / math.sqrt(len(times))


def runs(traffic: Traffic, cluster: Cluster, count: int = COUNT) -> list[Simulated]:
    return [simulate(traffic, cluster, count, seed) for seed in SEEDS]


def assert_mean(found: list[Seconds], expected: float) -> None:
    mean, half = mean_of_runs([float(times.mean()) for times in found])
    assert half < 0.2 * expected, "the runs are too short to tell anything"
    assert abs(mean - expected) < half


def erlang_c(servers: int, load: float) -> float:
    """Probability that a question waits in M/M/c; `load` in servers."""
    terms = [load**n / math.factorial(n) for n in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("servers", [1, 4])
def test_scorers_wait_as_in_mmc(servers: int) -> None:
    rate = load = 0.6 * servers
    cluster = replace(INSTANT, scorers=servers, score=1.0, spread=1.0)
    wait = erlang_c(servers, load) / (servers - load)
    assert_mean([run.scored for run in runs(Traffic(rate), cluster)], 1.0 + wait)


def test_an_engine_of_one_row_waits_as_in_md1() -> None:
    # Pollaczek and Khinchine: a fixed time S waits load * S / (2 (1 - load)).
    cluster = replace(INSTANT, first=1.0, rows=1)
    assert_mean([run.first for run in runs(Traffic(0.6), cluster)], 1.0 + 0.6 / (2 * 0.4))


def test_two_partitions_fork_and_join_as_flatto_and_nelson_say() -> None:
    # Two M/M/1 queues with the same arrivals: (12 - load) / 8 times the time of one.
    cluster = replace(INSTANT, partitions=2, score=1.0, spread=1.0)
    expected = (12 - 0.5) / 8 / (1 - 0.5)
    assert_mean([run.scored for run in runs(Traffic(0.5), cluster)], expected)


def test_the_slowest_of_many_partitions_lies_within_its_bounds() -> None:
    # Of P queues: above the slowest service alone, below P independent queues (both harmonic).
    cluster, load = replace(INSTANT, partitions=16, score=1.0, spread=1.0), 0.5
    found = [float(run.scored.mean()) for run in runs(Traffic(load), cluster, 500)]
    harmonic = sum(1 / n for n in range(1, 17))
    assert harmonic < np.mean(found) < harmonic / (1 - load)


def test_many_partitions_that_take_equally_long_are_as_one() -> None:
    one = replace(INSTANT, score=0.5, spread=0.0)
    few, many = (
        simulate(Traffic(1.0), replace(one, partitions=parts), 500).scored for parts in (1, 100)
    )
    assert few == pytest.approx(many)


def test_machines_are_busy_as_long_as_they_work() -> None:
    cluster = Cluster(3, 2, 0.5, 4, first=0.2, step=0.02, row=0.01, answer_tokens=8, spread=1.0)
    traffic, rows_alone = Traffic(2.0), replace(INSTANT, first=1.0, rows=1)
    expected, _ = cluster.load(traffic.rate)
    mean, half = mean_of_runs([run.scorer_load for run in runs(traffic, cluster, 400)])
    assert abs(mean - expected) < half
    mean, half = mean_of_runs([run.engine_load for run in runs(Traffic(0.6), rows_alone)])
    assert abs(mean - 0.6) < half


def test_an_answer_alone_takes_its_prefill_and_its_steps() -> None:
    cluster = Cluster(2, 1, 0.25, 1, first=0.5, step=0.1, answer_tokens=5, spread=0.0)
    run = simulate(Traffic(1e-6), cluster, 2000)
    assert run.scored == pytest.approx(0.25, abs=1e-4)
    assert run.first == pytest.approx(0.75, abs=1e-4)
    # Lengths are geometric: four steps on average.
    assert float((run.end - run.first).mean()) == pytest.approx(0.4, rel=0.15)


def test_answers_join_a_running_batch_instead_of_waiting_for_its_end() -> None:
    cluster = Cluster(1, 1, 0.0, 1, first=0.01, step=0.01, answer_tokens=500, spread=0.0)
    run = simulate(Traffic(1.0), cluster, 500)
    assert float(np.median(run.end - run.first)) > 1
    assert float(np.percentile(run.first, 90)) < 0.1


def test_more_questions_than_the_machines_answer_wait_longer_and_longer() -> None:
    cluster = replace(INSTANT, first=1.0)
    short, long = (simulate(Traffic(1.5), cluster, count).first for count in (200, 2000))
    assert cluster.load(1.5)[1] == 1.5
    assert np.median(long) > 3 * np.median(short)


def test_bursts_bring_as_many_questions_and_longer_waits() -> None:
    calm, burst = Traffic(0.6), Traffic(0.6, burst=4.0, share=0.1, length=20.0)
    counted = [COUNT / [*burst.times(COUNT, np.random.default_rng(seed))][-1] for seed in SEEDS]
    mean, half = mean_of_runs(counted)
    assert abs(mean - 0.6) < half < 0.15
    waits = [
        np.percentile(simulate(one, replace(INSTANT, first=1.0), COUNT).first, 99)
        for one in (calm, burst)
    ]
    assert waits[1] > 2 * waits[0]


def test_engines_needed_are_the_fewest_that_are_enough() -> None:
    cluster = Cluster(1, 1, 0.0, 1, first=0.1, step=0.01, row=0.001, answer_tokens=8, spread=0.0)
    traffic, limit = Traffic(30.0), 0.5
    engines = engines_needed(traffic, cluster, limit, 1000)
    assert engines is not None
    found = [
        np.percentile(simulate(traffic, replace(cluster, engines=count), 1000).first, 99)
        for count in (engines - 1, engines)
    ]
    assert found[1] <= limit < found[0]
    assert engines_needed(traffic, cluster, 0.05, 200) is None


def test_a_seed_gives_the_same_run() -> None:
    cluster = Cluster(4, 2, 0.1, 3, first=0.1, step=0.01, row=0.001)
    one, same, other = (simulate(Traffic(5.0), cluster, 200, seed) for seed in (1, 1, 2))
    assert (one.end == same.end).all() and (one.end != other.end).any()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Traffic, {"rate": 0.0}), (Traffic, {"rate": 1.0, "burst": 11.0}),
        (Traffic, {"rate": 1.0, "share": 1.0}), (Cluster, {"engines": 0}),
        (Cluster, {"score": -1.0}), (Cluster, {"answer_tokens": 0.5}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(kind: type, change: dict[str, float]) -> None:
    settings = {} if kind is Traffic else vars(INSTANT)
    with pytest.raises(ConfigError):
        kind(**{**settings, **change})


def test_too_few_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 10"):
        simulate(Traffic(1.0), INSTANT, 9)

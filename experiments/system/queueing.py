"""The simulation of many machines from the measured unit costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from experiments.system.cells import RESULTS
from sedem.config import DEFAULT_MODEL
from sedem.provenance import provenance
from sedem.scale.costs import Machines, Plan, bank_cost
from sedem.scale.simulation import Cluster, Simulated, Traffic, simulate
from sedem.scale.sizing import BURST, BURST_SECONDS, sized
from sedem.scale.unit_costs import measured

KINDS = {"poisson": 1.0, "bursts": BURST}
"""Rate in bursts over the average rate, by kind of arrivals."""
ENGINES = 4
SEARCHED = 10**7
FIRST_TOKEN_S = 2.0
SEED = 0
ARRIVALS = RESULTS / "nano" / "arrivals" / "arrivals.json"


def measure_queueing(
    loads: Sequence[int], questions: int, rates: Sequence[float]
) -> dict[str, Any]:
    """Simulate waits by load, and the engines needed for given rates.

    Args:
        loads: loads of the engines, in percent.
        questions: number simulated for each load and kind of arrivals.
        rates: questions per second for which engines are counted.
    """
    cluster = _cluster(ENGINES)
    waits: dict[str, Any] = {kind: {} for kind in KINDS}
    for kind, burst in KINDS.items():
        for load in loads:
            rate = load / 100 * ENGINES / cluster.answer_seconds
            traffic = Traffic(rate, burst, length=BURST_SECONDS)
            run = simulate(traffic, _scored(cluster, rate), questions, SEED)
            waits[kind][str(load)] = run.summary()
    needed = {}
    for rate in rates:
        cost = bank_cost(DEFAULT_MODEL, Plan(10**12, rate, SEARCHED), Machines())
        needed[str(rate)] = sized(cost, FIRST_TOKEN_S, 2 * questions)
    return {
        "waits": waits,
        "needed": needed,
        "beside_measured": _beside_measured(),
        "cluster": asdict(cluster),
        "searched": SEARCHED,
        "questions": questions,
        "seed": SEED,
        **provenance(),
    }


def _cluster(engines: int) -> Cluster:
    """Engines of one core, and partitions that each score for at most half a second."""
    costs = measured(DEFAULT_MODEL)
    assert costs is not None
    first, step, row, exact = costs.first, costs.step, costs.row, costs.exact
    assert first is not None and step is not None and row is not None and exact is not None
    partitions = 4
    score = SEARCHED / 128 * exact / partitions
    return Cluster(partitions, 1, score, engines, first, step, row)


def _scored(cluster: Cluster, rate: float) -> Cluster:
    """Replicas of each partition at a load of 70 percent, so that results reflect only engines."""
    return replace(cluster, scorers=-(-int(100 * rate * cluster.score) // 70) or 1)


def _beside_measured() -> dict[str, float]:
    """The simulation of one engine, and the lowest measured rate of the study of arrivals."""
    found = json.loads(ARRIVALS.read_text(encoding="utf-8"))
    rate = min(found["rates"], key=float)
    way = found["rates"][rate]["running batch"]
    cluster = replace(
        _cluster(1), partitions=1, score=0.0, answer_tokens=way["answer_tokens"],
        rows=found["rows"],
    )  # fmt: skip
    run: Simulated = simulate(Traffic(float(rate)), cluster, 4000, SEED)
    told = run.summary()
    return {
        "rate": float(rate),
        "measured_p50_s": 1e-3 * way["ttft_median_ms"],
        "measured_p99_s": 1e-3 * way["ttft_p99_ms"],
        "simulated_p50_s": told["first_p50_s"],
        "simulated_p99_s": told["first_p99_s"],
    }

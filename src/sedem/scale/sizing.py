"""Find by simulation how many engines a bank's questions need, and how long its users then wait.

Engines share only the router, so a simulation has a slice of them: as many questions per second as
`SLICE` engines answer. Numbers of engines are scaled up from it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sedem.errors import ConfigError
from sedem.scale.simulation import Cluster, Traffic, engines_needed, simulate

SLICE = 16
QUESTIONS = 10_000
BURST = 2.0
"""Rate in a burst over the average rate; bursts are a tenth of the time."""
BURST_SECONDS = 2.0
"""Mean length of a burst."""
SCORING_SHARE = 0.75
"""Share of the limit that scoring may take for 99 of 100 questions, waits included."""


def sized(result: dict[str, Any], seconds: float, questions: int = QUESTIONS) -> dict[str, Any]:
    """Simulate the questions of a bank.

    Args:
        result: the result of `bank_cost`.
        seconds: time within which 99 of 100 questions must get their first token.
        questions: how many are simulated for each number of engines.

    Returns:
        `first_token_s`, the limit; `partitions` of the bank; `questions_per_second` and
        `simulated_questions_per_second`; for `poisson` and `bursts` the `scorers` of each
        partition, the `engines` needed in all (None if none suffice) and, with that many, the
        medians and 99th percentiles of waits, `scorer_load` and `engine_load`.

    Raises:
        ConfigError: times of scoring or answering are unknown, or `seconds` is not above 0.
        DataError: simpy is not installed.
    """
    score, answer, assumed = result["score"], result["answer"], result["assumptions"]
    spent = score[score["search"]]["device_seconds_a_question"]
    if spent is None or answer["first_seconds"] is None:
        raise ConfigError(
            f"times of '{result['model']}' were not measured, so its questions cannot be "
            "simulated; --tflops X gives lower bounds from FLOPs"
        )
    if not seconds > 0:
        raise ConfigError(f"{seconds:g} seconds to the first token; it must be above 0")
    partitions = math.ceil(spent / assumed["score_seconds"])
    part = spent / partitions
    cluster = Cluster(
        partitions=partitions,
        scorers=1,
        score=part,
        engines=1,
        first=answer["first_seconds"],
        step=answer["step_seconds"],
        row=answer["row_seconds"],
        answer_tokens=assumed["answer_tokens"],
    )
    rate, load = assumed["questions_per_second"], assumed["load"]
    slice_rate = min(rate, SLICE * load / cluster.answer_seconds)
    found: dict[str, Any] = {
        "first_token_s": seconds,
        "partitions": partitions,
        "questions_per_second": rate,
        "simulated_questions_per_second": slice_rate,
    }
    for name, burst in (("poisson", 1.0), ("bursts", BURST)):
        traffic = Traffic(slice_rate, burst, length=BURST_SECONDS)
        scorers = _scorers(cluster, traffic, load, SCORING_SHARE * seconds, questions)
        spread = replace(cluster, scorers=scorers)
        engines = engines_needed(traffic, spread, seconds, questions)
        found[name] = {
            "scorers": math.ceil(scorers * rate / slice_rate),
            "engines": None if engines is None else math.ceil(engines * rate / slice_rate),
        }
        if engines is not None:
            run = simulate(traffic, replace(spread, engines=engines), questions)
            found[name] |= run.summary()
    return found


def _scorers(
    cluster: Cluster, traffic: Traffic, load: float, seconds: float, questions: int
) -> int:
    """Return the replicas per partition: what the load needs, or more if questions wait too long.

    The maximum is three times what the load needs, plus two; if that is too few, more do not help.
    """
    least = math.ceil(traffic.rate * cluster.score / load)
    # Answers do not matter here: one engine that takes no time.
    idle = replace(cluster, engines=1, first=0.0, answer_tokens=1.0)
    low, most = least, 3 * least + 2

    def is_enough(scorers: int) -> bool:
        run = simulate(traffic, replace(idle, scorers=scorers), questions)
        return float(np.percentile(run.scored, 99)) <= seconds

    if not is_enough(most):
        return least
    while low < most:
        middle = (low + most) // 2
        if is_enough(middle):
            most = middle
        else:
            low = middle + 1
    return low

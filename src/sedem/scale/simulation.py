"""Simulate questions that arrive at random at many machines: how long they wait, and for what.

A question is scored by every partition of the bank, and waits for the slowest (fork and join).
Each partition has replicas and serves questions first come, first served. Then the question goes
to the less busy of two engines drawn at random, as in Ray Serve's router. An engine works in
turns as `sedem.answering.scheduler` does: it prefills some waiting questions together, then runs
one token of every answer. Networks, failures and the merge of scores take no time here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sedem.answering.scheduler import JOIN
from sedem.errors import ConfigError, DataError

WARM_UP = 0.1
"""Share of questions at the start, which meet empty machines and are not counted."""

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """When questions arrive: a Poisson process whose rate is higher in bursts.

    Attributes:
        rate: questions a second, on average.
        burst: rate in a burst, as a multiple of `rate`; 1 means no bursts.
        share: share of the time that bursts take.
        length: mean seconds of a burst; lengths are exponential.

    Raises:
        ConfigError: a number is out of range, or bursts would bring more than all questions.
    """

    rate: float
    burst: float = 1.0
    share: float = 0.1
    length: float = 10.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.length > 0 and 0 < self.share < 1):
            raise ConfigError("rate and length must be above 0, and share between 0 and 1")
        if not 1 <= self.burst <= 1 / self.share:
            raise ConfigError(
                f"burst is {self.burst:g} at share {self.share:g}; it must be from 1 "
                f"to {1 / self.share:g}"
            )

    def times(self, count: int, random: np.random.Generator) -> Iterator[float]:
        """Yield when questions arrive, in seconds from the start."""
        quiet = self.rate * (1 - self.burst * self.share) / (1 - self.share)
        rates = (quiet, self.rate * self.burst)
        lengths = (self.length * (1 - self.share) / self.share, self.length)
        now, phase = 0.0, int(self.burst > 1 and random.random() < self.share)
        ends = random.exponential(lengths[phase]) if self.burst > 1 else math.inf
        while count:
            # Both waits are memoryless, so they may be drawn again when the phase changes.
            wait = random.exponential(1 / rates[phase]) if rates[phase] > 0 else math.inf
            if now + wait > ends:
                now, phase = ends, 1 - phase
                ends = now + random.exponential(lengths[phase])
                continue
            now += wait
            count -= 1
            yield now


@dataclass(frozen=True)
class Cluster:
    """The machines; times are seconds of one device.

    Attributes:
        partitions: P, parts of the bank, each scored for every question.
        scorers: replicas of each partition.
        score: mean seconds in which a replica scores its partition for one question.
        spread: standard deviation of that time over its mean; 0 means a constant time, 1 an
            exponential one.
        engines: replicas that answer.
        first: seconds of a prefill for each question in it.
        step: seconds of a decoding step of one answer.
        row: seconds that every further answer adds to a step.
        rows: maximum concurrent answers of an engine.
        answer_tokens: mean tokens of an answer; lengths are geometric.

    Raises:
        ConfigError: a number is out of range.
    """

    partitions: int
    scorers: int
    score: float
    engines: int
    first: float
    step: float = 0.0
    row: float = 0.0
    rows: int = 16
    answer_tokens: float = 16.0
    spread: float = 0.1

    def __post_init__(self) -> None:
        if min(self.partitions, self.scorers, self.engines, self.rows, self.answer_tokens) < 1:
            raise ConfigError("partitions, scorers, engines, rows and tokens must be at least 1")
        if min(self.score, self.first, self.step, self.row, self.spread) < 0:
            raise ConfigError("times and their spread cannot be negative")

    @property
    def answer_seconds(self) -> float:
        """Engine seconds per question, if all rows are taken."""
        step = (self.step + (self.rows - 1) * self.row) / self.rows
        return self.first + (self.answer_tokens - 1) * step

    def load(self, rate: float) -> tuple[float, float]:
        """Busy share of scorers and of engines; above 1 their queues grow."""
        return rate * self.score / self.scorers, rate * self.answer_seconds / self.engines


@dataclass(frozen=True)
class Simulated:
    """Seconds from the arrival of each question, without the questions of the warm-up.

    Attributes:
        scored: until the slowest partition has scored.
        first: until the first token.
        end: until the last token.
        scorer_load: share of the time that scorers were busy, until the last arrival.
        engine_load: the same for engines.
    """

    scored: Seconds
    first: Seconds
    end: Seconds
    scorer_load: float
    engine_load: float

    def summary(self) -> dict[str, float]:
        """Return the median and 99th percentile of each time, and the loads."""
        found = {}
        for name in ("scored", "first", "end"):
            times: Seconds = getattr(self, name)
            for percent in (50, 99):
                found[f"{name}_p{percent}_s"] = float(np.percentile(times, percent))
        loads = {"scorer_load": self.scorer_load, "engine_load": self.engine_load}
        return {**found, **{name: float(load) for name, load in loads.items()}}


def simulate(traffic: Traffic, cluster: Cluster, questions: int, seed: int = 0) -> Simulated:
    """Simulate questions from their arrival to their last token.

    Args:
        traffic: when they arrive.
        cluster: the machines.
        questions: how many arrive.
        seed: seed of everything random.

    Raises:
        ConfigError: fewer than 10 questions.
        DataError: simpy is not installed.
    """
    if questions < 10:
        raise ConfigError(f"{questions} questions; simulate at least 10")
    try:
        import simpy
    except ImportError:
        raise DataError("simpy simulates queues; install 'sedem[scale]'") from None
    environment = simpy.Environment()
    run = _Run(environment, cluster, np.random.default_rng(seed), questions)
    arrivals = [*map(float, traffic.times(questions, np.random.default_rng((seed, 1))))]
    environment.process(run.arrive(arrivals))
    environment.run()
    kept = slice(int(WARM_UP * questions), None)
    arrived, last = np.array(arrivals), arrivals[-1]
    scored, first, end = ((times - arrived)[kept] for times in (run.scored, run.first, run.end))
    servers = cluster.partitions * cluster.scorers
    return Simulated(
        scored,
        first,
        end,
        scorer_load=run.scoring.busy_until(last) / (servers * last),
        engine_load=sum(e.busy_until(last) for e in run.engines) / (cluster.engines * last),
    )


class _Scoring:
    """First come, first served: when a question arrives, the end of its scoring is known."""

    def __init__(self, cluster: Cluster, random: np.random.Generator) -> None:
        self.cluster, self.random = cluster, random
        self.free_PC = np.zeros((cluster.partitions, cluster.scorers))
        self.rows_P = np.arange(cluster.partitions)
        self.busy = 0.0

    def done(self, now: float) -> float:
        """Return when the slowest partition has scored a question that arrives now."""
        chosen_P = self.free_PC.argmin(1)
        start_P = np.maximum(self.free_PC[self.rows_P, chosen_P], now)
        spent_P = self._seconds()
        self.free_PC[self.rows_P, chosen_P] = start_P + spent_P
        self.busy += float(spent_P.sum())
        return float((start_P + spent_P).max())

    def busy_until(self, time: float) -> float:
        """Total busy seconds of all scorers, without the work left after a time."""
        return self.busy - float(np.maximum(self.free_PC - time, 0).sum())

    def _seconds(self) -> Seconds:
        one = self.cluster
        if not one.spread or not one.score:
            return np.full(one.partitions, one.score)
        shape = one.spread**-2
        return self.random.gamma(shape, one.score / shape, one.partitions)


@dataclass
class _Engine:
    """The queue and the rows of one engine, and when it was busy."""

    waiting: deque[int] = field(default_factory=deque)
    running: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0
    idle: Any = None
    spans: list[tuple[float, float]] = field(default_factory=list)

    @property
    def questions(self) -> int:
        """How many wait or run."""
        return len(self.waiting) + len(self.running)

    def busy_until(self, time: float) -> float:
        """Busy seconds before a time."""
        return sum(min(end, time) - start for start, end in self.spans if start < time)


def _questions(engine: _Engine) -> int:
    return engine.questions


class _Run:
    """The processes of one simulation."""

    def __init__(
        self, environment: Any, cluster: Cluster, random: np.random.Generator, questions: int
    ) -> None:
        self.environment, self.cluster = environment, cluster
        self.scoring = _Scoring(cluster, random)
        self.engines = [_Engine() for _ in range(cluster.engines)]
        self.scored, self.first, self.end = (np.zeros(questions) for _ in range(3))
        self.tokens = random.geometric(1 / cluster.answer_tokens, questions)
        # Two different engines for each question; with one engine there is no choice.
        first = random.integers(cluster.engines, size=questions)
        beside = random.integers(1, max(2, cluster.engines), size=questions)
        self.pairs = np.stack([first, (first + beside) % cluster.engines], 1).tolist()
        for engine in self.engines:
            environment.process(self.work(engine))

    def arrive(self, arrivals: list[float]) -> Generator[Any, None, None]:
        """Score every question when it arrives."""
        for question, at in enumerate(arrivals):
            yield self.environment.timeout(at - self.environment.now)
            self.scored[question] = self.scoring.done(at)
            self.environment.process(self.ask(question))

    def ask(self, question: int) -> Generator[Any, None, None]:
        """Give a question to an engine as soon as it is scored."""
        wait = self.scored[question] - self.environment.now
        yield self.environment.timeout(max(0.0, wait))
        engine = min((self.engines[one] for one in self.pairs[question]), key=_questions)
        engine.waiting.append(question)
        if engine.idle is not None:
            engine.idle.succeed()
            engine.idle = None

    def work(self, engine: _Engine) -> Generator[Any, None, None]:
        """Run the turns of an engine: a prefill of waiting questions, then a token per answer."""
        cluster, environment = self.cluster, self.environment
        while True:
            if not engine.questions:
                engine.idle = environment.event()
                yield engine.idle
            started = environment.now
            room = min(JOIN, cluster.rows - len(engine.running), len(engine.waiting))
            if room:
                joined = [engine.waiting.popleft() for _ in range(room)]
                yield environment.timeout(cluster.first * room)
                self._begin(engine, joined)
            if engine.running:
                rows = len(engine.running)
                yield environment.timeout(cluster.step + (rows - 1) * cluster.row)
                engine.steps += 1
                while engine.running and engine.running[0][0] <= engine.steps:
                    self.end[heappop(engine.running)[1]] = environment.now
            engine.spans.append((started, environment.now))

    def _begin(self, engine: _Engine, joined: list[int]) -> None:
        for question in joined:
            self.first[question] = self.environment.now
            if self.tokens[question] == 1:
                self.end[question] = self.environment.now
            else:
                heappush(engine.running, (engine.steps + int(self.tokens[question]) - 1, question))


def engines_needed(
    traffic: Traffic, cluster: Cluster, seconds: float, questions: int, seed: int = 0
) -> int | None:
    """Return the fewest engines with which 99 of 100 questions get their first token in time.

    Args:
        traffic: when questions arrive.
        cluster: the machines; its number of engines is ignored.
        seconds: time limit from the arrival of a question to its first token.
        questions: how many are simulated for each number of engines.
        seed: seed of everything random.

    Returns:
        The number; None if the time is too short for any.
    """

    def is_enough(engines: int) -> bool:
        run = simulate(traffic, replace(cluster, engines=engines), questions, seed)
        return float(np.percentile(run.first, 99)) <= seconds

    low = enough = max(1, math.ceil(traffic.rate * cluster.answer_seconds))
    most = 16 * low
    while not is_enough(enough):
        # With more engines than that, nearly all are idle: scoring or a prefill takes too long.
        if enough > most:
            return None
        low, enough = enough + 1, 2 * enough
    while low < enough:
        middle = (low + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            low = middle + 1
    return enough

"""Questions arriving at random times: a running batch compared with static batches.

In static batches, as in `SeDeM.answer`, the questions that wait when a batch ends are answered in
the next one. Both ways answer the same questions at the same times. They alternate round by round,
so that other work on the machine affects both equally.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

from sedem.answering.decoding import Decoding
from sedem.answering.requests import Request
from sedem.bench.contexts import context, source
from sedem.provenance import provenance

if TYPE_CHECKING:
    from sedem.model import SeDeM

TOKENS = 2048
"""Length of the context, in tokens."""
LIMIT = 64
"""Maximum tokens of an answer."""
SEED = 0


@dataclass(frozen=True)
class Arrival:
    """A question and its arrival time, in seconds from the start."""

    at: float
    request: Request


@dataclass(frozen=True)
class Served:
    """The outcome of one question.

    Attributes:
        first: seconds from its arrival to its first token.
        end: time when its answer was complete, in seconds from the start.
        text: the answer.
    """

    first: float
    end: float
    text: str


Way = Callable[["SeDeM", Sequence[Arrival]], list[Served]]


def measure_arrivals(
    model: SeDeM, rates: Sequence[float], count: int, rounds: int
) -> dict[str, Any]:
    """Serve the same arrivals in both ways.

    Args:
        model: the model.
        rates: average questions per second.
        count: number of questions.
        rounds: how often each way is run.

    Returns:
        For each rate and way, the medians of all rounds; and the settings.
    """
    bank = model.read(context(source(None)[0], model.encoder, TOKENS))
    requests = questions(bank.documents[0].text, count, bank)
    found: dict[str, Any] = {}
    for rate in rates:
        clock = Random(SEED)
        at, arrivals = 0.0, []
        for request in requests:
            at += clock.expovariate(rate)
            arrivals.append(Arrival(at, request))
        for serve in WAYS.values():
            serve(model, arrivals[: model.engine.batch_size])  # allocates what later runs use
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, serve in WAYS.items():
                runs[way].append(figures(model, arrivals, serve(model, arrivals)))
        found[str(rate)] = {
            way: {name: median(run[name] for run in of_way) for name in of_way[0]}
            for way, of_way in runs.items()
        }
    return {
        "rates": found,
        "questions": count,
        "rounds": rounds,
        "tokens": TOKENS,
        "rows": model.engine.batch_size,
        "seed": SEED,
        "load_average": os.getloadavg()[0],
        **provenance(model.device),
    }


def questions(text: str, count: int, bank: Any) -> list[Request]:
    """Questions of different lengths and K, made of words of a text."""
    random, words = Random(SEED), text.split()
    made = []
    for _ in range(count):
        start, length = random.randrange(len(words) - 12), random.randint(1, 12)
        phrase = " ".join(words[start : start + length])
        made.append(Request(bank, f"What is said about '{phrase}'?", random.choice([1, 2, 4])))
    return made


def figures(
    model: SeDeM, arrivals: Sequence[Arrival], served: Sequence[Served]
) -> dict[str, float]:
    """Tokens per second, and times to the first token in milliseconds."""
    lengths = [len(model.decoder.token_ids(one.text)) for one in served]
    first = [1e3 * one.first for one in served]
    return {
        "tokens_s": sum(lengths) / (max(one.end for one in served) - arrivals[0].at),
        "ttft_median_ms": median(first),
        "ttft_p99_ms": quantiles(first, n=100, method="inclusive")[-1],
        "end_mean_ms": 1e3 * mean(o.end - a.at for o, a in zip(served, arrivals, strict=True)),
        "answer_tokens": mean(lengths),
    }


def in_static_batches(model: SeDeM, arrivals: Sequence[Arrival]) -> list[Served]:
    """Answer waiting questions together, up to the engine's batch size; meanwhile others wait."""
    start, served, done = time.perf_counter(), list[Served](), 0
    while done < len(arrivals):
        time.sleep(max(0.0, arrivals[done].at - (time.perf_counter() - start)))
        now = time.perf_counter() - start
        waiting = [a for a in arrivals[done : done + model.engine.batch_size] if a.at <= now]
        served += _in_one_batch(model, waiting, start)
        done += len(waiting)
    return served


def _in_one_batch(model: SeDeM, batch: Sequence[Arrival], start: float) -> list[Served]:
    asked = time.perf_counter() - start
    answers = model.answer_requests([arrival.request for arrival in batch], Decoding(LIMIT))
    return [
        Served(
            asked + 1e-3 * answer.timings["ttft_ms"] - arrival.at,
            asked + 1e-3 * answer.timings["total_ms"],
            answer.text,
        )
        for arrival, answer in zip(batch, answers, strict=True)
    ]


def in_a_running_batch(model: SeDeM, arrivals: Sequence[Arrival]) -> list[Served]:
    """Submit every question to a scheduler when it arrives."""
    start, replies = time.perf_counter(), []
    with model.scheduler() as scheduler:
        for arrival in arrivals:
            time.sleep(max(0.0, arrival.at - (time.perf_counter() - start)))
            replies.append(
                (time.perf_counter(), scheduler.submit(arrival.request, Decoding(LIMIT)))
            )
        served = []
        for asked, reply in replies:
            answer = reply.result()
            end = asked - start + 1e-3 * answer.timings["total_ms"]
            served.append(Served(1e-3 * answer.timings["ttft_ms"], end, answer.text))
    return served


WAYS: dict[str, Way] = {
    "static batches": in_static_batches,
    "running batch": in_a_running_batch,
}

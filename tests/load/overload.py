"""More questions than the server can answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence

from campaign import Result
from load.client import QUEUE_FULL, Reply, ask, bodies, clients, judge, milliseconds, percentile
from load.target import Target

READERS = (1, 2, 4)
"""Readers at once with which the peak is looked for, in rows of the server."""
TIMES = 2.0
"""Questions arrive at so many times the peak."""
GOODPUT, REFUSED_SECONDS = 0.9, 0.1
RAMP = 0.25
"""The share of the arrivals that fill the queue, and are not counted."""


async def overload(target: Target, points: int, seed: int) -> Result:
    """Find the most answers a second, then let questions arrive twice as fast, at random moments.

    The peak is the best of three closed loops, in which each reader waits for its answer before it
    asks again. In the open loop no reader waits for another.
    """
    result, questions = Result("questions"), bodies(target, seed)
    rows, each, peak = min(target.rows(), points), points // len(READERS), 0.0
    async with clients(target) as client:
        await asyncio.gather(*(ask(client, next(questions)) for _ in range(rows)))
        for readers in READERS:
            left = iter(range(each))

            async def reader(left: Iterator[int] = left) -> list[Reply]:
                return [await ask(client, next(questions)) for _ in left]

            loops = await asyncio.gather(*(reader() for _ in range(readers * rows)))
            replies = [reply for loop in loops for reply in loop]
            result.cases["closed loop"] += len(replies)
            judge(result, replies, "an answer failed")
            peak = max(peak, _rate([r.began + r.seconds for r in replies if r.answered]))
        # Ask at random moments, at a rate; late tells how late each question was sent.
        chance, tasks, late = random.Random(seed), list[asyncio.Task[Reply]](), list[float]()
        due = began = time.perf_counter()
        for _ in range(points):
            due += chance.expovariate(TIMES * peak)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            late.append(time.perf_counter() - due)
            tasks.append(asyncio.create_task(ask(client, next(questions))))
        replies = [*await asyncio.gather(*tasks)]
    result.cases["open loop"] = len(replies)
    until = max(reply.began for reply in replies)
    since = began + RAMP * (until - began)
    ends = [reply.began + reply.seconds for reply in replies if reply.answered]
    goodput = sum(since <= end <= until for end in ends) / (until - since)
    refused = [reply.seconds for reply in replies if reply.status == QUEUE_FULL]
    waited = [reply.seconds for reply in replies if reply.answered]
    p99 = percentile(refused, 0.99)
    result.count("answered", len(waited))
    result.count("429", len(refused))
    result.figures |= {
        "peak": f"{peak:.1f} answers/s",
        "goodput at twice the peak": f"{goodput:.1f} answers/s ({goodput / (peak or 1):.0%})",
        "refusal p50": milliseconds(percentile(refused, 0.5)),
        "refusal p99": milliseconds(p99),
        "answer p99": milliseconds(percentile(waited, 0.99)),
        "questions sent late by p99": milliseconds(percentile(late, 0.99)),
    }
    judge(result, replies, "neither an answer nor 429")
    result.require(
        goodput >= GOODPUT * peak,
        f"{goodput:.1f} answers a second at twice the peak of {peak:.1f}, less than {GOODPUT:.0%}",
    )
    result.require(
        p99 <= REFUSED_SECONDS,
        f"p99 of the time to a refusal is {milliseconds(p99)}, more than "
        f"{milliseconds(REFUSED_SECONDS)}",
    )
    return result


def _rate(ends: Sequence[float]) -> float:
    """Answers a second, without the beginning and the end of the loop."""
    ordered = sorted(ends)
    first, last = len(ordered) // 10, len(ordered) - 1 - len(ordered) // 10
    return (last - first) / (ordered[last] - ordered[first]) if last > first else 0.0

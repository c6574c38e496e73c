"""Many readers at once."""

from __future__ import annotations

import asyncio
import random
import time

from campaign import Result
from load.client import QUEUE_FULL, Reply, ask, bodies, clients, milliseconds, percentile
from load.target import Target

CLIENTS = 256
SPREAD = 5.0
"""p99 of the time to the first token may be so many times p50."""


async def streams(target: Target, points: int, seed: int) -> Result:
    """Let 256 readers ask one question after another; a reader that gets 429 asks again.

    The time to the first token is that of the request which was admitted, from sending it: it
    holds the wait in the server's queue. The time with refused attempts is told beside it.
    """
    result, replies, whole = Result("questions"), list[Reply](), list[float]()
    questions, chance = bodies(target, seed), random.Random(seed)
    count = min(CLIENTS, points)
    async with clients(target) as client:
        await asyncio.gather(*(ask(client, next(questions)) for _ in range(min(count, 16))))

        async def reader(asked: int) -> None:
            for _ in range(asked):
                body, began = next(questions), time.perf_counter()
                while (reply := await ask(client, body)).status == QUEUE_FULL:
                    result.count("429")
                    result.require(reply.retry_after is not None, "a 429 came without Retry-After")
                    # As OpenAI's clients do, so that not all come back at once.
                    pause = float(reply.retry_after or 1)
                    await asyncio.sleep(pause * (1 + chance.random() / 4))
                replies.append(reply)
                whole.append(reply.began + reply.first - began)

        began = time.perf_counter()
        shares = [points // count + (i < points % count) for i in range(count)]
        await asyncio.gather(*map(reader, shares))
        seconds = time.perf_counter() - began
    result.cases["questions"] = len(replies)
    for reply in replies:
        result.require(reply.answered, f"a stream failed: {reply.status} {reply.error}")
    first = [reply.first for reply in replies if reply.answered]
    p50, p99 = percentile(first, 0.5), percentile(first, 0.99)
    result.figures |= {
        "answers/s": f"{len(replies) / seconds:.1f}",
        "first token p50": milliseconds(p50),
        "p99": milliseconds(p99),
        "p99/p50": f"{p99 / (p50 or 1):.2f}",
        "with refused attempts p50": milliseconds(percentile(whole, 0.5)),
        "with refused attempts p99": milliseconds(percentile(whole, 0.99)),
    }
    result.require(
        p99 <= SPREAD * p50,
        f"p99 of the time to the first token is {milliseconds(p99)}, more than {SPREAD:g} times "
        f"p50, {milliseconds(p50)}",
    )
    return result

"""Readers that go away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from campaign import Result
from load.client import PATH, QUEUE_FULL, ask, bodies, clients, milliseconds, percentile
from load.target import TEXTS, Target

READERS = 32
ROUND, ROUNDS = 250, 20
"""Requests of a round of the warm-up, and most rounds."""
STEADY, STEADY_ROUNDS = 0.005, 4
"""The warm-up ends after so many rounds in a row in which memory grew by no more: then all buffers
are full."""
GROWTH = 0.02
IDLE_SECONDS = 10.0
"""Within this time after the last reader went, nothing may wait or run."""
MOMENTS = 1.5
"""Readers go at most after so many times the usual time of an answer; some read it whole."""
TEXT = 1500
"""Characters of a text that comes with a question."""


async def disconnects(target: Target, points: int, seed: int) -> Result:
    """Let readers go away at random moments; rows, queue and memory must be as before.

    A third reads a stream, a third waits for a whole answer, a third brings a text that has to be
    read first.
    """
    result, chance = Result("requests"), random.Random(seed)
    requests = _requests(target, seed)
    async with clients(target) as client:
        # Keeps the keys and values of every block, which a large bank would do in time.
        await ask(client, next(bodies(target, seed)) | {"k": "all"})
        replies = await asyncio.gather(*(ask(client, next(requests)[1]) for _ in range(8)))
        usual = percentile([reply.seconds for reply in replies], 0.5)
        readers = Readers(client, requests, chance, usual)
        warm = await _warm_up(target, readers, min(ROUND, points))
        before = target.memory()
        await readers.go_away(points, result)
        seconds = await settle(target, result)
        after = target.memory()
        # As many questions at once as there are rows: one that is stuck would be missing.
        questions = bodies(target, seed)
        asked = [ask(client, next(questions)) for _ in range(target.rows())]
        for reply in await asyncio.gather(*asked):
            result.count("answers at once afterwards", reply.answered)
            result.require(reply.answered, f"afterwards a question failed: {reply.error}")
    growth = after / before - 1
    result.figures |= {
        "usual answer": milliseconds(usual),
        "requests of the warm-up": f"{warm:,}",
        "idle after": milliseconds(seconds),
        "memory after the warm-up": f"{before / 2**20:,.0f} MiB",
        "memory at the end": f"{after / 2**20:,.0f} MiB ({growth:+.1%})",
    }
    result.require(
        growth <= GROWTH,
        f"memory grew by {growth:.1%} from {before:,} to {after:,} bytes, more than {GROWTH:.0%}",
    )
    return result


def _requests(target: Target, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kinds and bodies without end."""
    chance, questions = random.Random(seed), bodies(target, seed)
    texts = [path.read_text("utf-8") for path in TEXTS]
    while True:
        body, kind = next(questions), chance.choice(("stream", "whole", "text"))
        if kind == "whole":
            body |= {"stream": False}
        elif kind == "text":
            text = chance.choice(texts)
            start = chance.randrange(max(len(text) - TEXT, 1))
            said = f"{text[start : start + TEXT]}\n\n{body['messages'][0]['content']}"
            body |= {"model": target.model, "messages": [{"role": "user", "content": said}]}
        yield kind, body


@dataclass
class Readers:
    """Readers that go away; `usual` is the seconds of a usual answer."""

    client: httpx.AsyncClient
    requests: Iterator[tuple[str, dict[str, Any]]]
    chance: random.Random
    usual: float

    async def go_away(self, points: int, result: Result) -> None:
        """Make a number of requests, a few at once."""
        left = iter(range(points))

        async def reader() -> None:
            for _ in left:
                kind, body = next(self.requests)
                result.cases[kind] += 1
                try:
                    async with asyncio.timeout(self.chance.uniform(0, MOMENTS * self.usual)):
                        if body["stream"]:
                            reply = await ask(self.client, body)
                            status, error = reply.status, reply.error
                        else:
                            answer = await self.client.post(PATH, json=body)
                            status = answer.status_code
                            error = None if answer.is_success else answer.text[:500]
                    result.count("read to the end")
                    result.require(
                        error is None or status == QUEUE_FULL, f"an answer failed: {status} {error}"
                    )
                except TimeoutError:
                    result.count("left")

        await asyncio.gather(*(reader() for _ in range(READERS)))


async def _warm_up(target: Target, readers: Readers, size: int) -> int:
    """Make requests until the memory of the server is steady; how many were made."""
    last, steady, made = target.memory(), 0, 0
    while steady < STEADY_ROUNDS and made < ROUNDS * size:
        await readers.go_away(size, Result("requests"))
        now = target.memory()
        steady = steady + 1 if now <= (1 + STEADY) * last else 0
        last, made = max(now, last), made + size
    await settle(target, Result("requests"))
    return made


async def settle(target: Target, result: Result) -> float:
    """Wait until nothing waits or runs; the seconds that it took."""
    began = time.monotonic()
    while busy := await asyncio.to_thread(target.busy):
        if time.monotonic() - began > IDLE_SECONDS:
            result.wrong.append(f"{busy} questions wait or run {IDLE_SECONDS:g} s after all left")
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - began

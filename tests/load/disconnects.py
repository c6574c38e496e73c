"""Readers that go away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
from campaign import Result
from load.client import PATH, Reply, ask, bodies, clients, milliseconds, percentile
from load.target import TEXTS, Target
from tqdm import tqdm

READERS = 32
WARM_UP = 0.5
"""The warm-up has so many times the requests; then all caches are full."""
GROWTH = 0.02
IDLE_SECONDS = 10.0
"""Within this time after the last reader went, nothing may wait or run."""
MOMENTS = 1.5
"""Readers go at most after so many times the usual time of an answer; some read it whole."""
TEXT = 1500
"""Characters of a text that comes with a question."""


def disconnects(target: Target, points: int, seed: int = 0) -> Result:
    """Let readers go away at random moments; rows, queue and memory must be as before.

    A third reads a stream, a third waits for a whole answer, a third brings a text that has to be
    read first.
    """
    return asyncio.run(_disconnects(target, points, seed))


async def _disconnects(target: Target, points: int, seed: int) -> Result:
    result, chance = Result("requests"), random.Random(seed)
    requests = _requests(target, seed)
    async with clients(target) as client:
        # Keeps the keys and values of every block, which a large bank would do in time.
        await ask(client, next(bodies(target, seed)) | {"k": "all"})
        replies = await asyncio.gather(*(ask(client, next(requests)[1]) for _ in range(8)))
        usual = percentile([reply.seconds for reply in replies], 0.5)
        with tqdm(total=round((1 + WARM_UP) * points), desc="disconnects", disable=None) as bar:
            warm = Result("requests")
            await _go_away(client, requests, chance, usual, round(WARM_UP * points), warm, bar)
            await _settle(target, result)
            before = target.memory()
            await _go_away(client, requests, chance, usual, points, result, bar)
            seconds = await _settle(target, result)
        after = target.memory()
        await _all_rows_answer(client, target, seed, result)
    growth = after / before - 1
    result.figures |= {
        "usual answer": milliseconds(usual),
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


async def _go_away(
    client: httpx.AsyncClient,
    requests: Iterator[tuple[str, dict[str, Any]]],
    chance: random.Random,
    usual: float,
    points: int,
    result: Result,
    bar: tqdm[Any],
) -> None:
    left = iter(range(points))

    async def reader() -> None:
        for _ in left:
            kind, body = next(requests)
            result.cases[kind] += 1
            try:
                async with asyncio.timeout(chance.uniform(0, MOMENTS * usual)):
                    status, error = await _outcome(client, body)
                result.count("read to the end")
                result.require(
                    error is None or status == 429, f"an answer failed: {status} {error}"
                )
            except TimeoutError:
                result.count("left")
            bar.update()

    await asyncio.gather(*(reader() for _ in range(READERS)))


async def _outcome(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str | None]:
    if body["stream"]:
        reply: Reply = await ask(client, body)
        return reply.status, reply.error
    response = await client.post(PATH, json=body)
    return response.status_code, None if response.is_success else response.text[:500]


async def _settle(target: Target, result: Result) -> float:
    """Wait until nothing waits or runs; the seconds that it took."""
    began = time.monotonic()
    while busy := await asyncio.to_thread(target.busy):
        if time.monotonic() - began > IDLE_SECONDS:
            result.wrong.append(f"{busy} questions wait or run {IDLE_SECONDS:g} s after all left")
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def _all_rows_answer(
    client: httpx.AsyncClient, target: Target, seed: int, result: Result
) -> None:
    """Ask as many questions at once as there are rows: one that is stuck would be missing."""
    questions, rows = bodies(target, seed), target.rows()
    replies = await asyncio.gather(*(ask(client, next(questions)) for _ in range(rows)))
    result.count("answers at once afterwards", sum(reply.answered for reply in replies))
    for reply in replies:
        result.require(reply.answered, f"afterwards a question failed: {reply.error}")

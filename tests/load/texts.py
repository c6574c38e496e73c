"""Readers who bring a text of their own with each question."""

from __future__ import annotations

import asyncio
from itertools import count

from campaign import Result
from load.client import ask, bodies, clients, judge
from load.disconnects import settle
from load.target import TEXTS, Target

MEMORY = 2**31
"""Bytes that the server may take."""
READERS, CHARACTERS = 4, 3_500


async def texts(target: Target, points: int, seed: int) -> Result:
    """Ask about texts that no other question has, several at once."""
    result, peak = Result("questions"), 0
    said = [path.read_text("utf-8")[:CHARACTERS] for path in TEXTS]
    pairs = zip(bodies(target, seed), count(), strict=False)
    async with clients(target) as client:

        async def reader() -> None:
            nonlocal peak
            for body, number in pairs:
                if number >= points:
                    return
                asked = body["messages"][0]["content"]
                text = f"Copy {number}. {said[number % len(said)]}\n\n{asked}"
                body |= {"model": target.model, "messages": [{"role": "user", "content": text}]}
                reply = await ask(client, body)
                result.cases["questions"] += 1
                judge(result, [reply], "a text failed")
                peak = max(peak, target.memory())

        await asyncio.gather(*(reader() for _ in range(READERS)))
    await settle(target, result)
    kept = round(target.metrics()["sedem_online_banks"])
    result.figures |= {
        "texts kept at the end": f"{kept} of {points}",
        "peak of resident memory": f"{peak / 2**20:,.0f} MiB of {MEMORY / 2**20:,.0f}",
    }
    result.require(peak <= MEMORY, f"memory grew to {peak:,} bytes, {MEMORY:,} are allowed")
    return result

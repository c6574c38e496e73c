"""Short questions beside all that takes long: every block, uploads, streams that vanish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
from campaign import Result
from load.client import Reply, ask, bodies, clients, judge, milliseconds, percentile
from load.disconnects import settle
from load.target import TEXTS, Target

from sedem.bank.file import IDLE
from sedem.demo import QUESTIONS

MEMORY = 4 * 2**30
"""Bytes that the server may take."""
SLOWER = 3.0
"""p95 of short questions beside the mix may be so many times their p95 alone."""
DRAIN = 30.0
"""The server has to end so many seconds after SIGTERM."""
PAUSE = 0.2
"""Seconds between two questions of a reader, and between two uploads."""
VANISH = 1.0
"""A stream vanishes after at most so many seconds."""
UPLOADS = "mix"
FEW = 4 * IDLE
"""Descriptors that may stay: connections of two banks, each to a file and its log."""
LOOK_SECONDS = 0.1


async def mix(target: Target, points: int, seed: int) -> Result:
    """Ask short questions alone, then beside the mix; then end the server while it is at work."""
    result, chance, peak = Result("questions"), random.Random(seed), 0

    async def short(client: httpx.AsyncClient) -> list[Reply]:
        replies, questions = list[Reply](), bodies(target, seed)
        for _ in range(points):
            replies.append(await ask(client, next(questions)))
            await asyncio.sleep(PAUSE)
        return replies

    async def every_block(client: httpx.AsyncClient) -> None:
        reply = await ask(client, next(bodies(target, 0)) | {"k": "all"})
        result.count("answers from every block", reply.answered)
        result.require(reply.answered, f"every block: {reply.status} {reply.error}")

    async def upload(client: httpx.AsyncClient) -> None:
        text = chance.choice(TEXTS)
        file = {"file": (f"{chance.randrange(50)}-{text.name}", text.read_bytes())}
        response = await client.post(f"/v1/banks/{UPLOADS}/documents", files=file)
        result.count("uploads")
        result.require(response.status_code in (202, 503), f"an upload got {response.status_code}")
        await asyncio.sleep(PAUSE)

    async def vanish(client: httpx.AsyncClient) -> None:
        body = next(bodies(target, chance.randrange(2**31))) | {"temperature": 2.0, "seed": 1}
        if chance.random() < 0.3:
            said = f"{chance.choice(TEXTS).read_text('utf-8')}\n\n{chance.choice(QUESTIONS)}"
            body |= {"model": target.model, "messages": [{"role": "user", "content": said}]}
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, VANISH)):
                await ask(client, body)
        await asyncio.sleep(PAUSE)

    async def look(client: httpx.AsyncClient) -> None:
        nonlocal peak
        peak = max(peak, target.memory())
        await asyncio.sleep(LOOK_SECONDS)

    async def again(work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        while True:
            await work(client)

    async with clients(target) as client:
        for _, body in zip(range(8), bodies(target, seed), strict=False):
            await ask(client, body)
        await upload(client)
        alone = await short(client)
    await settle(target, result)
    files = target.process.num_fds()
    async with clients(target) as client:
        works = (every_block, upload, vanish, look)
        tasks = [asyncio.create_task(again(work)) for work in works]
        beside = await short(client)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await settle(target, result)
    # What was measured
    result.cases.update({"alone": len(alone), "beside the mix": len(beside)})
    judge(result, [*alone, *beside], "a short question failed")
    first, then = (percentile([one.seconds for one in x], 0.95) for x in (alone, beside))
    after = target.process.num_fds()
    result.figures |= {
        "p95 alone": milliseconds(first),
        "p95 beside the mix": milliseconds(then),
        "p95 ratio": f"{then / (first or 1):.2f}",
        "peak of resident memory": f"{peak / 2**20:,.0f} MiB of {MEMORY / 2**20:,.0f}",
        "descriptors before and after": f"{files}, {after}",
    }
    result.require(
        then <= SLOWER * first,
        f"p95 of short questions is {milliseconds(then)} beside the mix, more than {SLOWER:g} "
        f"times their {milliseconds(first)} alone",
    )
    result.require(peak <= MEMORY, f"memory grew to {peak:,} bytes, {MEMORY:,} are allowed")
    result.require(
        after <= files + FEW, f"{after} descriptors are open after the mix, {files} were before"
    )
    if target.end is None:
        return result
    # The server ends while it reads every block.
    async with clients(target) as client:
        asking = asyncio.create_task(ask(client, next(bodies(target, 0)) | {"k": "all"}))
        while not target.busy():
            await asyncio.sleep(LOOK_SECONDS)
        seconds = await asyncio.to_thread(target.end)
        await asking
    result.figures["from SIGTERM to the free port"] = f"{seconds:.1f} s"
    result.require(seconds <= DRAIN, f"it took {seconds:.1f} s from SIGTERM to the free port")
    return result

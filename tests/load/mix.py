"""Short questions beside all that takes long: every block, uploads, streams that vanish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

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
    result, chance = Result("questions"), random.Random(seed)
    async with clients(target) as client:
        for _, body in zip(range(8), bodies(target, seed), strict=False):
            await ask(client, body)
        await _upload(client, chance, result)
        alone = await _short(client, target, points, seed)
    await settle(target, result)
    files, peak = target.process.num_fds(), [target.memory()]
    async with clients(target) as client:
        work: list[Callable[[], Awaitable[None]]] = [
            lambda: _every_block(client, target, result),
            lambda: _upload(client, chance, result),
            lambda: _vanish(client, target, chance),
            lambda: _look(target, peak),
        ]
        tasks = [asyncio.create_task(_again(one)) for one in work]
        beside = await _short(client, target, points, seed)
        await _cancelled(tasks)
    await settle(target, result)
    result.cases.update({"alone": len(alone), "beside the mix": len(beside)})
    _judge(result, alone, beside, peak[0])
    after = target.process.num_fds()
    result.figures["descriptors before and after"] = f"{files}, {after}"
    result.require(
        after <= files + FEW, f"{after} descriptors are open after the mix, {files} were before"
    )
    if target.end is not None:
        await _end(target, target.end, result)
    return result


async def _short(client: httpx.AsyncClient, target: Target, points: int, seed: int) -> list[Reply]:
    """Ask one short question after another."""
    replies, questions = list[Reply](), bodies(target, seed)
    for _ in range(points):
        replies.append(await ask(client, next(questions)))
        await asyncio.sleep(PAUSE)
    return replies


async def _again(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await work()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _every_block(client: httpx.AsyncClient, target: Target, result: Result) -> None:
    reply = await ask(client, next(bodies(target, 0)) | {"k": "all"})
    result.count("answers from every block", reply.answered)
    result.require(reply.answered, f"every block: {reply.status} {reply.error}")


async def _upload(client: httpx.AsyncClient, chance: random.Random, result: Result) -> None:
    text = chance.choice(TEXTS)
    file = {"file": (f"{chance.randrange(50)}-{text.name}", text.read_bytes())}
    response = await client.post(f"/v1/banks/{UPLOADS}/documents", files=file)
    result.count("uploads")
    result.require(response.status_code in (202, 503), f"an upload got {response.status_code}")
    await asyncio.sleep(PAUSE)


async def _vanish(client: httpx.AsyncClient, target: Target, chance: random.Random) -> None:
    body = next(bodies(target, chance.randrange(2**31))) | {"temperature": 2.0, "seed": 1}
    if chance.random() < 0.3:
        said = f"{chance.choice(TEXTS).read_text('utf-8')}\n\n{chance.choice(QUESTIONS)}"
        body |= {"model": target.model, "messages": [{"role": "user", "content": said}]}
    try:
        async with asyncio.timeout(chance.uniform(0, VANISH)):
            await ask(client, body)
    except TimeoutError:
        pass
    await asyncio.sleep(PAUSE)


async def _look(target: Target, peak: list[int]) -> None:
    peak[0] = max(peak[0], target.memory())
    await asyncio.sleep(LOOK_SECONDS)


async def _end(target: Target, end: Callable[[], float], result: Result) -> None:
    """End the server while it reads every block."""
    async with clients(target) as client:
        asking = asyncio.create_task(ask(client, next(bodies(target, 0)) | {"k": "all"}))
        while not target.busy():
            await asyncio.sleep(LOOK_SECONDS)
        seconds = await asyncio.to_thread(end)
        await asking
    result.figures["from SIGTERM to the free port"] = f"{seconds:.1f} s"
    result.require(seconds <= DRAIN, f"it took {seconds:.1f} s from SIGTERM to the free port")


def _judge(result: Result, alone: list[Reply], beside: list[Reply], peak: int) -> None:
    judge(result, [*alone, *beside], "a short question failed")
    first, then = (percentile([one.seconds for one in x], 0.95) for x in (alone, beside))
    result.figures |= {
        "p95 alone": milliseconds(first),
        "p95 beside the mix": milliseconds(then),
        "p95 ratio": f"{then / (first or 1):.2f}",
        "peak of resident memory": f"{peak / 2**20:,.0f} MiB of {MEMORY / 2**20:,.0f}",
    }
    result.require(
        then <= SLOWER * first,
        f"p95 of short questions is {milliseconds(then)} beside the mix, more than {SLOWER:g} "
        f"times their {milliseconds(first)} alone",
    )
    result.require(peak <= MEMORY, f"memory grew to {peak:,} bytes, {MEMORY:,} are allowed")

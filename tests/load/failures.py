"""An engine that fails in the middle of its work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
from campaign import Result
from load.client import PATH, Reply, ask, bodies, clients
from load.target import Target
from tqdm import tqdm

KINDS = ("step", "prefill")
AT_ONCE = 8


def failures(target: Target, points: int, seed: int = 0) -> Result:
    """Let the engine fail, in the steps and prefills of one question and of several at once."""
    return asyncio.run(_failures(target, points, seed))


async def _failures(target: Target, points: int, seed: int) -> Result:
    result, questions, chance = Result("failures"), bodies(target, seed), random.Random(seed)
    async with clients(target) as client:
        for number in tqdm(range(points), desc="failures", disable=None):
            kind, together = KINDS[number % 2], number // 2 % 2 == 1
            name = f"{kind}, {f'{AT_ONCE} questions' if together else '1 question'}"
            with result.case(name, f"failure {number}"):
                if together:
                    await _among_several(client, target, kind, questions, chance, result)
                else:
                    await _alone(client, target, kind, questions)
                after = await ask(client, next(questions))
                assert after.answered, f"the next request failed: {after.status} {after.error}"
    return result


async def _alone(
    client: httpx.AsyncClient, target: Target, kind: str, questions: Iterator[dict[str, Any]]
) -> None:
    """A question that is not streamed gets 503."""
    target.fail(kind)
    # Sampled, so that its first token does not end it: a step always comes.
    body = next(questions) | {"temperature": 2.0, "seed": 1, "stream": False}
    response = await client.post(PATH, json=body)
    assert response.status_code == 503, f"{response.status_code} instead of 503: {response.text}"
    assert response.headers.get("retry-after"), "a 503 came without Retry-After"
    error = response.json()["error"]
    assert error["code"] == "unavailable", f"the error says {error}"


async def _among_several(
    client: httpx.AsyncClient,
    target: Target,
    kind: str,
    questions: Iterator[dict[str, Any]],
    chance: random.Random,
    result: Result,
) -> None:
    """Each of several questions is answered, or told that the engine failed."""
    asking = [asyncio.create_task(ask(client, next(questions))) for _ in range(AT_ONCE)]
    await asyncio.sleep(chance.random())
    target.fail(kind)
    for reply in await asyncio.gather(*asking):
        assert reply.answered or _was_told(reply), f"{reply.status} {reply.error}"
        result.count("answered beside it" if reply.answered else "told of it")
    # The failure may still be to come, if all had been answered.
    await ask(client, next(questions) | {"temperature": 2.0, "seed": 1})


def _was_told(reply: Reply) -> bool:
    """Whether a reader got 503, or an error at the end of a stream."""
    said = reply.error or ""
    return reply.status == 503 or (reply.status == 200 and "the engine failed" in said)

"""Readers of a server: each asks a question and notes when the first and the last text came."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from campaign import Result
from load.target import BANK, Target

from sedem.demo import QUESTIONS

PATH = "/v1/chat/completions"
PATIENCE = 300.0
"""Seconds after which a silent server counts as stuck."""
MAX_TOKENS = 32
QUEUE_FULL, NO_RESPONSE = 429, 0


@dataclass(frozen=True)
class Reply:
    """What came of a question.

    Attributes:
        status: HTTP status; 0 if the connection failed.
        began: when the question was sent, as `time.perf_counter` has it.
        first: seconds until the first text, or until the end of an answer without text.
        error: what the server or the connection said, if the answer is not whole.
    """

    status: int
    began: float
    first: float
    seconds: float
    text: str = ""
    error: str | None = None
    retry_after: str | None = None

    @property
    def answered(self) -> bool:
        return self.status == 200 and self.error is None


def bodies(target: Target, seed: int) -> Iterator[dict[str, Any]]:
    """Questions without end: half are answered in a few words, half at more length by sampling."""
    chance = random.Random(seed)
    while True:
        body = {
            "model": f"{target.model}@{BANK}",
            "messages": [{"role": "user", "content": chance.choice(QUESTIONS)}],
            "stream": True,
            "max_tokens": MAX_TOKENS,
            "k": chance.choice((1, 2, 4)),
        }
        if chance.random() < 0.5:
            body |= {"temperature": 2.0, "seed": chance.randrange(2**31)}
        yield body


@asynccontextmanager
async def clients(target: Target) -> Any:
    """A client that holds as many connections as it is asked for."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.url, headers=target.headers, timeout=PATIENCE, limits=limits
    ) as client:
        yield client


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
    """Ask, and read the stream to its end."""
    began = time.perf_counter()
    try:
        async with client.stream("POST", PATH, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                seconds = time.perf_counter() - began
                said, retry = response.text[:500], response.headers.get("retry-after")
                return Reply(response.status_code, began, seconds, seconds, "", said, retry)
            first, text, ended, error = None, "", False, None
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if ended := line == "data: [DONE]":
                    continue
                data = json.loads(line[6:])
                if "error" in data:
                    error = str(data["error"])
                elif content := data["choices"] and data["choices"][0]["delta"].get("content"):
                    first, text = first or time.perf_counter(), text + content
            now = time.perf_counter()
            if error is None and not ended:
                error = "the stream ended without [DONE]"
            return Reply(200, began, (first or now) - began, now - began, text, error)
    except httpx.HTTPError as error:
        seconds = time.perf_counter() - began
        return Reply(NO_RESPONSE, began, seconds, seconds, error=f"{type(error).__name__}: {error}")


def judge(result: Result, replies: Sequence[Reply], told: str) -> None:
    """Require that each question was answered, or refused because the queue was full."""
    for reply in replies:
        fine = reply.answered or reply.status == QUEUE_FULL
        result.require(fine, f"{told}: {reply.status} {reply.error}")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies; 0 without any."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"

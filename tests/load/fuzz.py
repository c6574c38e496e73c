"""Requests that nobody should send: mutated ones, and those that schemathesis makes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import requests
import schemathesis

# Imported before a server runs beside: Python 3.11 cannot compile modules in two threads at once.
import schemathesis.specs.openapi.schemas
from campaign import Result
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from load.mutation import mutated
from load.target import Target
from load.wire import Shot, Wire
from schemathesis import GenerationMode

WORKERS = 4
BATCH = 500
"""After so many requests, what they made is removed, and the server is asked how it is."""
DESCRIBED = 10
"""One request in so many is made from the OpenAPI document, the others are mutated."""
HANG_SECONDS = 5.0


async def fuzz(target: Target, points: int, start: int) -> Result:
    """Send requests from the OpenAPI document, and mutations of them and of usual requests."""
    result, chance = Result("requests"), random.Random(start)
    document = target.get("/openapi.json").raise_for_status().json()
    described = Described(document, start)
    shots = (
        described.next() if number % DESCRIBED == 0 else mutated(chance, described.some)
        for number in range(points)
    )
    wires = [Wire(target.url, target.secret) for _ in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as executor:
        while batch := list(islice(shots, BATCH)):
            parts = [batch[worker::WORKERS] for worker in range(WORKERS)]
            outcomes = executor.map(lambda wire, part: [*map(wire.send, part)], wires, parts)
            for part, found in zip(parts, outcomes, strict=True):
                for shot, outcome in zip(part, found, strict=True):
                    result.cases[shot.kind] += 1
                    result.count(f"status {outcome.status or 'none'}")
                    told, seconds = f"{shot.kind}: {outcome} for {shot}", outcome.seconds
                    result.require(seconds <= HANG_SECONDS, f"it took {seconds:.1f} s; {told}")
                    fine = outcome.status < 500 or outcome.is_stated_503
                    result.require(fine, f"a failure; {told}")
                    result.require(bool(outcome.status) or shot.broken, f"no response; {told}")
            # Delete the banks that were created, so that lists stay short.
            for bank in target.get("/v1/banks").raise_for_status().json()["data"]:
                if not bank["read_only"]:
                    wires[0].send(Shot("tidy", "DELETE", f"/v1/banks/{bank['name']}".encode()))
            health = target.get("/health", with_key=False)
            result.require(health.status_code == 200, f"/health answers {health.status_code}")
    statuses = sorted(what for what in result.counts if what.startswith("status "))
    result.figures["statuses"] = ", ".join(
        f"{status.removeprefix('status ')} {result.counts.pop(status):,}" for status in statuses
    )
    return result


# Requests made from the OpenAPI document

EACH = 12
"""Cases of an operation that are made together."""
LEFT_OUT = {"host", "content-length", "connection", "user-agent", "x-schemathesis-testcaseid"}


class Described:
    """Makes requests of every operation in turn, as described and otherwise.

    Args:
        document: the OpenAPI document.
        start: the seed.

    Attributes:
        some: requests that were made, to be mutated.
    """

    def __init__(self, document: dict[str, Any], start: int) -> None:
        schema = schemathesis.openapi.from_dict(document)
        found = [one.ok() for one in schema.get_all_operations()]
        self._ways = [(one, mode) for mode in GenerationMode for one in found]
        self._round, self._seed = 0, start
        self._made: list[Shot] = []
        self.some: list[Shot] = []

    def next(self) -> Shot:
        """Return a request."""
        while not self._made:
            operation, mode = way = self._ways.pop(0)
            self._round += 1
            self._made = _cases(operation, mode, self._seed + self._round)
            # What can hardly be called otherwise than as described takes long to find.
            if len(self._made) == EACH:
                self._ways.append(way)
            self.some = [*self.some, *self._made][-50 * EACH :]
        return self._made.pop()


def _cases(operation: Any, mode: GenerationMode, number: int) -> list[Shot]:
    made: list[Shot] = []

    @seed(number)
    @settings(
        max_examples=EACH, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        made.append(_shot(case))

    # What has no parameters cannot be called otherwise than as described.
    with suppress(Unsatisfiable):
        collect()
    return made


def _shot(case: Any) -> Shot:
    arguments = case.as_transport_kwargs(base_url="http://host")
    prepared = requests.Request(**arguments).prepare()
    parts = urlsplit(prepared.url or "")
    query = f"?{parts.query}" if parts.query else ""
    body = prepared.body or b""
    body = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    headers = tuple(
        (_bytes(name), _bytes(value))
        for name, value in prepared.headers.items()
        if name.lower() not in LEFT_OUT
    )
    path = f"{parts.path}{query}".encode("utf-8", "surrogatepass")
    return Shot("described", prepared.method or "GET", path, headers, body)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")

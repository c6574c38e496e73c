"""Requests that nobody should send."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from campaign import Result
from load.described import Described
from load.mutation import mutated
from load.target import Target
from load.wire import Outcome, Shot, Wire
from tqdm import tqdm

WORKERS = 4
BATCH = 500
"""After so many requests, what they made is removed, and the server is asked how it is."""
DESCRIBED = 10
"""One request in so many is made from the OpenAPI document, the others are mutated."""
HANG_SECONDS = 5.0


def fuzz(target: Target, points: int, seed: int = 0) -> Result:
    """Send requests from the OpenAPI document, and mutations of them and of usual requests."""
    result = Result("requests")
    shots = _shots(target, points, seed)
    wires = [Wire(target.url, target.secret) for _ in range(WORKERS)]
    with (
        tqdm(total=points, desc="fuzz", disable=None) as bar,
        ThreadPoolExecutor(WORKERS) as executor,
    ):
        while batch := list(islice(shots, BATCH)):
            parts = [batch[worker::WORKERS] for worker in range(WORKERS)]
            for found in executor.map(_send_all, wires, parts):
                for shot, outcome in found:
                    _judge(result, shot, outcome)
                bar.update(len(found))
            _remove_all(target)
            health = target.get("/health", with_key=False)
            result.require(health.status_code == 200, f"/health answers {health.status_code}")
    result.figures["statuses"] = ", ".join(
        f"{status} {count:,}" for status, count in sorted(_statuses(result).items())
    )
    return result


def _shots(target: Target, points: int, seed: int) -> Iterator[Shot]:
    chance = random.Random(seed)
    document = target.get("/openapi.json").raise_for_status().json()
    described = Described(document, seed)
    for number in range(points):
        yield described.next() if number % DESCRIBED == 0 else mutated(chance, described.some)


def _send_all(wire: Wire, shots: list[Shot]) -> list[tuple[Shot, Outcome]]:
    return [(shot, wire.send(shot)) for shot in shots]


def _judge(result: Result, shot: Shot, outcome: Outcome) -> None:
    result.cases[shot.kind] += 1
    result.count(f"status {outcome.status or 'none'}")
    told = f"{shot.kind}: {outcome} for {shot}"
    result.require(outcome.seconds <= HANG_SECONDS, f"it took {outcome.seconds:.1f} s; {told}")
    result.require(outcome.status < 500 or outcome.is_stated_503, f"a failure; {told}")
    result.require(bool(outcome.status) or shot.broken, f"no response; {told}")


def _statuses(result: Result) -> Counter[str]:
    """Take the statuses out of what was counted."""
    marked = [what for what in result.counts if what.startswith("status ")]
    return Counter({what.removeprefix("status "): result.counts.pop(what) for what in marked})


def _remove_all(target: Target) -> None:
    """Delete the banks that fuzzed requests created, so that lists stay short."""
    wire = Wire(target.url, target.secret)
    for bank in target.get("/v1/banks").raise_for_status().json()["data"]:
        if not bank["read_only"]:
            wire.send(Shot("tidy", "DELETE", f"/v1/banks/{bank['name']}".encode()))

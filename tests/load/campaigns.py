"""The campaigns of load; a new one is a line here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign import Report, Result
from load.disconnects import disconnects
from load.failures import failures
from load.fuzz import fuzz
from load.mix import MEMORY, SLOWER, mix
from load.overload import overload
from load.streams import CLIENTS, streams
from load.target import Target, serving
from load.texts import MEMORY as TEXTS_MEMORY
from load.texts import texts

from sedem.demo import DOCUMENTS


@dataclass(frozen=True)
class LoadCampaign:
    """A kind of load.

    Attributes:
        load: sends a number of requests to a server, from a seed.
        points: requests of the bounded form.
        sample: requests among the default tests.
        meaning: what is shown, for the report.
    """

    load: Callable[[Target, int, int], Awaitable[Result]]
    points: int
    sample: int
    meaning: str
    flags: tuple[str, ...] = ()
    server: Mapping[str, Any] = field(default_factory=dict)

    def run(self, points: int, folder: Path, seed: int) -> Result:
        """Start a server, and put load on it."""
        with serving(folder, *self.flags, **self.server) as target:
            return self.put(target, points, seed)

    def put(self, target: Target, points: int, seed: int = 0) -> Result:
        """Put load on a server."""
        return asyncio.run(self.load(target, points, seed))


CAMPAIGNS = {
    "streams": LoadCampaign(
        streams,
        512,
        12,
        f"{CLIENTS} streams at once, in a queue that holds them all: each is answered, and p99 of "
        "the time to the first token is at most 5 times p50",
        ("--limit", f"waiting={CLIENTS}"),
    ),
    "streams, short queue": LoadCampaign(
        streams,
        512,
        12,
        f"The same {CLIENTS} readers and the default queue of 64: those that get 429 ask again "
        "after the time that it says, and no other error comes",
    ),
    "overload": LoadCampaign(
        overload,
        600,
        12,
        "Questions arrive at twice the rate that the server can answer: it answers at least 90 % "
        "of what it answers at best, and refuses the others within 100 ms (p99)",
    ),
    "disconnects": LoadCampaign(
        disconnects,
        400,
        24,
        "Readers that go away at random moments: no row stays taken, nothing stays in the queue, "
        "and memory stays within 2 % after the warm-up",
        ("--limit", "online_banks=4"),
    ),
    "mix": LoadCampaign(
        mix,
        120,
        6,
        "Short questions beside questions to every block, uploads and vanishing streams: p95 is "
        f"at most {SLOWER:g} times that alone, memory stays within `--memory`, no descriptor is "
        "left, and SIGTERM ends the server in time",
        ("--memory", f"{MEMORY}"),
        {"copies": 8},
    ),
    "texts": LoadCampaign(
        texts,
        100,
        4,
        "Each question brings a text of its own, 4 at once: each is answered, and memory stays "
        "within `--memory`, because texts that were read are dropped in time",
        ("--memory", f"{TEXTS_MEMORY}", "--limit", "online_banks=100000"),
    ),
    "failures": LoadCampaign(
        failures,
        40,
        4,
        "A step or a prefill of the engine fails: 503, or an error at the end of a stream that has "
        "begun, and the next request is answered",
        server={"failing": True},
    ),
    "fuzz": LoadCampaign(
        fuzz,
        20_000,
        150,
        "Requests made from the OpenAPI document and by mutation: no 500, none takes 5 s, the "
        "server answers /health afterwards",
        (
            "--limit", "max_tokens=4", "--limit", "max_online_characters=4000",
            "--limit", "max_body_bytes=65536", "--limit", "max_file_bytes=65536",
            "--limit", "online_banks=8",
        ),
        {"texts": (DOCUMENTS / "harbour-register.txt",)},
    ),
}  # fmt: skip
REPORT = Report(
    Path(__file__).with_name("report.json"),
    Path(__file__).parents[2] / "experiments" / "load.md",
    "load",
    CAMPAIGNS,
    ("torch", "fastapi", "uvicorn", "httpx", "schemathesis"),
    long=5,
)

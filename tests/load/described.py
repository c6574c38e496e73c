"""Requests that schemathesis makes from the OpenAPI document of the server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import requests
import schemathesis

# Imported before a server runs beside: Python 3.11 cannot compile modules in two threads at once.
import schemathesis.specs.openapi.schemas
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from load.wire import Shot
from schemathesis import GenerationMode

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

"""A server over a tiny random model, without a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import KEYS, SECRET, bearer

from sedem import SeDeM
from sedem_serve.server.app import create_app
from sedem_serve.server.library import Library
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.settings import ServerSettings

SECONDS = 240.0


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    """Settings with a folder of their own."""
    return ServerSettings(folder=tmp_path / "server")


@pytest.fixture
def make_client(settings: ServerSettings, model: SeDeM) -> Iterator[Callable[..., TestClient]]:
    """Return a function that starts a server with some settings changed; it ends with the test.

    The client sends the key that may do everything.
    """
    started: list[TestClient] = []

    def make(**changes: Any) -> TestClient:
        app = create_app(settings.with_changes(**changes), model, keys=KEYS)
        client = TestClient(app, headers=bearer(SECRET))
        client.__enter__()
        started.append(client)
        return client

    yield make
    for client in started:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    """A client of a server with the settings of the fixture."""
    return make_client()


@pytest.fixture
def app(client: TestClient) -> FastAPI:
    """The application behind `client`."""
    assert isinstance(client.app, FastAPI)
    return client.app


@pytest.fixture
def anonymous(app: FastAPI) -> TestClient:
    """A client of the same server without a key, which follows no redirect."""
    return TestClient(app, follow_redirects=False)


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def send(client: TestClient, bank: str, files: Mapping[str, str | bytes], **options: Any) -> Any:
    """Upload files, given by their names."""
    parts = [("file", file) for file in files.items()]
    return client.post(f"/v1/banks/{bank}/documents", files=parts, **options)


def read_all(client: TestClient, bank: str) -> dict[str, Any]:
    """Wait until all files of a bank were read; its progress then."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        progress: dict[str, Any] = client.get(f"/v1/banks/{bank}/progress").json()
        if progress["status"] != "building":
            return progress
        time.sleep(0.02)
    raise AssertionError(f"{bank} is still being read: {progress}")


def upload(library: Library, bank: str, texts: Mapping[str, str]) -> None:
    """What the route does with files, given by their names."""
    library.upload(bank, {name: BytesIO(text.encode()) for name, text in texts.items()})


def finish(library: Library) -> None:
    """Do all the work that there is."""
    for bank in library.uploads():
        bank.next_turn = 0.0
    while not library.turn():
        pass


@contextmanager
def opened(settings: ServerSettings, model: SeDeM) -> Iterator[Library]:
    """The banks of a server, and what reads into them when `finish` is called."""
    library = Library(settings, model, Metrics())
    try:
        yield library
    finally:
        library.close()

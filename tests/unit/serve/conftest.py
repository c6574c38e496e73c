"""A server over a tiny random model, without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import READER, SCOPED, SECRET, bearer

from sedem import SeDeM
from sedem.serve.app import create_app
from sedem.serve.keys import Key, KeyRing, digest_of
from sedem.serve.settings import Settings


@pytest.fixture
def keys() -> KeyRing:
    """The keys of the server."""
    return KeyRing(
        [
            Key("admin", digest_of(SECRET), write=True, metrics=True),
            Key("reader", digest_of(READER)),
            Key("scoped", digest_of(SCOPED), banks=("mine-*",), write=True),
        ]
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with a folder of their own."""
    return Settings(folder=tmp_path / "server")


@pytest.fixture
def make_client(
    settings: Settings, model: SeDeM, keys: KeyRing
) -> Iterator[Callable[..., TestClient]]:
    """Return a function that starts a server with some settings changed; it ends with the test.

    The client sends the key that may do everything.
    """
    started: list[TestClient] = []

    def make(**changes: Any) -> TestClient:
        app = create_app(settings.with_changes(**changes), model, keys=keys)
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
    """A client of the same server without a key."""
    return TestClient(app)

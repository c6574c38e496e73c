from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import KEYS, SECRET, bearer

from sedem import SeDeM
from sedem.errors import CheckpointError
from sedem.serve import service
from sedem.serve.app import create_app
from sedem.serve.settings import Settings


def test_a_server_that_shuts_down_lives_and_is_not_ready(app: FastAPI, client: TestClient) -> None:
    app.state.lifecycle.draining = True
    assert client.get("/health").is_success
    assert client.get("/metrics").is_success
    for response in (client.get("/ready"), client.get("/v1/banks")):
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert "shutting down" in response.json()["error"]["message"]


def test_a_server_is_not_ready_before_its_model_is_open(
    settings: Settings, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()

    def slow(settings: Settings) -> SeDeM:
        may_open.wait(30)
        return model

    monkeypatch.setattr(service, "open_model", slow)
    app = create_app(settings, keys=KEYS)
    with TestClient(app, headers=bearer(SECRET)) as client:
        assert client.get("/health").is_success
        for response in (client.get("/ready"), client.get("/v1/banks")):
            assert response.status_code == 503
            assert "opening its model" in response.json()["error"]["message"]
        assert client.get("/metrics").is_success
        may_open.set()

        async def opened() -> None:
            while app.state.lifecycle.service is None:
                await asyncio.sleep(0.01)

        assert client.portal is not None
        client.portal.call(opened)
        assert client.get("/ready").is_success


def test_a_server_whose_model_cannot_be_opened_says_so(settings: Settings, tmp_path: Path) -> None:
    failed = threading.Event()
    changed = settings.with_changes(model=str(tmp_path / "nothing"))
    app = create_app(changed, keys=KEYS, on_failure=failed.set)
    with TestClient(app):
        assert failed.wait(60)
    assert isinstance(app.state.lifecycle.failed, CheckpointError)


def test_neither_health_nor_a_refusal_waits_for_a_thread(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads read banks and files; when all of them are busy, these must go on."""

    async def no_thread(*args: object) -> None:
        raise AssertionError("a thread is needed")

    monkeypatch.setattr("fastapi.routing.run_in_threadpool", no_thread)
    monkeypatch.setattr("fastapi.dependencies.utils.run_in_threadpool", no_thread)
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 200
    scheduler = client.app.state.lifecycle.service.scheduler  # type: ignore[attr-defined]
    monkeypatch.setattr(scheduler, "limit", 0)
    body = {"model": "sedem@lease", "messages": [{"role": "user", "content": "What?"}]}
    assert client.post("/v1/chat/completions", json=body).status_code == 429
    assert client.get("/v1/models").status_code == 500  # the patch works

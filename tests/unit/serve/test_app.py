from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sedem import Document, MemoryBank, SeDeM

APP, OTHER = "https://app.example", "https://other.example"


def preflight(client: TestClient, origin: str) -> Any:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return client.options("/v1/chat/completions", headers=headers)


def test_without_asking_no_other_site_may_read(client: TestClient) -> None:
    response = client.get("/ready", headers={"Origin": APP})
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert "access-control-allow-origin" not in preflight(client, APP).headers


def test_an_origin_that_was_asked_for_may_call(make_client: Callable[..., TestClient]) -> None:
    client = make_client(cors=(APP,))
    allowed = preflight(client, APP)
    assert allowed.is_success
    assert allowed.headers["access-control-allow-origin"] == APP
    # Only with a key of its own: a browser never sends the cookie of the page along.
    assert "access-control-allow-credentials" not in allowed.headers
    assert client.get("/ready", headers={"Origin": APP}).headers[
        "access-control-allow-origin"
    ] == APP  # fmt: skip
    assert "access-control-allow-origin" not in preflight(client, OTHER).headers
    refused = client.get("/ready", headers={"Origin": APP, "Authorization": "Bearer no"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == APP


def test_a_request_that_no_route_takes(client: TestClient) -> None:
    for method, path, status, message in [
        ("GET", "/v1/nothing", 404, "there is no route GET /v1/nothing"),
        ("PUT", "/ready", 405, "method not allowed"),
    ]:
        response = client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"] == message
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_wrong_is_explained_and_not_repeated(client: TestClient) -> None:
    for content, param, words in [
        (b"{", None, "the body is not JSON"),
        (b"", None, "not valid"),
        (b"[]", None, "not valid"),
        (
            b'{"question": "new", "nonsense": "secret text"}',
            "nonsense",
            "'nonsense' is not a field",
        ),
        (b'{"question": 5}', "question", "'question' is not valid"),
    ]:
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/banks/any/scores", content=content, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert "secret text" not in response.text


def test_no_page_of_the_documentation_loads_scripts_from_elsewhere(client: TestClient) -> None:
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
    assert client.get("/openapi.json").json()["info"]["title"] == "sedem"


def test_an_engine_with_graphs_captures_them_before_the_first_question(
    make_client: Callable[..., TestClient],
    model: SeDeM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in (("short", "A note."), ("long", "A note. " * 200)):
        model.read([Document("note.txt", text)]).save(tmp_path / name)
    rehearsed: list[int] = []
    monkeypatch.setattr(model, "rehearse", lambda bank: rehearsed.append(len(bank)))
    banks = {"short": tmp_path / "short", "long": tmp_path / "long"}
    make_client(banks=banks)
    assert not rehearsed  # this engine captures nothing
    monkeypatch.setattr(model.engine, "ahead", True)
    make_client(banks=banks, folder=tmp_path / "other")
    assert rehearsed == [len(MemoryBank.open(tmp_path / "long"))]

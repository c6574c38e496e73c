"""The application from its start to its end: errors, origins, and what it says meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import KEYS, SECRET, bearer

from sedem import Document, MemoryBank, SeDeM
from sedem import errors as sedem_errors
from sedem.errors import (
    BankError,
    BankMismatchError,
    CheckpointError,
    ConfigError,
    DataError,
    QueueFullError,
    SedemError,
    UnavailableError,
    UnknownDocumentError,
)
from sedem_serve.server import service
from sedem_serve.server.app import create_app
from sedem_serve.server.errors import INTERNAL, ApiError, bank_not_found, to_api_error
from sedem_serve.server.settings import ServerSettings

APP, OTHER = "https://app.example", "https://other.example"


def preflight(client: TestClient, origin: str) -> Any:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return client.options("/v1/chat/completions", headers=headers)


def test_only_an_origin_that_was_asked_for_may_call(
    client: TestClient, make_client: Callable[..., TestClient], tmp_path: Path
) -> None:
    response = client.get("/ready", headers={"Origin": APP})
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert "access-control-allow-origin" not in preflight(client, APP).headers
    client = make_client(cors=(APP,), folder=tmp_path / "other")
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
    # No page of the documentation loads scripts from elsewhere.
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
    assert client.get("/openapi.json").json()["info"]["title"] == "sedem"


def test_a_body_that_is_wrong_is_explained_and_not_repeated(client: TestClient) -> None:
    unknown = b'{"question": "new", "nonsense": "secret text"}'
    for content, param, words in [
        (b"{", None, "the body is not JSON"),
        (b"", None, "not valid"),
        (b"[]", None, "not valid"),
        (unknown, "nonsense", "'nonsense' is not a field"),
        (b'{"question": 5}', "question", "'question' is not valid"),
    ]:
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/banks/any/scores", content=content, headers=headers)
        assert response.status_code == 400 and "secret text" not in response.text
        error = response.json()["error"]
        assert error["param"] == param and words in error["message"]


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


def test_a_server_is_not_ready_before_its_model_is_open(
    settings: ServerSettings, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()

    def slow(settings: ServerSettings) -> SeDeM:
        may_open.wait(30)
        return model

    monkeypatch.setattr(service, "open_model", slow)
    monkeypatch.setattr(service, "OPENING_SECONDS", 0.1)
    app = create_app(settings, keys=KEYS)
    with TestClient(app, headers=bearer(SECRET)) as client:
        assert client.get("/health").is_success
        for response in (client.get("/ready"), client.get("/v1/banks")):
            assert response.status_code == 503
            assert "opening its model" in response.json()["error"]["message"]
        assert client.get("/metrics").is_success
        # A request that comes too early waits.
        monkeypatch.setattr(service, "OPENING_SECONDS", 60.0)
        threading.Timer(0.5, may_open.set).start()
        assert client.get("/v1/banks").is_success
        assert client.get("/ready").is_success


def test_a_server_whose_model_cannot_be_opened_says_so(
    settings: ServerSettings, tmp_path: Path
) -> None:
    failed = threading.Event()
    changed = settings.with_changes(model=str(tmp_path / "nothing"))
    app = create_app(changed, keys=KEYS)
    app.state.on_failure = failed.set
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


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DataError("x"), 400, None),
        (ConfigError("x"), 400, None),
        (UnknownDocumentError("x"), 404, "document_not_found"),
        (BankMismatchError("x"), 409, "bank_mismatch"),
        (BankError("x"), 503, "unavailable"),
        (QueueFullError("x"), 429, "queue_full"),
        (UnavailableError("x"), 503, "unavailable"),
        (SedemError("x"), 500, "internal_error"),
        (RuntimeError("x"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_a_status(error: Exception, status: int, code: str | None) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert ("Retry-After" in answer.headers) is (status in (429, 503))
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}


def test_a_status_says_the_type_of_an_error_and_its_usual_code() -> None:
    types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    types |= dict.fromkeys((500, 503, 507), "server_error")
    codes = {401: "invalid_api_key", 403: "forbidden", 404: "not_found", 408: "slow"}
    codes |= {409: "conflict", 413: "too_large", 431: "too_large", 507: "insufficient_storage"}
    for status in (400, 405, 501, *types, *codes):
        error = ApiError(status, "x").body()["error"]
        assert error["type"] == types.get(status, "invalid_request_error")
        assert status in (429, 500, 503) or error["code"] == codes.get(status)


def test_nothing_of_an_unexpected_error_is_told() -> None:
    for kind in vars(sedem_errors).values():
        if isinstance(kind, type) and issubclass(kind, SedemError):
            assert 400 <= to_api_error(kind("x")).status < 600
    assert to_api_error(RuntimeError("/srv/secret/path")).message == INTERNAL
    # A path of the server stands in errors of banks.
    assert "/srv" not in to_api_error(BankError("'/srv/bank' is damaged")).message
    assert "/srv" not in to_api_error(BankMismatchError("'/srv/bank' was built by x")).message
    # What a client has sent can be quoted, whatever it is.
    assert len(bank_not_found("x" * 500).message) < 200
    body = ApiError(400, "there is no '\ud800'", param="\udfff").body()["error"]
    assert (body["message"], body["param"]) == (r"there is no '\ud800'", r"\udfff")

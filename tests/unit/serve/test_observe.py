from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from serving import SECRET

from sedem.serve.errors import INTERNAL
from sedem.serve.logs import FIELDS

QUESTION = "Who is the landlord of the flat in Mill Lane?"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that returns the fields of what was logged."""
    caplog.set_level(logging.INFO, "sedem.serve")
    return lambda: [getattr(record, FIELDS) for record in caplog.records]


def test_an_id_goes_through_unless_it_could_do_harm(
    client: TestClient, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    response = client.get("/v1/banks/none?token=1", headers={"X-Request-Id": "abc-1.2_3"})
    assert response.headers["X-Request-Id"] == "abc-1.2_3"
    line = lines()[-1]
    assert line.pop("ms") >= 0
    assert line == {
        "request_id": "abc-1.2_3",
        "method": "GET",
        "path": "/v1/banks/none",
        "status": 404,
        "key": "admin",
        "client": "testclient",
    }
    for given in ["", "a b", "a" * 65, "x\ty", "<b>", "id=1", "é"]:
        headers = {"X-Request-Id": given.encode("latin-1")}
        ids = {client.get("/ready", headers=headers).headers["X-Request-Id"] for _ in range(2)}  # type: ignore[arg-type]
        assert len(ids) == 2
        assert all(re.fullmatch(r"req-[0-9a-f]{16}", one) for one in ids)


def test_a_request_is_a_line_without_secrets_and_text(
    client: TestClient, anonymous: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    files = {"file": ("lease.txt", QUESTION.encode(), "text/plain")}
    client.post("/v1/banks/new/documents", files=files)
    body = {"model": "sedem@new", "messages": [{"role": "user", "content": QUESTION}]}
    client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
    client.post("/v1/chat/completions", json={**body, "nonsense": QUESTION})
    anonymous.get(f"/?key={SECRET}", headers={"Accept": "text/html"})
    anonymous.get("/ready", headers={"Authorization": "Bearer some-wrong-secret"})
    anonymous.post("/login", data={"key": SECRET}, headers={"Origin": "http://testserver"})
    anonymous.get("/ready", headers={"Cookie": f"sedem_key={SECRET}"})
    records = [str(vars(record)) for record in caplog.records if record.name.startswith("sedem")]
    assert len(records) >= 7
    for record in records:
        assert SECRET not in record and "some-wrong-secret" not in record
        assert "landlord" not in record


def test_an_error_of_a_route_is_an_answer_and_ends_a_stream_that_has_begun(
    app: FastAPI, client: TestClient, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    def fail() -> None:
        raise RuntimeError(QUESTION)

    async def pieces() -> Any:
        yield "begun"
        fail()

    app.add_api_route("/fail", fail)
    response = client.get("/fail")
    assert response.status_code == 500 and "X-Request-Id" in response.headers
    assert response.json()["error"]["message"] == INTERNAL

    app.add_api_route("/stream", lambda: StreamingResponse(pieces()))
    assert client.get("/stream").text == "begun"
    assert lines()[-1]["status"] == 200
    assert client.get("/ready").is_success


def test_routes_are_counted_by_their_pattern(client: TestClient) -> None:
    for name in ("one", "two", "three"):
        client.get(f"/v1/banks/{name}")
        client.get(f"/made/up/{name}")
    text = client.get("/metrics").text
    assert 'sedem_requests_total{route="/v1/banks/{bank}",status="404"} 3.0' in text
    assert 'sedem_requests_total{route="unknown",status="404"} 3.0' in text
    assert "one" not in re.findall(r'route="([^"]*)"', text)


def test_requests_that_work_are_counted_while_they_do(app: FastAPI, client: TestClient) -> None:
    seen: list[int] = []

    async def work() -> None:
        seen.append(app.state.lifecycle.in_flight)

    app.add_api_route("/work", work, methods=["POST"])
    app.add_api_route("/look", work, methods=["GET"])
    client.post("/work")
    client.get("/look")
    assert seen == [1, 0]
    assert app.state.lifecycle.in_flight == 0

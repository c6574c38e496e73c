from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sedem_serve.server.body_limit import FORM_BYTES, BodyLimit
from sedem_serve.server.errors import ApiError
from sedem_serve.server.metrics import Metrics

LIMIT = 1000


@pytest.fixture(autouse=True)
def lingers_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies without end are read for a moment."""
    monkeypatch.setattr("sedem_serve.server.body_limit.LINGER_SECONDS", 0.05)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client(max_body_bytes=LIMIT, max_file_bytes=2 * LIMIT)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused(announced: bool, client: TestClient) -> None:
    for path in ("/v1/banks/any/scores", "/v1/chat/completions", "/nothing"):
        content: Any = b"x" * (LIMIT + 1) if announced else iter([b"x"] * (LIMIT + 1))
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        if path == "/nothing" and not announced:
            assert response.status_code == 404  # nothing read the body
            continue
        assert response.status_code == 413
        assert response.json()["error"] == {
            "message": "the body of this request is too large; the limit is 1 kB",
            "type": "invalid_request_error",
            "param": None,
            "code": "too_large",
        }
        assert response.headers["Connection"] == "close"
    count = 3 if announced else 2
    assert f'sedem_refused_total{{reason="size"}} {count}.0' in client.get("/metrics").text


def test_a_body_of_the_limit_is_read_and_an_upload_may_be_larger(client: TestClient) -> None:
    body = b'{"question": "new"}'.ljust(LIMIT)
    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/banks/any/scores", content=body, headers=headers).status_code == 404

    def upload(size: int) -> int:
        files = {"file": ("a.txt", b"word " * (size // 5), "text/plain")}
        return client.post("/v1/banks/new/documents", files=files).status_code

    assert upload(2 * LIMIT) == 202
    assert upload(2 * LIMIT + FORM_BYTES) == 413
    assert client.get("/v1/banks/new/progress").json()["files"] == 1


# Without a server, for what a client library would not send


def limited(app: Any, receive: Any, *headers: tuple[bytes, bytes]) -> list[Any]:
    """What is sent when a body comes from `receive`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    limit = BodyLimit(app, Metrics(), body=LIMIT, upload=LIMIT)
    try:
        asyncio.run(limit(scope, receive, send))
    except ApiError as error:
        sent.append(error)
    return sent


async def without_end() -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return {"type": "http.request", "body": b"x" * 100, "more_body": True}


@pytest.mark.parametrize("length", ["-1", "1e9", "x", "9" * 40, "5000"])
def test_bytes_are_counted_whatever_was_announced(length: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        raise AssertionError("the body was read to its end")

    sent = limited(app, without_end, (b"content-length", length.encode()))
    assert sent[0]["status"] == 413 and not sent[-1].get("more_body")


def test_an_answer_that_has_begun_is_not_followed_by_a_second_one() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await receive()

    start, error = limited(app, without_end)
    assert start["status"] == 200 and "too large" in str(error)


@pytest.mark.parametrize("expects", [False, True])
def test_who_sends_all_of_a_large_body_still_reads_the_refusal(expects: bool) -> None:
    """Closed at once, the connection would be reset, and the response lost."""
    headers = [(b"content-length", b"5000")] + [(b"expect", b"100-continue")] * expects
    parts = iter([{"type": "http.request", "body": b"x", "more_body": more} for more in (1, 1, 0)])
    read = []

    async def receive() -> Any:
        read.append(next(parts))
        return read[-1]

    sent = limited(None, receive, *headers)
    assert sent[0]["status"] == 413 and sent[1]["body"] and not sent[-1].get("more_body")
    assert len(read) == (0 if expects else 3)

"""Streams of events: comments in a silence, errors before and within, clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from unit.server.conftest import in_a_loop

from sedem.answering.running import failure
from sedem.errors import BankError, CancelledError, DataError, UnavailableError
from sedem_serve.server import events
from sedem_serve.server.errors import ApiError
from sedem_serve.server.events import COMMENT, DONE, Events, cancel_on_disconnect, event, stream


class Connection:
    """A client that has sent its request, and may go away."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.scope = {"type": "http", "method": "POST", "path": "/", "headers": []}

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def request(self) -> Request:
        return Request(self.scope, self.receive)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def read(self, source: Events) -> None:
        response = await stream(self.request, source)
        await response(self.scope, self.receive, self.send)  # type: ignore[arg-type]


@in_a_loop
async def test_events_are_sent_and_a_silence_is_bridged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.05)

    async def source() -> AsyncGenerator[bytes, None]:
        yield event({"n": "a\n\nb é"}, "said")
        await asyncio.sleep(0.12)
        yield event({"n": 2})
        yield DONE

    connection = Connection()
    await connection.read(source())
    assert connection.sent[0]["status"] == 200
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    first = b'event: said\ndata: {"n":"a\\n\\nb \xc3\xa9"}\n\n'
    expected = first + COMMENT * 2 + event({"n": 2}) + DONE
    assert connection.body == expected
    assert connection.sent[-1] == {
        "type": "http.response.body", "body": b"", "more_body": False,
    }  # fmt: skip


@in_a_loop
async def test_an_error_before_the_first_event_is_raised_and_a_later_one_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def source(before: bool) -> AsyncGenerator[bytes, None]:
        if before:
            await asyncio.sleep(0.02)
            raise DataError("the question is empty")
        yield event({"n": 1})
        raise RuntimeError("secret")

    with pytest.raises(DataError):
        await Connection().read(source(before=True))
    connection = Connection()
    await connection.read(source(before=False))
    _, error, done, _ = connection.body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert done == b"data: [DONE]" and b"secret" not in connection.body
    # A slow first event does not hold the response.
    monkeypatch.setattr(events, "PATIENCE_SECONDS", 0.0)
    connection = Connection()
    await connection.read(source(before=True))
    assert connection.sent[0]["status"] == 200
    assert b"the question is empty" in connection.body


CLOSED = "the scheduler was closed before it had the answer"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnavailableError(CLOSED), CLOSED),
        (CancelledError("nobody waits"), None),
        (BankError("page 3 of /srv/a.bank is damaged"), "cannot read the bank"),
        (failure(RuntimeError("secret")), None),
        (RuntimeError("secret"), None),
    ],
    ids=["closing", "cancelled", "damaged", "failed", "unexpected"],
)
def test_what_says_everything_is_one_line_of_the_log_without_a_traceback(
    error: Exception,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        yield event({"n": 1})
        raise error

    monkeypatch.setattr(logging.getLogger("sedem_serve.server"), "propagate", True)
    asyncio.run(Connection().read(source()))
    [line] = [record for record in caplog.records if record.getMessage() == "failed"]
    assert bool(line.exc_info) == (reason is None)
    assert reason is None or line.fields["reason"].startswith(reason)


@pytest.mark.parametrize("kind", ["begun", "not begun", "not streamed"])
@in_a_loop
async def test_a_client_that_goes_away_cancels_at_once(kind: str) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def source() -> AsyncGenerator[bytes, None]:
        if kind == "begun":
            yield event({"n": 1})
        await work()
        yield b""

    connection = Connection()
    assert await cancel_on_disconnect(connection.request, asyncio.sleep(0, 7)) == 7
    if kind == "not streamed":
        task = asyncio.create_task(cancel_on_disconnect(connection.request, work()))
    else:
        task = asyncio.create_task(connection.read(source()))
    await asyncio.sleep(0.02)
    connection.gone.set()
    if kind == "begun":
        await asyncio.wait_for(task, 1)
    else:
        with pytest.raises(ApiError) as gone:
            await asyncio.wait_for(task, 1)
        assert gone.value.status == 499
    assert ended == ["cancelled"]

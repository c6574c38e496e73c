"""Streams of events: comments in a silence, errors before and within, clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from sedem.errors import DataError
from sedem.serve import events
from sedem.serve.errors import ApiError
from sedem.serve.events import COMMENT, DONE, Events, cancel_on_disconnect, event, stream


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


def test_an_event_is_one_line_of_json() -> None:
    sent = event({"text": "a\n\nb é"}, "said").decode()
    head, line, *rest = sent.split("\n")
    assert (head, rest) == ("event: said", ["", ""])
    assert json.loads(line.removeprefix("data: ")) == {"text": "a\n\nb é"}


def test_events_are_sent_and_a_silence_is_bridged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.05)

    async def source() -> AsyncGenerator[bytes, None]:
        yield event({"n": 1})
        await asyncio.sleep(0.12)
        yield event({"n": 2})
        yield DONE

    async def read() -> None:
        connection = Connection()
        await connection.read(source())
        assert connection.sent[0]["status"] == 200
        headers = dict(connection.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"content-length" not in headers
        expected = event({"n": 1}) + COMMENT * 2 + event({"n": 2}) + DONE
        assert connection.body == expected
        assert connection.sent[-1] == {
            "type": "http.response.body", "body": b"", "more_body": False,
        }  # fmt: skip

    asyncio.run(read())


def test_an_error_before_the_first_event_is_raised_and_a_later_one_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def source(before: bool) -> AsyncGenerator[bytes, None]:
        if before:
            raise DataError("the question is empty")
        yield event({"n": 1})
        raise RuntimeError("secret")

    async def read() -> None:
        with pytest.raises(DataError):
            await Connection().read(source(before=True))
        connection = Connection()
        await connection.read(source(before=False))
        _, error, done, _ = connection.body.split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
        assert done == b"data: [DONE]" and b"secret" not in connection.body

    asyncio.run(read())


def test_a_slow_first_event_does_not_hold_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PATIENCE_SECONDS", 0.02)

    async def source() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        raise DataError("the question is empty")
        yield b""

    async def read() -> None:
        connection = Connection()
        await connection.read(source())
        assert connection.sent[0]["status"] == 200
        assert b"the question is empty" in connection.body

    asyncio.run(read())


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_goes_away_cancels_at_once(begun: bool) -> None:
    ended: list[str] = []

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            if begun:
                yield event({"n": 1})
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")
        yield b""

    async def read() -> None:
        connection = Connection()
        task = asyncio.create_task(connection.read(source()))
        await asyncio.sleep(0.02)
        connection.gone.set()
        if begun:
            await asyncio.wait_for(task, 1)
        else:
            with pytest.raises(ApiError, match="went away"):
                await asyncio.wait_for(task, 1)
        assert ended == ["cancelled"]

    asyncio.run(read())


def test_waiting_ends_when_the_client_goes_away() -> None:
    ended: list[str] = []

    async def work() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")
        return 1

    async def value() -> int:
        return 7

    async def read() -> None:
        connection = Connection()
        assert await cancel_on_disconnect(connection.request, value()) == 7
        connection.gone.set()
        with pytest.raises(ApiError) as gone:
            await cancel_on_disconnect(connection.request, work())
        assert gone.value.status == 499
        assert ended == ["cancelled"] or ended == []

    asyncio.run(read())

"""Streams of server-sent events, and clients that disconnect.

The server notices a disconnect while it waits for the engine or for the next token, and cancels the
client's request at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sedem.serve.errors import ApiError, to_api_error
from sedem.serve.logs import log

Value = TypeVar("Value")

KEEP_ALIVE_SECONDS = 10.0
"""Silence after which a comment is sent, so that no proxy takes the connection for dead."""
PATIENCE_SECONDS = 5.0
"""How long to wait for the first event before the response begins: an error until then has its own
status."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
CLIENT_GONE = 499

Events = AsyncGenerator[bytes, None]


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return the bytes of one event.

    Args:
        data: its JSON.
        name: its type, if it has one.
    """
    head = f"event: {name}\n" if name else ""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {body}\n\n".encode()


async def unless_gone(request: Request, awaited: Awaitable[Value]) -> Value:
    """Wait for something, but cancel it when the client disconnects.

    Args:
        request: the request, read to its end.
        awaited: what to wait for.

    Raises:
        ApiError: the client disconnected and will not see the error.
    """
    work = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ApiError(CLIENT_GONE, "the client went away", code="client_gone")
    finally:
        await _stop(work, gone)


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: the bytes of each event; closed at the end, or when the client disconnects.
        first: the first event, which is already awaited.
        end: bytes that end the stream after an error.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, first: asyncio.Future[bytes], end: bytes = DONE) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        # The length is not known.
        self.raw_headers = [one for one in self.raw_headers if one[0] != b"content-length"]
        self._events, self._first, self._end = events, first, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more or the client disconnects."""
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stop(sending, gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(part: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": more})

        following: asyncio.Future[bytes] = self._first
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=KEEP_ALIVE_SECONDS)
                if not done:
                    await write(COMMENT)
                    continue
                try:
                    part = following.result()
                except StopAsyncIteration:
                    break
                await write(part)
                following = asyncio.ensure_future(anext(self._events))
        except OSError:
            return  # the client disconnected
        except Exception as error:
            told = to_api_error(error)
            if told.status >= CLIENT_GONE + 1:
                log("failed", logging.ERROR, error=True)
            await write(event(told.body()) + self._end)
        finally:
            await _stop(following)
            await self._events.aclose()
        await write(b"", more=False)


async def stream(request: Request, events: Events, end: bytes = DONE) -> Response:
    """Respond with events; an error that comes soon, before the first event, is raised.

    Args:
        request: the request, read to its end.
        events: the bytes of each event.
        end: bytes that end the stream after an error.

    Raises:
        Exception: what `events` raised.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_gone(request, asyncio.wait((first,), timeout=PATIENCE_SECONDS))
        if first.done():
            first.result()
    except BaseException:
        await _stop(first)
        await events.aclose()
        raise
    return EventStream(events, first, end)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks that are not done, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task

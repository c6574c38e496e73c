"""Streams of server-sent events, and clients that disconnect.

The server notices a disconnect while it waits for the engine or for the next token, and immediately
cancels the client's request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sedem_serve.server.errors import CLIENT_GONE, client_gone, to_api_error
from sedem_serve.server.logs import log

Value = TypeVar("Value")

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_SECONDS = 10.0
"""Silence after which a comment is sent, so that no proxy takes the connection for dead."""
PATIENCE_SECONDS = 5.0
"""How long to wait for the first event before the response begins: an error until then has its own
status."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

Events = AsyncGenerator[bytes, None]


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return the bytes of one event."""
    head = f"event: {name}\n" if name else ""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {body}\n\n".encode()


async def cancel_on_disconnect(request: Request, awaited: Awaitable[Value]) -> Value:
    """Wait for something, but cancel it when the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(awaited), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise client_gone()
    finally:
        await _stop(work, gone)


async def stream(request: Request, events: Events, end: bytes = DONE) -> Response:
    """Respond with events; an error that comes soon, before the first event, is raised.

    Args:
        request: the request, read to its end.
        events: the bytes of each event; closed at the end, or when the client disconnects.
        end: bytes that end the stream after an error.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await cancel_on_disconnect(request, asyncio.wait((first,), timeout=PATIENCE_SECONDS))
        if first.done():
            first.result()
    except BaseException:
        await _stop(first)
        await events.aclose()
        raise
    return _EventStream(_body(events, first, end))


class _EventStream(StreamingResponse):
    """Closes its events when the client disconnects."""

    def __init__(self, body: Events) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(body, headers=headers, media_type=MEDIA_TYPE)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()


async def _body(events: Events, following: asyncio.Future[bytes], end: bytes) -> Events:
    """Yield events, comments in long silences, and an error that ends the stream."""
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield COMMENT
                continue
            try:
                part = following.result()
            except StopAsyncIteration:
                return
            yield part
            following = asyncio.ensure_future(anext(events))
    except Exception as error:
        told = to_api_error(error)
        if told.status > CLIENT_GONE:
            # What is told to the client says everything, unless something failed inside.
            unexpected = told.status == 500 or error.__cause__ is not None
            reason = None if unexpected else told.message
            log("failed", logging.ERROR, error=unexpected, reason=reason)
        yield event(told.body()) + end
    finally:
        await _stop(following)
        await events.aclose()


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks that are not done, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task

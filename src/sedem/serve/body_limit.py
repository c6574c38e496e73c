"""Refuse bodies over a limit before they are in memory: bytes are counted as they arrive."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sedem.durable_files import bytes_text
from sedem.serve.errors import ApiError, too_large
from sedem.serve.metrics import Metrics

UPLOADS = "multipart/form-data"
FORM_BYTES = 2**16
"""Bytes that the form around the files of an upload may take."""
LINGER_SECONDS = 5.0
"""How long the rest of a refused body is read and discarded."""


class BodyLimit:
    """Answers 413 to a body that is too large, whether or not its length was announced.

    Args:
        app: the inner application.
        metrics: counts refused requests.
        body: maximum bytes of a body that is not an upload.
        upload: maximum bytes of an upload.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, *, body: int, upload: int) -> None:
        self.app, self.metrics = app, metrics
        self.body, self.upload = body, upload + FORM_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; reading its body beyond the limit raises an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        upload = headers.get("content-type", "").lower().startswith(UPLOADS)
        limit = self.upload if upload else self.body
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            # A client that expects 100 Continue has sent no body yet, and will not.
            rest = None if "expect" in headers else receive
            await self._refuse(limit, scope, rest, send)
            return
        limited = _Limited(limit, receive, send)
        try:
            await self.app(scope, limited.receive, limited.send)
        except ApiError as error:
            if not limited.over or limited.answered or error.status != 413:
                raise
        if limited.over and not limited.answered:
            await self._refuse(limit, scope, receive if limited.more else None, send)

    async def _refuse(self, limit: int, scope: Scope, rest: Receive | None, send: Send) -> None:
        self.metrics.refused("size")
        # The rest of the body may stay unread, so the connection cannot be reused.
        response = JSONResponse(_error(limit).body(), 413, {"Connection": "close"})

        async def send_and_linger(message: Message) -> None:
            if rest is not None and message["type"] == "http.response.body":
                await send({**message, "more_body": True})
                await _discard(rest)
                message = {"type": "http.response.body"}
            await send(message)

        await response(scope, _nothing, send_and_linger)


class _Limited:
    """The two channels of a request, with a count of the bytes of its body.

    Over the limit, the inner application may not answer: it saw only a part of the body.

    Attributes:
        over: whether the body is too large.
        answered: whether a response has begun.
        more: whether more of the body was to come after the last part received.
    """

    def __init__(self, limit: int, receive: Receive, send: Send) -> None:
        self.limit, self.received = limit, 0
        self.over = self.answered = self.more = False
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        self.more = message.get("more_body", False)
        if self.received > self.limit:
            self.over = True
            raise _error(self.limit)
        return message

    async def send(self, message: Message) -> None:
        if self.over and not self.answered:
            return
        self.answered = True
        await self._send(message)


def _error(limit: int) -> ApiError:
    return too_large(f"the body of this request is too large; the limit is {bytes_text(limit)}")


async def _nothing() -> Message:
    raise AssertionError("a refusal reads nothing")


async def _discard(receive: Receive) -> None:
    """Read the rest of a body for a while, so that its sender gets the response.

    A connection that is closed while bytes arrive is reset, and the response is lost.
    """
    until = time.monotonic() + LINGER_SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            # The clock is checked too: a body that has already arrived never lets the timeout fire.
            while (await receive()).get("more_body", False) and time.monotonic() < until:
                pass

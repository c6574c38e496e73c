"""Reject bodies that are too large, too slow or of too many values, before they are parsed.

Bytes and values are counted as they arrive: a few bytes of JSON can become a hundred times as many
in memory, and the rest of a rejected body should cost nothing.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sedem.durable_files import bytes_text
from sedem.untrusted import BODY_RATE, BODY_VALUES, HEAD_SECONDS
from sedem_serve.server.errors import ApiError, bad_request, too_large, too_slow
from sedem_serve.server.metrics import Metrics

UPLOADS = "multipart/form-data"
FORM_BYTES = 2**16
"""Bytes that the form around the files of an upload may take."""
LINGER_SECONDS = 5.0
"""How long the rest of a rejected body is read and discarded."""

SLOW = too_slow().status
"""Status of a body that does not arrive in time."""


def in_time(receive: Receive) -> Receive:
    """Return a channel that raises 408 if a body takes too long to arrive."""
    started, received, more = time.monotonic(), 0, True

    async def timed() -> Message:
        nonlocal received, more
        if not more:
            return await receive()
        left = started + HEAD_SECONDS + received / BODY_RATE - time.monotonic()
        try:
            # What has arrived already is received without waiting.
            async with asyncio.timeout(left):
                message = await receive()
        except TimeoutError:
            raise too_slow() from None
        received += len(message.get("body", b""))
        more = message.get("more_body", False)
        return message

    return timed


class BodyLimit:
    """Answers 413 to a body that is too large, whether or not its length was announced.

    Args:
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
        most = bytes_text(limit)
        error = too_large(f"the body of this request is too large; the limit is {most}")
        received, more, over, answered = 0, True, False, False

        async def counted() -> Message:
            nonlocal received, more
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            if received > limit:
                raise error
            return message

        source = counted if upload else _whole(counted)

        async def noted() -> Message:
            nonlocal over, error
            try:
                return await source()
            except ApiError as raised:
                over, error = True, raised
                raise

        async def guarded(message: Message) -> None:
            # Over a limit, the application may not answer: it saw only a part of the body.
            nonlocal answered
            if answered or not over:
                answered = True
                await send(message)

        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            # A client that expects 100 Continue has sent no body yet, and will not.
            over, more = True, "expect" not in headers
        else:
            try:
                await self.app(scope, noted, guarded)
            except ApiError as raised:
                if raised is not error or answered:
                    raise
        if over and not answered:
            slow = error.status == SLOW
            self.metrics.refused.labels("time" if slow else "size").inc()
            await self._reject(error, scope, receive if more and not slow else None, send)

    async def _reject(
        self, error: ApiError, scope: Scope, rest: Receive | None, send: Send
    ) -> None:
        # The rest of the body may stay unread, so the connection cannot be reused.
        error.headers["Connection"] = "close"

        async def send_and_linger(message: Message) -> None:
            if rest is not None and message["type"] == "http.response.body":
                await send({**message, "more_body": True})
                await _discard(rest)
                message = {"type": "http.response.body"}
            await send(message)

        await error.response()(scope, _nothing, send_and_linger)


def _whole(receive: Receive) -> Receive:
    """Return a channel that gives a body at once, and raises 400 if it has too many values."""
    more = True

    async def whole() -> Message:
        nonlocal more
        if not more:
            return await receive()
        body, values = bytearray(), Values()
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            piece = message.get("body", b"")
            body += piece
            values.add(piece)
            if values.most > BODY_VALUES:
                raise bad_request(
                    f"the body of this request has too many values, at most {BODY_VALUES:,} are "
                    "read; send fewer messages and fields",
                    code="too_many_values",
                )
            more = message.get("more_body", False)
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return whole


class Values:
    """Counts the values that JSON may have, piece by piece.

    Attributes:
        most: commas and opening brackets so far, outside of strings.
    """

    def __init__(self) -> None:
        self.most = 0
        self._in_string, self._left = False, b""

    def add(self, piece: bytes) -> None:
        """Count those of another piece."""
        # Without escaped characters, every quote begins or ends a string.
        plain = (self._left + piece).replace(b"\\\\", b"")
        # This one escapes the first character of the next piece.
        self._left = b"\\" if plain.endswith(b"\\") else b""
        plain = plain.removesuffix(b"\\").replace(b'\\"', b"")
        parts = plain.split(b'"')
        between = b"".join(parts[self._in_string :: 2])
        self.most += sum(map(between.count, (b",", b"{", b"[")))
        self._in_string ^= len(parts) % 2 == 0


async def _nothing() -> Message:
    raise AssertionError("a rejection reads nothing")


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

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
from sedem_serve.server.errors import ApiError, bad_request
from sedem_serve.server.metrics import Metrics

UPLOADS = "multipart/form-data"
FORM_BYTES = 2**16
"""Bytes that the form around the files of an upload may take."""
LINGER_SECONDS = 5.0
"""How long the rest of a rejected body is read and discarded."""


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
            told = "the body of this request arrives too slowly; send it again"
            raise ApiError(408, told) from None
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
        """Pass a request on; reading its body beyond a limit raises an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        upload = headers.get("content-type", "").lower().startswith(UPLOADS)
        limit = self.upload if upload else self.body
        most = bytes_text(limit)
        over = ApiError(413, f"the body of this request is too large; the limit is {most}")
        received, more, answered = 0, True, False
        refusal: ApiError | None = None

        async def read() -> Message:
            """Receive a piece of an upload, or the whole of another body."""
            nonlocal received, more, refusal
            body, values = bytearray(), Values()
            try:
                while True:
                    ended, message = not more, await receive()
                    piece = message.get("body", b"")
                    received += len(piece)
                    more = message.get("more_body", False)
                    if received > limit:
                        raise over
                    if upload or ended or message["type"] != "http.request":
                        return message
                    body += piece
                    values.add(piece)
                    if values.most > BODY_VALUES:
                        raise bad_request(
                            f"the body of this request has too many values, at most "
                            f"{BODY_VALUES:,} are read; send fewer messages and fields",
                            code="too_many_values",
                        )
                    if not more:
                        return {"type": "http.request", "body": bytes(body), "more_body": False}
            except ApiError as raised:
                refusal = raised
                raise

        async def answer(message: Message) -> None:
            # Over a limit, the application may not answer: it saw only a part of the body.
            nonlocal answered
            if answered or refusal is None:
                answered = True
                await send(message)

        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            # A client that expects 100 Continue has sent no body yet, and will not.
            refusal, more = over, "expect" not in headers
        else:
            try:
                await self.app(scope, read, answer)
            except ApiError as raised:
                if raised is not refusal or answered:
                    raise
        if refusal is not None and not answered:
            slow = refusal.status == 408
            self.metrics.refused.labels("time" if slow else "size").inc()
            await _refuse(refusal, scope, receive, send, linger=more and not slow)


async def _refuse(
    error: ApiError, scope: Scope, receive: Receive, send: Send, *, linger: bool
) -> None:
    """Send an error, and read the rest of the body for a while, so that its sender gets it.

    A connection that is closed while bytes arrive is reset, and the response is lost.
    """
    # The rest of the body may stay unread, so the connection cannot be reused.
    error.headers["Connection"] = "close"

    async def send_and_linger(message: Message) -> None:
        if linger and message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            until = time.monotonic() + LINGER_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    # A body that has already arrived never lets the timeout fire.
                    while (await receive()).get("more_body", False) and time.monotonic() < until:
                        pass
            message = {"type": "http.response.body"}
        await send(message)

    await error.response()(scope, receive, send_and_linger)


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

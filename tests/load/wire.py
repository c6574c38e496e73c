"""Requests as bytes: what a client library would refuse to send."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from urllib.parse import urlsplit

SECONDS = 20.0
SHOWN = 1500
"""Bytes of a request that are shown when it went wrong."""


@dataclass(frozen=True)
class Shot:
    """A request.

    Attributes:
        kind: how it was made.
        target: path and query, as sent.
        headers: besides Host, key and length; a name that is here already replaces those.
        broken: whether the request is no whole HTTP request, so that no response need come.
    """

    kind: str
    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    broken: bool = False

    def encoded(self, host: bytes, secret: str) -> bytes:
        """What is sent."""
        usual = {
            b"Host": host,
            b"Authorization": f"Bearer {secret}".encode(),
            b"Content-Length": b"%d" % len(self.body),
        }
        given = {name.lower() for name, _ in self.headers}
        if b"transfer-encoding" in given:
            del usual[b"Content-Length"]
        lines = [f"{self.method} ".encode("utf-8", "surrogatepass") + self.target + b" HTTP/1.1"]
        lines += [b"%b: %b" % pair for pair in usual.items() if pair[0].lower() not in given]
        lines += [b"%b: %b" % pair for pair in self.headers]
        return b"\r\n".join([*lines, b"", self.body])

    def __str__(self) -> str:
        sent = self.encoded(b"HOST", "KEY")
        return f"{sent[:SHOWN]!r}{f' ... ({len(sent):,} bytes)' if len(sent) > SHOWN else ''}"


@dataclass(frozen=True)
class Outcome:
    """What came back: the status, 0 if none came, and the beginning of the body."""

    status: int
    seconds: float
    body: bytes = b""
    retry: str | None = None
    error: str = ""

    @property
    def is_stated_503(self) -> bool:
        """Whether the server says, in its own words, that it cannot answer now."""
        try:
            said = json.loads(self.body)["error"]["code"]
        except (ValueError, LookupError, TypeError):
            return False
        return self.status == 503 and said == "unavailable" and self.retry is not None

    def __str__(self) -> str:
        return f"{self.status or self.error} {self.body[:300]!r}"


class Wire:
    """A connection that is made anew when it was closed."""

    def __init__(self, url: str, secret: str) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname or "", parts.port or 80
        self.host, self.secret = parts.netloc.encode(), secret
        self._socket: socket.socket | None = None

    def send(self, shot: Shot) -> Outcome:
        """Send a request and read the response."""
        began, fresh = time.perf_counter(), self._socket is None
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self.address, SECONDS)
            self._socket.sendall(shot.encoded(self.host, self.secret))
            if shot.broken:
                # Nothing more comes: the server need not wait for the rest.
                self._socket.shutdown(socket.SHUT_WR)
            with HTTPResponse(self._socket, method=shot.method) as response:
                response.begin()
                body, retry = response.read(), response.headers.get("Retry-After")
                closed = response.will_close or shot.broken
        except (OSError, HTTPException) as error:
            self._close()
            if not fresh and not isinstance(error, TimeoutError):
                return self.send(shot)  # the server had closed the connection meanwhile
            seconds, told = time.perf_counter() - began, f"{type(error).__name__}: {error}"
            return Outcome(0, seconds, error=told)
        if closed:
            self._close()
        return Outcome(response.status, time.perf_counter() - began, body[:2000], retry)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

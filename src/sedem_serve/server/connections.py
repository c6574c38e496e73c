"""Connections whose requests must arrive in time.

uvicorn's parser in C has no limit of headers, so this is its parser in Python, which limits a head
by `h11_max_incomplete_event_size`. A connection that waits for the rest of a request holds a
descriptor. There are fewer connections than descriptors, and a new one takes the place of the
oldest one that waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sedem.untrusted import HEAD_SECONDS
from sedem_serve.server.errors import ApiError, head_too_large


class Connection(H11Protocol):
    """uvicorn's connection, with limits.

    Args:
        most: maximum number of open connections.
        options: arguments of uvicorn.
    """

    def __init__(self, *, most: int, **options: Any) -> None:
        super().__init__(**options)
        self.most, self.since = most, self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the place of a connection that waits if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            open_ = [one for one in self.connections if isinstance(one, Connection)]
            waiting = [one for one in open_ if one.is_waiting() and not one.transport.is_closing()]
            min(waiting, key=lambda one: one.since).transport.abort()
        self._limit_time(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._limit_time(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle bytes; a head must be complete in time, and so must a body after its response."""
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        self._limit_time(answered or self.conn.their_state is h11.IDLE)

    def is_waiting(self) -> bool:
        """Whether the client has to send more before it gets anything."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def send_400_response(self, msg: str) -> None:
        """Reject a request that is not HTTP, or whose head is too large."""
        problem = sys.exc_info()[1]
        too_large = head_too_large()
        status = getattr(problem, "error_status_hint", 400)
        error = too_large if status == too_large.status else ApiError(status, msg)
        body = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        head = h11.Response(
            status_code=status,
            headers=[*headers, ("connection", "close")],
            reason=HTTPStatus(status).phrase.encode(),
        )
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _limit_time(self, limited: bool) -> None:
        """Start the time limit if it is not running, or end it."""
        if limited and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not limited and self._timer is not None:
            self._timer.cancel()
            self._timer = None

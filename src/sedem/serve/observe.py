"""The outermost middleware: an id, a log line, a count and a span for each request.

It also turns unexpected errors of routes into responses, so that none breaks a connection.
"""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sedem.errors import cut
from sedem.serve.errors import CLIENT_GONE, to_api_error
from sedem.serve.logs import log
from sedem.serve.metrics import Metrics
from sedem.serve.service import Lifecycle
from sedem.serve.telemetry import Tracer

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Request ids that are accepted from a client; any other is replaced."""
SECURITY = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
UNKNOWN = "unknown"
"""The label of a path without a route; a client must not be able to create new labels."""
REFUSALS = {429: "queue", 503: "unavailable"}
"""Statuses of requests that the server could not serve, and the labels that count them."""


class Observe:
    """Watches requests."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, lifecycle: Lifecycle, tracer: Tracer
    ) -> None:
        self.app, self.metrics, self.lifecycle, self.tracer = app, metrics, lifecycle, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request and report the result."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id
        watched = _Watched(send, request_id)
        working = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        began = time.perf_counter()
        self.lifecycle.in_flight += working
        try:
            with self.tracer.request(scope, request_id) as end_span:
                await self._serve(scope, receive, watched)
                end_span(_route(scope), watched.status)
        finally:
            self.lifecycle.in_flight -= working
            self._report(scope, watched.status, request_id, time.perf_counter() - began)

    async def _serve(self, scope: Scope, receive: Receive, watched: _Watched) -> None:
        try:
            await self.app(scope, receive, watched.send)
        except Exception as error:
            answer = to_api_error(error)
            if reason := REFUSALS.get(answer.status):
                self.metrics.refused.labels(reason).inc()
            elif answer.status >= 500:
                known = answer is error  # such as a full disk; its message says everything
                reason = answer.message if known else None
                request_id = watched.request_id
                log("failed", logging.ERROR, error=not known, request_id=request_id, reason=reason)
            if not watched.started:
                await answer.response()(scope, receive, watched.send)

    def _report(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        # The path of the route, never the values of its parameters.
        self.metrics.requests.labels(_route(scope), str(status)).inc()
        self.metrics.request_seconds.labels(_route(scope)).observe(seconds)
        key = scope["state"].get("key")
        log(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=cut(scope["path"]),
            status=status,
            ms=round(seconds * 1e3, 1),
            key=None if key is None else key.name,
            client=scope["client"][0] if scope.get("client") else None,
        )


class _Watched:
    """The channel to the client; it adds headers and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status, self.started = CLIENT_GONE, False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            for name, value in SECURITY.items():
                headers.setdefault(name, value)
        await self._send(message)


def _route(scope: Scope) -> str:
    """Return the path of the route, with its parameters' names."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNKNOWN

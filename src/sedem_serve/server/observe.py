"""The outermost middleware: an id, a log line, a count and a span for each request.

It also turns unexpected errors of routes into responses, so that none breaks a connection. Spans
are made with OpenTelemetry, and only with `--telemetry`: one per request, and inside it one for its
answer, with its stages. The standard variables, such as OTEL_TRACES_EXPORTER=console or
OTEL_EXPORTER_OTLP_ENDPOINT, say where they go. Spans have no text.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sedem.errors import ConfigError, cut
from sedem.types import Answer
from sedem_serve.server.errors import CLIENT_GONE, to_api_error
from sedem_serve.server.logs import log
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.service import Lifecycle

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Request ids that are accepted from a client; any other is replaced."""
SECURITY = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
UNKNOWN = "unknown"
"""The label of a path without a route; a client must not be able to create new labels."""
REFUSALS = {429: "queue", 503: "unavailable"}
"""Statuses of requests that the server could not serve, and the labels that count them."""


EXPORTERS = {"otlp": ("otlp_proto_http", "otlp_proto_grpc")}
"""Entry points for a value of OTEL_TRACES_EXPORTER that has several."""
INSTALL = "pip install 'sedem[telemetry]' opentelemetry-exporter-otlp-proto-http"


class OpenTelemetry:
    """Makes spans with OpenTelemetry."""

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise ConfigError(f"--telemetry needs a package that is missing; {INSTALL}") from None
        if exporter is None:
            name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
            group, names = "opentelemetry_traces_exporter", EXPORTERS.get(name, (name,))
            points = [point for one in names for point in entry_points(group=group, name=one)]
            if not points:
                raise ConfigError(
                    f"OpenTelemetry has no exporter '{name}' here; {INSTALL}, or set "
                    "OTEL_TRACES_EXPORTER to console"
                )
            exporter = points[0].load()()
        service = os.environ.get("OTEL_SERVICE_NAME", "sedem")
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sedem_serve.server")

    @contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[Callable[[str, int], None]]:
        """Make a span, inside the client's span if `traceparent` names one.

        Yields:
            Called with the route and the status of the response.
        """
        from opentelemetry import propagate, trace

        method = scope["method"]
        with self._tracer.start_as_current_span(
            method,
            context=propagate.extract(dict(Headers(scope=scope))),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "sedem.request_id": request_id},
            record_exception=False,  # an exception may quote a question
            set_status_on_exception=False,
        ) as span:

            def end(route: str, status: int) -> None:
                span.update_name(f"{method} {route}")
                span.set_attributes({"http.route": route, "http.response.status_code": status})
                if status >= 500:
                    span.set_status(trace.StatusCode.ERROR)

            yield end

    def answered(self, answer: Answer, tokens: int) -> None:
        """Make a span for an answer that has just ended, with the times of its stages."""
        ended = time.time_ns()
        span = self._tracer.start_span(
            "answer",
            start_time=ended - round(answer.timings["total_ms"] * 1e6),
            attributes={
                "sedem.model": answer.model,
                "sedem.k": answer.k,
                "sedem.blocks": answer.blocks,
                "sedem.tokens": tokens,
                "sedem.finish_reason": answer.finish_reason,
                **{f"sedem.{name}": value for name, value in answer.timings.items()},
            },
        )
        span.end(ended)

    def close(self) -> None:
        """Send the spans that have not been sent yet."""
        self._provider.shutdown()


class Observe:
    """Watches requests."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, lifecycle: Lifecycle, tracer: OpenTelemetry | None
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
        status, started = CLIENT_GONE, False

        async def answer(message: Message) -> None:
            """Send a message to the client with the headers that all responses have."""
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        working = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        began = time.perf_counter()
        self.lifecycle.in_flight += working
        span = self.tracer.request(scope, request_id) if self.tracer else nullcontext(None)
        try:
            with span as end_span:
                try:
                    await self.app(scope, receive, answer)
                except Exception as error:
                    told = to_api_error(error)
                    if reason := REFUSALS.get(told.status):
                        self.metrics.refused.labels(reason).inc()
                    elif told.status >= 500:
                        # The message of a known one, such as a full disk, says everything.
                        known = told is error
                        reason, fields = told.message if known else None, {"request_id": request_id}
                        log("failed", logging.ERROR, error=not known, reason=reason, **fields)
                    if not started:
                        await told.response()(scope, receive, answer)
                if end_span is not None:
                    end_span(_route(scope), status)
        finally:
            self.lifecycle.in_flight -= working
            seconds, key = time.perf_counter() - began, scope["state"].get("key")
            # The path of the route, never the values of its parameters
            self.metrics.requests.labels(_route(scope), str(status)).inc()
            self.metrics.request_seconds.labels(_route(scope)).observe(seconds)
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


def _route(scope: Scope) -> str:
    """Return the path of the route, with its parameters' names."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNKNOWN

"""OpenTelemetry spans: one per request, and inside it one for its answer, with its stages.

Without `--telemetry` nothing is imported and no span is made. The standard variables, such as
OTEL_TRACES_EXPORTER=console or OTEL_EXPORTER_OTLP_ENDPOINT, say where spans go. Spans have no text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from starlette.types import Scope

from sedem.errors import ConfigError
from sedem.types import Answer

EXPORTERS = {"otlp": ("otlp_proto_http", "otlp_proto_grpc")}
"""Entry points for a value of OTEL_TRACES_EXPORTER that has several."""
INSTALL = "pip install 'sedem[telemetry]' opentelemetry-exporter-otlp-proto-http"


class Span:
    """A request that is being served; this base class records nothing."""

    def end(self, route: str, status: int) -> None:
        """Record how the request ended."""


class Tracer:
    """Makes spans; this base class makes none."""

    @contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[Span]:
        """Make a span for a request."""
        yield Span()

    def answered(self, answer: Answer, tokens: int) -> None:
        """Make a span for an answer of the current request, which has just ended."""

    def close(self) -> None:
        """Send the spans that have not been sent yet."""


class OpenTelemetry(Tracer):
    """Makes spans with OpenTelemetry.

    Args:
        exporter: where spans go; None means the standard variables decide.

    Raises:
        ConfigError: the package or the exporter is not installed.
    """

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise ConfigError(f"--telemetry needs a package that is missing; {INSTALL}") from None
        name = os.environ.get("OTEL_SERVICE_NAME", "sedem")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter()))
        self._tracer = self._provider.get_tracer("sedem.serve")
        self._extract = propagate.extract
        self._server, self._error = trace.SpanKind.SERVER, trace.StatusCode.ERROR

    @contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[Span]:
        """Make a span, inside the client's span if `traceparent` names one."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        attributes = {"http.request.method": scope["method"], "sedem.request_id": request_id}
        with self._tracer.start_as_current_span(
            scope["method"],
            context=self._extract(headers),
            kind=self._server,
            attributes=attributes,
            record_exception=False,  # an exception may quote a question
            set_status_on_exception=False,
        ) as span:
            yield _Recorded(span, scope["method"], self._error)

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


class _Recorded(Span):
    """An OpenTelemetry span for a request."""

    def __init__(self, span: Any, method: str, error: Any) -> None:
        self._span, self._method, self._error = span, method, error

    def end(self, route: str, status: int) -> None:
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(self._error)


def _exporter() -> Any:
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    for entry_name in EXPORTERS.get(name, (name,)):
        for entry in entry_points(group="opentelemetry_traces_exporter", name=entry_name):
            return entry.load()()
    raise ConfigError(
        f"OpenTelemetry has no exporter '{name}' here; {INSTALL}, or set OTEL_TRACES_EXPORTER to "
        "console"
    )

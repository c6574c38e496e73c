"""OpenTelemetry spans: one per request, and inside it one for its answer, with its stages.

Without `--telemetry` nothing is imported and no span is made. The standard variables, such as
OTEL_TRACES_EXPORTER=console or OTEL_EXPORTER_OTLP_ENDPOINT, say where spans go. Spans have no text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from sedem.errors import ConfigError
from sedem.types import Answer

EXPORTERS = {"otlp": ("otlp_proto_http", "otlp_proto_grpc")}
"""Entry points for a value of OTEL_TRACES_EXPORTER that has several."""
INSTALL = "pip install 'sedem[telemetry]' opentelemetry-exporter-otlp-proto-http"


class Tracer:
    """Makes spans; this base class makes none."""

    @contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[Callable[[str, int], None]]:
        """Make a span for a request.

        Yields:
            Called with the route and the status of the response.
        """
        yield lambda route, status: None

    def answered(self, answer: Answer, tokens: int) -> None:
        """Make a span for an answer of the current request, which has just ended."""

    def close(self) -> None:
        """Send the spans that have not been sent yet."""


class OpenTelemetry(Tracer):
    """Makes spans with OpenTelemetry.

    Raises:
        ConfigError: the package or the exporter is not installed.
    """

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise ConfigError(f"--telemetry needs a package that is missing; {INSTALL}") from None
        name = os.environ.get("OTEL_SERVICE_NAME", "sedem")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter()))
        self._tracer = self._provider.get_tracer("sedem.serve")

    @contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[Callable[[str, int], None]]:
        """Make a span, inside the client's span if `traceparent` names one."""
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


def _exporter() -> Any:
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    for entry_name in EXPORTERS.get(name, (name,)):
        for entry in entry_points(group="opentelemetry_traces_exporter", name=entry_name):
            return entry.load()()
    raise ConfigError(
        f"OpenTelemetry has no exporter '{name}' here; {INSTALL}, or set OTEL_TRACES_EXPORTER to "
        "console"
    )

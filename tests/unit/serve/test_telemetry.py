from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sedem import Answer
from sedem.errors import ConfigError
from sedem.serve import app as application
from sedem.serve.telemetry import OpenTelemetry

QUESTION = "Who is the landlord of the flat in Mill Lane?"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the servers of a test export."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(application, "OpenTelemetry", lambda: OpenTelemetry(exporter))
    return exporter


def test_a_span_for_each_request_inside_that_of_the_client(
    spans: InMemorySpanExporter, make_client: Callable[..., TestClient]
) -> None:
    client = make_client(telemetry=True)
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    client.get("/v1/banks/none", headers={"traceparent": parent, "X-Request-Id": "mine"})
    client.__exit__(None, None, None)
    [span] = [
        one for one in spans.get_finished_spans() if one.context.trace_id == int("a" * 32, 16)
    ]
    assert span.name == "GET /v1/banks/{bank}"
    assert span.parent is not None and span.parent.span_id == int("b" * 16, 16)
    assert dict(span.attributes or {}) == {
        "http.request.method": "GET",
        "http.route": "/v1/banks/{bank}",
        "http.response.status_code": 404,
        "sedem.request_id": "mine",
    }


def test_a_span_for_an_answer_holds_its_times_and_no_text() -> None:
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetry(exporter)
    answer = Answer(QUESTION, (), 2, 9, {"ttft_ms": 20.0, "total_ms": 50.0}, "end", "sedem-nano")
    scope = {"method": "POST", "headers": []}
    with tracer.request(scope, "req-1") as end_span:
        tracer.answered(replace(answer, confidence=0.5), 7)
        end_span("/v1/chat/completions", 200)
    tracer.close()
    inner, outer = exporter.get_finished_spans()
    assert inner.parent is not None and inner.parent.span_id == outer.context.span_id
    assert inner.start_time is not None and inner.end_time is not None
    assert inner.end_time - inner.start_time == 50_000_000
    assert dict(inner.attributes or {}) == {
        "sedem.model": "sedem-nano",
        "sedem.k": 2,
        "sedem.blocks": 9,
        "sedem.tokens": 7,
        "sedem.finish_reason": "end",
        "sedem.ttft_ms": 20.0,
        "sedem.total_ms": 50.0,
    }


def test_an_error_marks_the_span_and_its_message_is_not_recorded() -> None:
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetry(exporter)
    scope = {"method": "POST", "headers": []}
    with pytest.raises(KeyError), tracer.request(scope, "req-1"):
        raise KeyError(QUESTION)
    with tracer.request(scope, "req-2") as end_span:
        end_span("/x", 500)
    tracer.close()
    raised, failed = exporter.get_finished_spans()
    assert not raised.events
    assert QUESTION not in raised.to_json()
    assert failed.status.status_code.name == "ERROR"


def test_a_package_or_exporter_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with pytest.raises(ConfigError, match="'carrier-pigeon'"):
        OpenTelemetry()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    OpenTelemetry().close()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'sedem\[telemetry\]'"):
        OpenTelemetry()

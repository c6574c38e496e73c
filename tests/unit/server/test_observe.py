"""Each request has an id, a line in the log, figures and a span, and none of them has its text."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import SECRET

from sedem import Answer
from sedem.errors import ConfigError
from sedem_serve.server import app as application
from sedem_serve.server import logs
from sedem_serve.server.errors import INTERNAL
from sedem_serve.server.logs import FIELDS
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.observe import OpenTelemetry

QUESTION = "Who is the landlord of the flat in Mill Lane?"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that returns the fields of what was logged."""
    caplog.set_level(logging.INFO, "sedem_serve.server")
    return lambda: [getattr(record, FIELDS) for record in caplog.records]


def test_an_id_goes_through_unless_it_could_do_harm(
    client: TestClient, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    response = client.get("/v1/banks/none?token=1", headers={"X-Request-Id": "abc-1.2_3"})
    assert response.headers["X-Request-Id"] == "abc-1.2_3"
    line = lines()[-1]
    assert line.pop("ms") >= 0
    assert line == {
        "request_id": "abc-1.2_3",
        "method": "GET",
        "path": "/v1/banks/none",
        "status": 404,
        "key": "admin",
        "client": "testclient",
    }
    for given in ["", "a b", "a" * 65, "x\ty", "<b>", "id=1", "é"]:
        headers = {"X-Request-Id": given.encode("latin-1")}
        ids = {client.get("/ready", headers=headers).headers["X-Request-Id"] for _ in range(2)}  # type: ignore[arg-type]
        assert len(ids) == 2
        assert all(re.fullmatch(r"req-[0-9a-f]{16}", one) for one in ids)


def test_a_request_is_a_line_without_secrets_and_text(
    client: TestClient, anonymous: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    files = {"file": ("lease.txt", QUESTION.encode(), "text/plain")}
    client.post("/v1/banks/new/documents", files=files)
    body = {"model": "sedem@new", "messages": [{"role": "user", "content": QUESTION}]}
    client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
    client.post("/v1/chat/completions", json={**body, "nonsense": QUESTION})
    anonymous.get(f"/?key={SECRET}", headers={"Accept": "text/html"})
    anonymous.get("/ready", headers={"Authorization": "Bearer some-wrong-secret"})
    anonymous.post("/login", data={"key": SECRET}, headers={"Origin": "http://testserver"})
    anonymous.get("/ready", headers={"Cookie": f"sedem_key={SECRET}"})
    records = [str(vars(record)) for record in caplog.records if record.name.startswith("sedem")]
    assert len(records) >= 7
    for record in records:
        assert SECRET not in record and "some-wrong-secret" not in record
        assert "landlord" not in record


def test_an_error_of_a_route_is_an_answer_and_ends_a_stream_that_has_begun(
    app: FastAPI, client: TestClient, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    def fail() -> None:
        raise RuntimeError(QUESTION)

    async def pieces() -> Any:
        yield "begun"
        fail()

    app.add_api_route("/fail", fail)
    response = client.get("/fail")
    assert response.status_code == 500 and "X-Request-Id" in response.headers
    assert response.json()["error"]["message"] == INTERNAL

    app.add_api_route("/stream", lambda: StreamingResponse(pieces()))
    assert client.get("/stream").text == "begun"
    assert lines()[-1]["status"] == 200
    assert client.get("/ready").is_success


def test_requests_are_counted_by_the_pattern_of_their_route(
    app: FastAPI, client: TestClient
) -> None:
    for name in ("one", "two", "three"):
        client.get(f"/v1/banks/{name}")
        client.get(f"/made/up/{name}")
    text = client.get("/metrics").text
    assert 'sedem_requests_total{route="/v1/banks/{bank}",status="404"} 3.0' in text
    assert 'sedem_requests_total{route="unknown",status="404"} 3.0' in text
    assert "one" not in re.findall(r'route="([^"]*)"', text)
    # Those that work are counted while they do.
    seen: list[int] = []

    async def work() -> None:
        seen.append(app.state.lifecycle.in_flight)

    app.add_api_route("/work", work, methods=["POST"])
    app.add_api_route("/look", work, methods=["GET"])
    client.post("/work")
    client.get("/look")
    assert seen == [1, 0]
    assert app.state.lifecycle.in_flight == 0


OF_TIMES = "request time_to_first_token time_per_token wait select build"
COUNTED = (
    "requests refused answers cancelled_answers context_tokens answer_tokens built_blocks "
    "build_failures"
)
GAUGED = "questions_waiting answers_running rows banks blocks online_banks online_waiting"
NAMES = {
    **{f"sedem_{name}_seconds": "histogram" for name in OF_TIMES.split()},
    **{f"sedem_{name}_total": "counter" for name in COUNTED.split()},
    **{f"sedem_{name}": "gauge" for name in GAUGED.split()},
    "sedem_selected_blocks": "histogram",
}
"""What dashboards rely on; of an engine that keeps keys and values, there are kept_* too."""


def samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_the_names_of_all_figures(client: TestClient) -> None:
    response = client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", response.text, re.MULTILINE))
    assert {name: kind for name, kind in kinds.items() if not name.endswith("_created")} == NAMES


def test_an_answer_is_counted_by_its_times() -> None:
    told: list[tuple[Answer, int]] = []
    metrics = Metrics(lambda answer, tokens: told.append((answer, tokens)))
    timings = {"wait_ms": 10.0, "select_ms": 20.0, "ttft_ms": 300.0, "total_ms": 500.0}
    answer = Answer("yes", (), 3, 9, timings, "end", "sedem-nano", context_tokens=1000)
    metrics.answered(answer, 5, 0.2)
    found = samples(metrics.text().decode())
    assert found['sedem_answers_total{finish_reason="end"}'] == 1
    assert found["sedem_time_to_first_token_seconds_sum"] == pytest.approx(0.3)
    assert found["sedem_wait_seconds_sum"] == pytest.approx(0.01)
    assert found["sedem_select_seconds_sum"] == pytest.approx(0.02)
    assert found["sedem_time_per_token_seconds_sum"] == pytest.approx(0.05)
    assert found["sedem_selected_blocks_sum"] == 3
    assert found["sedem_context_tokens_total"] == 1000
    assert found["sedem_answer_tokens_total"] == 5
    assert told == [(answer, 5)]
    # A single token has no time between two.
    metrics.answered(answer, 1, 0.0)
    assert samples(metrics.text().decode())["sedem_time_per_token_seconds_count"] == 1


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Leave the loggers as they were."""
    loggers = (logs.LOGGER, logging.getLogger("uvicorn"))
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.level, one.propagate = handlers, level, propagate


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


VALUES = {
    "/v1/banks": "/v1/banks", "a b": '"a b"', "a\nevent=fake": '"a\\nevent=fake"',
    "\x1b[2J": '"\\u001b[2J"', "\u202eevil": '"\\u202eevil"', 'say "no"': '"say \\"no\\""',
    "": '""', 7: "7",
}  # fmt: skip


def test_a_line_is_json_or_text_and_no_value_forges_one(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logs.log("request", path="/v1", status=200, key=None)
    [line] = logged(capsys)
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {"level": "info", "event": "request", "path": "/v1", "status": 200}
    logs.configure("text")
    for value in VALUES:
        logs.log("request", path=value)
    shown = [line.split(" ", 1)[1] for line in logged(capsys)]
    assert shown == [f"info request path={text}" for text in VALUES.values()]
    # Warnings of uvicorn are shown, and its chatter is not.
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.info("Started server process")
    uvicorn.warning("Invalid HTTP request received.")
    uvicorn.warning("one\n\x1b[2Jtwo")
    first, second = logged(capsys)
    assert first.endswith("warning Invalid HTTP request received.")
    assert second.endswith('warning "one\\n\\u001b[2Jtwo"')


@pytest.mark.parametrize("log_text", [True, False])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_shows_where_and_its_message_only_if_texts_may_be_logged(
    log_format: str, log_text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(log_format, log_text=log_text)
    try:
        raise KeyError(QUESTION)
    except KeyError:
        logs.log("failed", logging.ERROR, error=True, request_id="req-1")
    [line] = logged(capsys)
    assert "req-1" in line and "KeyError" in line and "test_observe.py" in line
    assert (QUESTION in line) is log_text


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


def test_spans_have_times_and_errors_and_no_text() -> None:
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetry(exporter)
    answer = Answer(QUESTION, (), 2, 9, {"ttft_ms": 20.0, "total_ms": 50.0}, "end", "sedem-nano")
    scope = {"method": "POST", "headers": []}
    with tracer.request(scope, "req-1") as end_span:
        tracer.answered(replace(answer, confidence=0.5), 7)
        end_span("/v1/chat/completions", 200)
    with pytest.raises(KeyError), tracer.request(scope, "req-1"):
        raise KeyError(QUESTION)
    with tracer.request(scope, "req-2") as end_span:
        end_span("/x", 500)
    tracer.close()
    inner, outer, raised, failed = exporter.get_finished_spans()
    assert not raised.events and QUESTION not in raised.to_json()
    assert failed.status.status_code.name == "ERROR"
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

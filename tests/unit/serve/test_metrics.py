from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from sedem import Answer
from sedem.serve.metrics import Metrics

NAMES = {
    "sedem_requests_total": "counter",
    "sedem_request_seconds": "histogram",
    "sedem_refused_total": "counter",
    "sedem_answers_total": "counter",
    "sedem_cancelled_answers_total": "counter",
    "sedem_time_to_first_token_seconds": "histogram",
    "sedem_time_per_token_seconds": "histogram",
    "sedem_wait_seconds": "histogram",
    "sedem_select_seconds": "histogram",
    "sedem_selected_blocks": "histogram",
    "sedem_context_tokens_total": "counter",
    "sedem_answer_tokens_total": "counter",
    "sedem_built_blocks_total": "counter",
    "sedem_build_seconds": "histogram",
    "sedem_build_failures_total": "counter",
    "sedem_questions_waiting": "gauge",
    "sedem_answers_running": "gauge",
    "sedem_rows": "gauge",
    "sedem_banks": "gauge",
    "sedem_blocks": "gauge",
    "sedem_online_banks": "gauge",
    "sedem_online_waiting": "gauge",
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

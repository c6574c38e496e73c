"""The metrics of the server, in Prometheus' format; docs/operate.md explains each."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from sedem.types import Answer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Bucket bounds of the time histograms."""
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Bucket bounds of the histogram of selected blocks."""


class Metrics:
    """The metrics of one server, in its own registry.

    Args:
        on_answer: called with each answer and the number of its tokens.
    """

    def __init__(self, on_answer: Callable[[Answer, int], None] | None = None) -> None:
        self._on_answer = on_answer
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests served", "route", "status")
        self.request_seconds = self._times("request", "a request, to its last byte", "route")
        self.refused = self._counter("refused", "requests refused before work began", "reason")
        self._answers = self._counter("answers", "answers given", "finish_reason")
        self.cancelled = self._counter("cancelled_answers", "answers whose reader went away")
        self._first_token = self._times("time_to_first_token", "question to first token")
        self._token = self._times("time_per_token", "between two tokens of an answer, on average")
        self._waited = self._times("wait", "waiting for a row")
        self._selected = self._times("select", "scoring and choosing blocks")
        self._prompt_tokens = self._counter("context_tokens", "tokens of the documents asked")
        self._answer_tokens = self._counter("answer_tokens", "tokens generated")
        self._blocks = Histogram(
            "sedem_selected_blocks", "Blocks that an answer used.", buckets=BLOCKS,
            registry=self.registry,
        )  # fmt: skip
        self.built_blocks = self._counter("built_blocks", "blocks read into banks")
        self.build_seconds = self._times("build", "reading a document into a bank")
        self.build_failures = self._counter("build_failures", "files that could not be read")

    def answered(self, answer: Answer, tokens: int, seconds: float) -> None:
        """Count an answer."""
        self._answers.labels(answer.finish_reason).inc()
        for name, histogram in (
            ("ttft_ms", self._first_token),
            ("wait_ms", self._waited),
            ("select_ms", self._selected),
        ):
            if name in answer.timings:
                histogram.observe(answer.timings[name] / 1e3)
        if tokens > 1:
            self._token.observe(seconds / (tokens - 1))
        self._answer_tokens.inc(tokens)
        self._prompt_tokens.inc(answer.context_tokens or 0)
        self._blocks.observe(answer.k)
        if self._on_answer is not None:
            self._on_answer(answer, tokens)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read whenever the metrics are read."""
        Gauge(f"sedem_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        text = f"{what[0].upper()}{what[1:]}."
        return Counter(f"sedem_{name}", text, labels, registry=self.registry)

    def _times(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(
            f"sedem_{name}_seconds", f"Seconds: {what}.", labels, buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip

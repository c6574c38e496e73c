"""Timed rounds: each runs every method once, so that machine drift affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any, Protocol, runtime_checkable

import torch

from sedem.answering.decoding import question_ids
from sedem.backbone.decoder import Backbone
from sedem.bench.keeping import Keeper
from sedem.bench.memory import measure_memory
from sedem.engine.device import Clock
from sedem.types import Answer, Document, Reader

WARM_UP = 2
"""Number of warm-up rounds; the first compiles, allocates and fills caches."""

CLOCKS = (
    "online_ttft_ms", "prebuilt_ttft_ms", "missed_ttft_ms", "decode_tok_s", "build_tok_s", "warm_ms"
)  # fmt: skip
"""Measurements of a row that are not in its `stages`."""

Figures = dict[str, float | None]


@runtime_checkable
class BatchReader(Protocol):
    """A reader that answers several questions about one memory in one batch."""

    def answer_together(self, memory: Any, questions: Sequence[str]) -> list[Answer]:
        """Answer each question."""
        ...


@dataclass(frozen=True)
class Subject:
    """A method to measure.

    Attributes:
        name: its name in the results.
        reader: the reader to measure.
        backbone: the backbone that answers; None if unknown.
        reads_text: whether the decoder reads raw text, and truncates it if it is too long.
    """

    name: str
    reader: Reader
    backbone: Backbone | None
    reads_text: bool = False


Detail = Callable[["Trial", Sequence[Document]], dict[str, Any]]
"""Measures more of a method that has been timed over some documents; returns entries of its row."""


@dataclass(frozen=True)
class Bench:
    """The measurement of every method.

    Attributes:
        questions: the first is timed alone; batches repeat all of them as often as needed.
        batches: batch sizes to measure.
        answer_tokens: tokens of every answer.
        runs: measured rounds.
        device: synchronized before each reading of the clock.
        online: whether documents are read in every round, or once.
        detail: measures more of each method for its row.
    """

    questions: Sequence[str]
    batches: Sequence[int]
    answer_tokens: int
    runs: int
    device: torch.device
    online: bool = True
    detail: Detail | None = None

    def measure(
        self, subjects: Sequence[Subject], documents: Sequence[Document], tick: Callable[[], None]
    ) -> dict[str, dict[str, Any]]:
        """Measure methods over one context.

        Args:
            subjects: the methods; they run one after another in every round.
            documents: the context.
            tick: called after each method in each round, `rounds` times per method.

        Returns:
            Measurements by method.
        """
        trials = [Trial(subject) for subject in subjects]
        if not self.online:
            for trial in trials:
                trial.build(self, documents)
        for number in range(-WARM_UP, self.runs):
            for trial in trials:
                if number == 0:
                    trial.forget_times(builds=self.online)
                if self.online:
                    trial.build(self, documents)
                trial.ask(self)
                tick()
        return {trial.subject.name: self._row(trial, documents) for trial in trials}

    @property
    def rounds(self) -> int:
        """Rounds over one context, warm-up included."""
        return WARM_UP + self.runs

    def build(self, subject: Subject, documents: Sequence[Document]) -> tuple[Figures, Any, int]:
        """Read the documents, answer for the first time, and compute what the method keeps ahead.

        Online TTFT is the time to read plus the time to the first answer's first token.

        Returns:
            The measurements, the memory, and the number of blocks that are kept.
        """
        reader = subject.reader
        clock = Clock(self.device)
        memory = reader.read(documents)
        clock.lap("build_ms")
        build = clock.timings["build_ms"]
        first = reader.answer(memory, self.questions[0])
        ready = 0
        if isinstance(reader, Keeper):
            # Use a copy, since the first answer has kept its blocks.
            memory = reader.anew(memory)
            clock.lap("first")
            ready = reader.warm(memory)
            clock.lap("warm_ms")
        # If the memory is the text itself, nothing was built.
        built = memory != list(documents)
        tokens = first.context_tokens or 0
        figures: Figures = {
            "online_ttft_ms": build + first.timings["ttft_ms"] if self.online else None,
            "build_tok_s": 1e3 * tokens / build if built else None,
            "build_ms": build,
            "warm_ms": clock.timings.get("warm_ms"),
        }
        return figures, memory, ready

    def ask(self, subject: Subject, memory: Any) -> tuple[Figures, Answer]:
        """Answer from a memory; prebuilt TTFT and decoding speed are those of this answer."""
        reader = subject.reader
        missed = None
        if isinstance(reader, Keeper):
            missed = reader.answer(reader.anew(memory), self.questions[0]).timings["ttft_ms"]
        answer = reader.answer(memory, self.questions[0])
        timings = answer.timings
        figures: Figures = {
            "prebuilt_ttft_ms": timings["ttft_ms"],
            "missed_ttft_ms": missed,
            "decode_tok_s": self._speed(answer),
            **{name: value for name, value in timings.items() if name != "ttft_ms"},
        }
        return figures, answer

    def _speed(self, answer: Answer) -> float | None:
        """Tokens per second after the first; None if the answer ended before its limit."""
        if answer.finish_reason != "length" or self.answer_tokens < 2:
            return None
        elapsed = answer.timings["total_ms"] - answer.timings["ttft_ms"]
        return 1e3 * (self.answer_tokens - 1) / elapsed

    def _row(self, trial: Trial, documents: Sequence[Document]) -> dict[str, Any]:
        subject, answer, question = trial.subject, trial.answer, self.questions[0]
        assert answer is not None
        figures = {name: _spread_of(trial.builds, name) for name in trial.builds[0]}
        figures |= {name: _spread_of(trial.asks, name) for name in trial.asks[0]}
        stored, tokens = answer.stored_bytes, answer.context_tokens
        row: dict[str, Any] = {
            **{name: figures.pop(name) for name in CLOCKS},
            "stages": figures,
            "reads_tokens": self._read_tokens(subject, answer),
            "decoder_tokens": self._decoder_tokens(subject, answer),
            "k": answer.k or None,
            "stored_bytes_per_token": stored / tokens if stored and tokens else None,
            "kept": _kept(trial),
            "memory": None,
        }
        if self.online:
            # Both read the documents several more times.
            row["memory"] = measure_memory(subject.reader, documents, question, self.device)
            row["batches"] = self._batches(subject.reader, documents)
        return {**row, **(self.detail(trial, documents) if self.detail else {})}

    def _decoder_tokens(self, subject: Subject, answer: Answer) -> int | None:
        """Tokens of the context that the decoder attends to, as states or as text."""
        if subject.backbone is None or answer.conditioning is None:
            return None
        return answer.conditioning - len(question_ids(subject.backbone, self.questions[0]))

    def _read_tokens(self, subject: Subject, answer: Answer) -> int | None:
        """Context tokens behind an answer: all, unless the decoder reads text and truncates it."""
        if not subject.reads_text:
            return answer.context_tokens
        return self._decoder_tokens(subject, answer)

    def _batches(self, reader: Reader, documents: Sequence[Document]) -> dict[str, Any]:
        """Questions per second over one memory, by batch size; each round runs every size."""
        if not self.batches:
            return {}
        memory = reader.read(documents)
        if isinstance(reader, Keeper):
            reader.warm(memory)
        speeds: dict[int, list[float]] = {size: [] for size in self.batches}
        for number in range(-WARM_UP, self.runs):
            for size, measured in speeds.items():
                speed = self._throughput(reader, memory, size)
                if number >= 0:
                    measured.append(speed)
        together = isinstance(reader, BatchReader)
        return {
            str(size): {"together": together, "questions_per_s": spread(measured)}
            for size, measured in speeds.items()
        }

    def _throughput(self, reader: Reader, memory: Any, size: int) -> float:
        """Questions per second of one batch; one at a time if the method has no batches."""
        questions = list(islice(cycle(self.questions), size))
        clock = Clock(self.device)
        if isinstance(reader, BatchReader):
            reader.answer_together(memory, questions)
        else:
            for question in questions:
                reader.answer(memory, question)
        clock.lap("all_ms")
        return 1e3 * size / clock.timings["all_ms"]


@dataclass
class Trial:
    """The measurement of one method over one context.

    Attributes:
        subject: the method.
        memory: what the method has read.
        ready: number of blocks whose keys and values were computed ahead.
        answer: the method's last answer.
        builds: measurements of each reading.
        asks: measurements of each answer.
    """

    subject: Subject
    memory: Any = None
    ready: int = 0
    answer: Answer | None = None
    builds: list[Figures] = field(default_factory=list)
    asks: list[Figures] = field(default_factory=list)

    def build(self, bench: Bench, documents: Sequence[Document]) -> None:
        """Read the documents."""
        # Two memories at once would not fit in what the first one leaves free.
        self.memory = None
        figures, self.memory, self.ready = bench.build(self.subject, documents)
        self.builds.append(figures)

    def ask(self, bench: Bench) -> None:
        """Answer from the memory."""
        figures, self.answer = bench.ask(self.subject, self.memory)
        self.asks.append(figures)

    def forget_times(self, *, builds: bool) -> None:
        """Drop the measurements of the warm-up."""
        self.asks.clear()
        if builds:
            self.builds.clear()


def _kept(trial: Trial) -> dict[str, Any] | None:
    """Bytes per token of kept keys and values, and how many blocks were ready; None if none."""
    reader, answer = trial.subject.reader, trial.answer
    if not isinstance(reader, Keeper) or answer is None:
        return None
    size, tokens = reader.kept_bytes(trial.memory), answer.context_tokens
    per_token = size / tokens if size and tokens else None
    return {"bytes_per_token": per_token, "ready": trial.ready, "blocks": answer.blocks}


def _spread_of(runs: Sequence[Figures], name: str) -> dict[str, float] | None:
    values = [value for run in runs if (value := run[name]) is not None]
    return spread(values) if values else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes, quartiles and count of the values of at least one run."""
    first, _, third = quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    return {
        "median": median(values),
        "min": min(values),
        "q1": first,
        "q3": third,
        "max": max(values),
        "n": len(values),
    }

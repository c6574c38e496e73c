"""Timed rounds: each runs every method once, so that machine drift affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any

from sedem.backbone.prompts import question_ids
from sedem.bench.memory import measure_memory
from sedem.bench.plan import Plan
from sedem.bench.subjects import Keeper, Subject
from sedem.demo import QUESTIONS
from sedem.engine.device import Clock
from sedem.types import Answer, Document

WARM_UP = 2
"""Number of warm-up rounds; the first compiles, allocates and fills caches."""

CLOCKS = (
    "online_ttft_ms", "prebuilt_ttft_ms", "missed_ttft_ms", "decode_tok_s", "build_tok_s", "warm_ms"
)  # fmt: skip
"""Measurements of a row that are not in its `stages`."""

Figures = dict[str, float | None]


@dataclass
class Trial:
    """The measurement of one method over one context.

    Attributes:
        memory: what the method has read.
        ready: number of blocks whose keys and values were computed ahead.
        last: the method's last answer.
        builds: measurements of each reading.
        asks: measurements of each answer.
    """

    plan: Plan
    subject: Subject
    documents: Sequence[Document]
    memory: Any = None
    ready: int = 0
    last: Answer | None = None
    builds: list[Figures] = field(default_factory=list)
    asks: list[Figures] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        """The method's last answer."""
        assert self.last is not None
        return self.last

    def build(self) -> None:
        """Read the documents, answer for the first time, and compute what the method keeps ahead.

        Online TTFT is the time to read plus the time to the first answer's first token.
        """
        # Two memories at once would not fit in what the first one leaves free.
        self.memory = None
        reader = self.subject.reader
        clock = Clock(self.plan.place)
        memory = reader.read(self.documents)
        clock.lap("build_ms")
        build = clock.timings["build_ms"]
        first = reader.answer(memory, QUESTIONS[0])
        if isinstance(reader, Keeper):
            # Use a copy, since the first answer has kept its blocks.
            memory = reader.anew(memory)
            clock.lap("first")
            self.ready = reader.warm(memory)
            clock.lap("warm_ms")
        # If the memory is the text itself, nothing was built.
        built = memory != list(self.documents)
        self.builds.append(
            {
                "online_ttft_ms": build + first.timings["ttft_ms"] if self.plan.online else None,
                "build_tok_s": 1e3 * (first.context_tokens or 0) / build if built else None,
                "build_ms": build,
                "warm_ms": clock.timings.get("warm_ms"),
            }
        )
        self.memory = memory

    def ask(self) -> None:
        """Answer from the memory; prebuilt TTFT and decoding speed are those of this answer."""
        reader = self.subject.reader
        missed = None
        if isinstance(reader, Keeper):
            missed = reader.answer(reader.anew(self.memory), QUESTIONS[0]).timings["ttft_ms"]
        self.last = answer = reader.answer(self.memory, QUESTIONS[0])
        timings, speed = dict(answer.timings), None
        if answer.finish_reason == "length":
            elapsed = timings["total_ms"] - timings["ttft_ms"]
            speed = 1e3 * (self.plan.answer_tokens - 1) / elapsed
        own = {"prebuilt_ttft_ms": timings.pop("ttft_ms"), "missed_ttft_ms": missed}
        self.asks.append({**own, "decode_tok_s": speed, **timings})

    def row(self) -> dict[str, Any]:
        """The measurements of the method."""
        subject, answer = self.subject, self.answer
        figures = {name: _spread_of(self.builds, name) for name in self.builds[0]}
        figures |= {name: _spread_of(self.asks, name) for name in self.asks[0]}
        stored, tokens = answer.stored_bytes, answer.context_tokens
        seen = None
        if subject.backbone is not None and answer.conditioning is not None:
            seen = answer.conditioning - len(question_ids(subject.backbone, QUESTIONS[0]))
        row: dict[str, Any] = {
            **{name: figures.pop(name) for name in CLOCKS},
            "stages": figures,
            # Context tokens behind an answer: all, unless text is truncated.
            "reads_tokens": seen if subject.reads_text else tokens,
            # Tokens of the context that the decoder attends to, as states or as text.
            "decoder_tokens": seen,
            "k": answer.k or None,
            "stored_bytes_per_token": stored / tokens if stored and tokens else None,
            "kept": None,
            "memory": None,
        }
        if isinstance(subject.reader, Keeper):
            size = subject.reader.kept_bytes(self.memory)
            per_token = size / tokens if size and tokens else None
            row["kept"] = {
                "bytes_per_token": per_token, "ready": self.ready, "blocks": answer.blocks
            }  # fmt: skip
        if self.plan.online:
            # Both read the documents several more times.
            place = self.plan.place
            row["memory"] = measure_memory(subject.reader, self.documents, QUESTIONS[0], place)
            row["batches"] = self._batches()
        return row

    def _batches(self) -> dict[str, Any]:
        """Questions per second over one memory, by batch size; each round runs every size."""
        if not self.plan.batches:
            return {}
        reader = self.subject.reader
        memory = reader.read(self.documents)
        if isinstance(reader, Keeper):
            reader.warm(memory)
        together = getattr(reader, "answer_together", None)
        speeds: dict[int, list[float]] = {size: [] for size in self.plan.batches}
        for _ in range(WARM_UP + self.plan.runs):
            for size, measured in speeds.items():
                questions = list(islice(cycle(QUESTIONS), size))
                clock = Clock(self.plan.place)
                if together is not None:
                    together(memory, questions)
                else:
                    for question in questions:
                        reader.answer(memory, question)
                clock.lap("all_ms")
                measured.append(1e3 * size / clock.timings["all_ms"])
        return {
            str(size): {
                "together": together is not None, "questions_per_s": spread(measured[WARM_UP:])
            }
            for size, measured in speeds.items()
        }  # fmt: skip


Detail = Callable[[Trial], dict[str, Any]]
"""Measures more of a method after its rounds; returns entries of its row."""


def measure(
    plan: Plan,
    subjects: Sequence[Subject],
    documents: Sequence[Document],
    tick: Callable[[], None],
    detail: Detail | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure methods over one context; they run one after another in every round.

    Args:
        tick: called after each method in each round, `WARM_UP` included.

    Returns:
        Measurements by method.
    """
    trials = [Trial(plan, subject, documents) for subject in subjects]
    for number in range(-WARM_UP, plan.runs):
        for trial in trials:
            if number == 0:
                trial.asks.clear()
                if plan.online:
                    trial.builds.clear()
            if plan.online or not trial.builds:
                trial.build()
            trial.ask()
            tick()
    more: Detail = detail or (lambda trial: {})
    return {trial.subject.name: {**trial.row(), **more(trial)} for trial in trials}


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

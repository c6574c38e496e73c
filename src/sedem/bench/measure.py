"""The runs: methods take turns, so that whatever drifts on a machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any, Protocol, runtime_checkable

import torch

from sedem.backbone.decoder import Backbone
from sedem.baselines.full_context import FullContext
from sedem.baselines.longllmlingua import LongLLMLingua
from sedem.bench.floors import Stages, sedem_work, text_work
from sedem.bench.layers import EncoderLayers
from sedem.bench.memory import measure_memory
from sedem.bench.peers import HuggingFace, PrefixCached
from sedem.bench.spread import spread
from sedem.bench.stages import build_stages
from sedem.engine.device import Clock
from sedem.evaluation.readers import BoundSedem
from sedem.inference.prompts import question_ids
from sedem.types import Answer, Document, Reader

WARM_UP = 2
"""Turns that are not counted: the first compiles, allocates and fills caches."""

Figures = dict[str, float | None]


@runtime_checkable
class Together(Protocol):
    """A reader that answers several questions over one memory at once."""

    def answer_together(self, memory: Any, questions: Sequence[str]) -> list[Answer]:
        """Answer each question."""
        ...


@dataclass(frozen=True)
class Subject:
    """A method on the bench.

    Attributes:
        name: as the user named it.
        reader: what is measured.
        backbone: what answers; None where that is not known, and then there is no floor.
        layers: clocked beside every building of the method's bank.
    """

    name: str
    reader: Reader
    backbone: Backbone | None
    layers: EncoderLayers | None = None

    @property
    def reads_text(self) -> bool:
        """Whether its decoder reads raw text."""
        return isinstance(self.reader, FullContext | HuggingFace)

    def work(self, answer: Answer, question: str) -> Stages | None:
        """What its floor is computed from; None for a method whose stages are not known."""
        if isinstance(self.reader, BoundSedem):
            return sedem_work(self.reader.model, answer, question)
        if self.backbone is None or not self.reads_text or isinstance(self.reader, LongLLMLingua):
            # The last one reads the context several times to shorten it, and then what is left.
            return None
        kept = isinstance(self.reader, PrefixCached)
        return text_work(self.backbone, answer, question, kept=kept)


@dataclass(frozen=True)
class Bench:
    """How every method is measured.

    Attributes:
        questions: the first is the one that is clocked alone; batches go round them.
        batches: how many are answered together.
        answer_tokens: of every answer.
        runs: counted turns of each method.
        device: that is waited for before a clock is read.
    """

    questions: Sequence[str]
    batches: Sequence[int]
    answer_tokens: int
    runs: int
    device: torch.device

    def measure(
        self, subjects: Sequence[Subject], documents: Sequence[Document], tick: Callable[[], None]
    ) -> dict[str, dict[str, Any]]:
        """Rows by method over one context.

        Args:
            subjects: in turn, run by run.
            documents: the context.
            tick: called after each turn of each method; `turns` says how often in all.
        """
        runs: dict[str, list[Figures]] = {subject.name: [] for subject in subjects}
        answers: dict[str, Answer] = {}
        for turn in range(-WARM_UP, self.runs):
            for subject in subjects:
                figures, answers[subject.name] = self.once(subject, documents)
                if turn >= 0:
                    runs[subject.name].append(figures)
                tick()
        return {s.name: self._row(s, documents, runs[s.name], answers[s.name]) for s in subjects}

    @property
    def turns(self) -> int:
        """Ticks of one method over one context."""
        return WARM_UP + self.runs

    def once(self, subject: Subject, documents: Sequence[Document]) -> tuple[Figures, Answer]:
        """One turn: read and answer with nothing there, then answer again from the memory.

        Online TTFT is the first pair up to the first token, prebuilt TTFT and decoding are the
        second answer's alone.
        """
        reader = subject.reader
        clock = Clock(self.device)
        memory = reader.read(documents)
        clock.lap("build_ms")
        build = clock.timings["build_ms"]
        first = reader.answer(memory, self.questions[0]).timings["ttft_ms"]
        answer = reader.answer(memory, self.questions[0])
        timings = answer.timings
        # Where the memory is the text itself nothing was built.
        built = memory != list(documents)
        layers, tokens = subject.layers, answer.context_tokens or 0
        figures: Figures = {
            "online_ttft_ms": build + first,
            "prebuilt_ttft_ms": timings["ttft_ms"],
            "decode_tok_s": self._speed(answer),
            "build_tok_s": 1e3 * tokens / build if built else None,
            "layers_tok_s": 1e3 * tokens / layers.run_ms(documents) if layers else None,
            "build_ms": build,
            **{name: value for name, value in timings.items() if name != "ttft_ms"},
        }
        return figures, answer

    def _speed(self, answer: Answer) -> float | None:
        """Tokens a second after the first; None where the answer ended before its limit."""
        if answer.finish_reason != "length" or self.answer_tokens < 2:
            return None
        spent = answer.timings["total_ms"] - answer.timings["ttft_ms"]
        return 1e3 * (self.answer_tokens - 1) / spent

    def _row(
        self,
        subject: Subject,
        documents: Sequence[Document],
        runs: Sequence[Figures],
        answer: Answer,
    ) -> dict[str, Any]:
        question = self.questions[0]
        names = (
            "online_ttft_ms", "prebuilt_ttft_ms", "decode_tok_s", "build_tok_s", "layers_tok_s"
        )  # fmt: skip
        found = {name: _spread_of(runs, name) for name in runs[0]}
        work = subject.work(answer, question)
        stored, tokens = answer.stored_bytes, answer.context_tokens
        row: dict[str, Any] = {
            **{name: found.pop(name) for name in names},
            "stages": found,
            "reads_tokens": self._read_tokens(subject, answer),
            "k": answer.k or None,
            "stored_bytes_per_token": stored / tokens if stored and tokens else None,
            "work": work and {n: [asdict(part) for part in parts] for n, parts in work.items()},
            "memory": measure_memory(subject.reader, documents, question, self.device),
        }
        if isinstance(subject.reader, BoundSedem):
            row["build_stages"] = build_stages(subject.reader.model, documents)
        row["batches"] = self._batches(subject.reader, documents)
        return row

    def _read_tokens(self, subject: Subject, answer: Answer) -> int | None:
        """Context tokens that an answer stands on: all of them unless the decoder reads text."""
        if not subject.reads_text:
            return answer.context_tokens
        assert subject.backbone is not None and answer.conditioning is not None
        return answer.conditioning - len(question_ids(subject.backbone, self.questions[0]))

    def _batches(self, reader: Reader, documents: Sequence[Document]) -> dict[str, Any]:
        """Questions a second over one memory by size of batch, the sizes in turn."""
        if not self.batches:
            return {}
        memory = reader.read(documents)
        speeds: dict[int, list[float]] = {size: [] for size in self.batches}
        for turn in range(-WARM_UP, self.runs):
            for size, found in speeds.items():
                speed = self._throughput(reader, memory, size)
                if turn >= 0:
                    found.append(speed)
        together = isinstance(reader, Together)
        return {
            str(size): {"together": together, "questions_per_s": spread(found)}
            for size, found in speeds.items()
        }

    def _throughput(self, reader: Reader, memory: Any, size: int) -> float:
        """Questions a second of one batch; one by one where a method cannot do better."""
        questions = list(islice(cycle(self.questions), size))
        clock = Clock(self.device)
        if isinstance(reader, Together):
            reader.answer_together(memory, questions)
        else:
            for question in questions:
                reader.answer(memory, question)
        clock.mark("all_ms")
        return 1e3 * size / clock.timings["all_ms"]


def _spread_of(runs: Sequence[Figures], name: str) -> dict[str, float] | None:
    values = [value for run in runs if (value := run[name]) is not None]
    return spread(values) if values else None

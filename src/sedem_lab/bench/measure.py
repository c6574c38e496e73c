"""Timed rounds: each runs every method once, so that machine drift affects all of them alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from sedem.backbone.prompts import question_ids
from sedem.demo import QUESTIONS
from sedem.engine.device import Clock
from sedem.errors import ConfigError
from sedem.types import Answer, Document
from sedem_lab.bench.contexts import context, demo_text
from sedem_lab.bench.subjects import BenchPlan, Opener, Subject, checkpoint_of, open_subjects
from sedem_lab.evaluation.cost import PRESETS
from sedem_lab.provenance import provenance

WARM_UP = 2
"""Number of warm-up rounds; the first compiles, allocates and fills caches."""
CLOCKS = ("online_ttft_ms", "prebuilt_ttft_ms", "decode_tok_s", "build_tok_s")
"""Measurements of a row that are not in its `stages`."""


class Trial:
    """The measurement of one method over one context.

    Attributes:
        memory: what the method has read.
        answer: the method's last answer.
        builds: measurements of each reading.
        asks: measurements of each answer.
    """

    def __init__(self, subject: Subject, documents: Sequence[Document], plan: BenchPlan) -> None:
        self.subject, self.documents, self.plan = subject, documents, plan
        self.memory: Any = None
        self.answer: Answer
        self.builds: list[dict[str, float | None]] = []
        self.asks: list[dict[str, float | None]] = []

    def build(self) -> None:
        """Read the documents and answer for the first time.

        Online TTFT is the time to read plus the time to the first answer's first token.
        """
        # Two memories at once would not fit in what the first one leaves free.
        self.memory = None
        clock = Clock(self.plan.place)
        self.memory = self.subject.reader.read(self.documents)
        clock.lap("build_ms")
        build = clock.timings["build_ms"]
        first = self.subject.reader.answer(self.memory, QUESTIONS[0])
        # If the memory is the text itself, nothing was built.
        built = self.memory != list(self.documents)
        self.builds.append(
            {
                "online_ttft_ms": build + first.timings["ttft_ms"],
                "build_tok_s": 1e3 * (first.context_tokens or 0) / build if built else None,
                "build_ms": build,
            }
        )

    def ask(self) -> None:
        """Answer from the memory; prebuilt TTFT and decoding speed are those of this answer."""
        self.answer = answer = self.subject.reader.answer(self.memory, QUESTIONS[0])
        timings, speed = dict(answer.timings), None
        if answer.finish_reason == "length":
            elapsed = timings["total_ms"] - timings["ttft_ms"]
            speed = 1e3 * (self.plan.max_new_tokens - 1) / elapsed
        first = timings.pop("ttft_ms")
        self.asks.append({"prebuilt_ttft_ms": first, "decode_tok_s": speed, **timings})

    def row(self) -> dict[str, Any]:
        """The measurements of the method."""
        subject, answer = self.subject, self.answer
        stages = {
            name: spread([run[name] for run in runs])
            for runs in (self.builds, self.asks)
            for name in runs[0]
        }
        stored, tokens, seen = answer.stored_bytes, answer.context_tokens, None
        if subject.backbone is not None and answer.conditioning is not None:
            seen = answer.conditioning - len(question_ids(subject.backbone, QUESTIONS[0]))
        return {
            **{name: stages.pop(name) for name in CLOCKS},
            "stages": stages,
            # Context tokens behind an answer: all, unless text is truncated.
            "reads_tokens": seen if subject.reads_text else tokens,
            # Tokens of the context that the decoder attends to, as states or as text.
            "decoder_tokens": seen,
            "k": answer.k or None,
            "stored_bytes_per_token": stored / tokens if stored and tokens else None,
        }


def spread(measured: Sequence[float | None]) -> dict[str, float] | None:
    """Median, extremes, quartiles and count of the runs with a value; None if there are none."""
    values = [value for value in measured if value is not None]
    if not values:
        return None
    first, _, third = quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return {
        "median": median(values), "min": min(values), "q1": first, "q3": third,
        "max": max(values), "n": len(values),
    }  # fmt: skip


def run_bench(
    plan: BenchPlan,
    more: Mapping[str, Opener] | None = None,
    *,
    trial: Callable[[Subject, Sequence[Document], BenchPlan], Trial] = Trial,
    read_again: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure methods side by side.

    Args:
        more: more methods, by name.
        trial: measures a method.
        read_again: whether documents are read in every round, or once.
        progress: called with the number of finished steps and of all steps.

    Returns:
        `settings`, `results` by method and context length, `left_out` (methods that cannot run
        here, with the reason), `notes`, `load_average`, and the provenance.

    Raises:
        SedemError: something cannot be opened or measured.
    """
    load = os.getloadavg()[0]
    results: dict[str, dict[str, Any]] = {}
    with checkpoint_of(plan) as opened:
        subjects, left_out = open_subjects(opened, more)
        backbone = next((s.backbone for s in subjects if s.backbone is not None), None)
        if backbone is None:
            raise ConfigError("no method has a backbone to count tokens with; add one that has")
        done, steps = 0, len(plan.contexts) * len(subjects) * (WARM_UP + plan.runs)
        for tokens in plan.contexts:
            documents = context(demo_text(), backbone, tokens)
            trials = [trial(subject, documents, opened) for subject in subjects]
            for number in range(-WARM_UP, plan.runs):
                for one in trials:
                    if number == 0:
                        one.asks.clear()
                        if read_again:
                            one.builds.clear()
                    if read_again or not one.builds:
                        one.build()
                    one.ask()
                    progress(done := done + 1, steps)
            for one in trials:
                results.setdefault(one.subject.name, {})[str(tokens)] = one.row()
    return {
        "settings": {**plan.to_dict(), "threads": torch.get_num_threads()},
        "load_average": [load, os.getloadavg()[0]],
        "results": results,
        "left_out": left_out,
        "notes": notes(plan),
        **provenance(plan.place),
    }


def notes(plan: BenchPlan) -> list[str]:
    """What a reader of the results must know, one sentence each."""
    sentences = []
    if plan.place.type != "cuda":
        gpu = "a GPU is here but was not asked for" if torch.cuda.is_available() else "no GPU here"
        sentences.append(f"{gpu}: these are times of the CPU")
    if plan.backbone:
        whose = "sedem-nano's" if plan.backbone in PRESETS else "its own"
        sentences.append(
            f"{plan.backbone} on random weights: times and bytes hold, answers are noise; text is "
            f"cut by {whose} tokenizer"
        )
    text = "the bundled documents of the demo, which is repeated if it is too short"
    return [*sentences, f"contexts are cut from {text}"]

"""`sedem bench`: turns a plan into one document of measurements and provenance."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from sedem.baselines.full_context import FullContext
from sedem.baselines.registry import TRAINED
from sedem.bench.cold_start import measure_cold_start
from sedem.bench.contexts import context, source
from sedem.bench.keeping import WarmSedem, open_keeping
from sedem.bench.measure import Bench, Detail, Subject
from sedem.bench.plan import FULL, Plan
from sedem.bench.random_weights import write_random_checkpoint
from sedem.demo import QUESTIONS
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import BoundSedem
from sedem.evaluation.registry import (
    decoding_of,
    default_checkpoint,
    has_selection_budget,
    open_method,
)
from sedem.evaluation.results import Signatures, claim, write_json
from sedem.evaluation.run import Progress
from sedem.quantization import BFLOAT16
from sedem.untrusted import read_json

NO_TOKEN = -1
"""An end token that no model generates, so that every answer has its full length."""
DOCUMENT = "bench.json"
Opener = Callable[[MethodSettings], Subject]
_ROWS = TypeAdapter(dict[str, dict[str, Any]])


def run_bench(
    plan: Plan,
    out: Path | None = None,
    progress: Progress | None = None,
    *,
    peers: Mapping[str, Opener] | None = None,
    detail: Detail | None = None,
) -> dict[str, Any]:
    """Measure methods side by side.

    Args:
        plan: the methods, contexts and settings.
        out: folder for the document and for finished parts, from which an interrupted run resumes.
            None stores nothing.
        progress: called with the number of finished steps and of all steps.
        peers: more methods of a study, by name.
        detail: measures more of a method after its rounds over a context, for its row.

    Returns:
        `settings`, `results` by method and context length, `cold_start` in processor seconds if the
        plan asks for it, `left_out` (methods that cannot run here, with the reason), `notes`,
        `load_average`, and the provenance of the last measurement; `earlier` has that of earlier
        ones.

    Raises:
        SedemError: something cannot be opened or measured.
    """
    peers = peers or {}
    settings = {**plan.settings(), **({"peers": list(peers)} if peers else {})}
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as folder:
        results = Path(str(folder))
        claim(results, settings)
        kept = sorted(file.name for file in results.glob("context-*.json"))
        signatures = Signatures(results, kept, DOCUMENT, plan.place)
        load = [os.getloadavg()[0]]
        with checkpoint_of(plan) as checkpoint:
            subjects, left_out = open_subjects(plan, checkpoint, peers)
            bench = Bench(
                QUESTIONS, plan.batches, plan.answer_tokens, plan.runs, plan.place, plan.online,
                detail,
            )  # fmt: skip
            missing = [n for n in plan.contexts if not _file(results, n).is_file()]
            done, steps = 0, len(missing) * len(subjects) * bench.rounds

            def tick() -> None:
                nonlocal done
                done += 1
                if progress is not None:
                    progress(done, steps)

            backbone = next(s.backbone for s in subjects if s.backbone is not None)
            text, _ = source(plan.text)
            for tokens in missing:
                rows = bench.measure(subjects, context(text, backbone, tokens), tick)
                signatures.sign(_file(results, tokens).name)
                write_json(_file(results, tokens), rows)
            cold = measure_cold_start(str(checkpoint), plan.engine) if plan.cold_start else None
            del subjects
        by_method: dict[str, Any] = {}
        for tokens in plan.contexts:
            for name, row in _rows(_file(results, tokens)).items():
                by_method.setdefault(name, {})[str(tokens)] = row
        document = {
            "settings": settings,
            "load_average": [*load, os.getloadavg()[0]],
            "results": by_method,
            "cold_start": cold,
            "left_out": left_out,
            "notes": notes(plan),
            **signatures.of([_file(results, tokens).name for tokens in plan.contexts]),
        }
        write_json(results / DOCUMENT, document)
    return document


def _file(folder: Path, tokens: int) -> Path:
    return folder / f"context-{tokens}.json"


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return _ROWS.validate_python(read_json(path, ConfigError))
    except (ConfigError, ValueError, FileNotFoundError):
        raise ConfigError(f"'{path}' is damaged; remove it and run the command again") from None


def open_subjects(
    plan: Plan, checkpoint: Path | str, peers: Mapping[str, Opener] | None = None
) -> tuple[list[Subject], dict[str, str]]:
    """Open every method of a plan.

    Returns:
        The methods to measure, and the reason for each peer or trained baseline that cannot run.

    Raises:
        ConfigError: no method can run.
    """
    entries: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "k": plan.k,
        "max_new_tokens": plan.answer_tokens,
        "dtype": str(plan.type).removeprefix("torch."),
        "device": str(plan.place),
        "engine": plan.engine,
    }
    settings, peers = MethodSettings(**entries), peers or {}
    subjects: list[Subject] = []
    left_out: dict[str, str] = {}
    for name in (*plan.methods, *peers):
        try:
            if name in peers:
                opened = [peers[name](settings)]
            elif name == "sedem":
                opened, reasons = _open_sedem(settings, plan)
                left_out |= reasons
            else:
                opened = [_open_method(name, settings, plan)]
        except ConfigError as error:
            if name not in TRAINED and name not in peers:
                raise
            left_out[name] = str(error)
            continue
        for subject in opened:
            if subject.backbone is not None:
                subject.backbone.eos_token_id = NO_TOKEN
        subjects += opened
    if not subjects:
        raise ConfigError("; ".join(left_out.values()) or "there is no method; name at least one")
    return subjects, left_out


def _open_method(name: str, settings: MethodSettings, plan: Plan) -> Subject:
    """Open any method other than SeDeM."""
    if name in TRAINED:
        if plan.backbone is not None:
            raise ConfigError(f"'{name}' has no weights of the shape '{plan.backbone}'")
        settings = settings.with_changes(checkpoint=default_checkpoint(name))
    # k applies only to methods with a selection budget.
    method = open_method(
        name, settings if has_selection_budget(name) else settings.with_changes(k=None)
    )
    return Subject(name, method.reader, method.backbone, isinstance(method.reader, FullContext))


def _open_sedem(settings: MethodSettings, plan: Plan) -> tuple[list[Subject], dict[str, str]]:
    """Open SeDeM cold and warm, as one subject for each type of memory.

    Returns:
        The subjects, which share a model if their keeping is the same, and why "warm" is left out.

    Raises:
        ConfigError: SeDeM cannot be opened at all.
    """
    subjects: list[Subject] = []
    left_out = {}
    for weights, keeping in product(plan.weights, plan.kept):
        name = "sedem" if keeping == "cold" else f"sedem-{keeping}"
        rounded = "" if weights == FULL else f"-{weights}-weights"
        try:
            chosen = settings.with_changes(weights=weights)
            model = open_keeping(chosen, keeping, plan.block_context)
        except ConfigError as error:
            if (weights, keeping) == (FULL, "cold"):
                raise
            left_out[name + rounded] = str(error)
            continue
        kind_of_reader = BoundSedem if keeping == "cold" else WarmSedem
        for kind in plan.memory:
            subjects.append(
                Subject(
                    (name if kind == BFLOAT16 else f"{name}-{kind}") + rounded,
                    kind_of_reader(model, settings.k, decoding_of(settings), kind),
                    model.decoder,
                )
            )
    return subjects, left_out


def notes(plan: Plan) -> list[str]:
    """What a reader of the results must know, one sentence each."""
    sentences = []
    if plan.place.type != "cuda":
        gpu = "a GPU is here but was not asked for" if torch.cuda.is_available() else "no GPU here"
        sentences.append(f"{gpu}: these are times of the CPU")
    if plan.backbone:
        sentences.append(
            f"{plan.backbone} on random weights: times and bytes hold, answers are noise and are "
            "not shown; text is cut by sedem-nano's tokenizer"
        )
    if plan.block_context:
        sentences.append(
            f"SeDeM's block_context is set to '{plan.block_context}' whatever its checkpoint was "
            "trained with: times and bytes hold, answers are not shown"
        )
    _, description = source(plan.text)
    sentences.append(f"contexts are cut from {description}, which is repeated if it is too short")
    return sentences


@contextmanager
def checkpoint_of(plan: Plan) -> Iterator[Path | str]:
    """The checkpoint of a plan; one with random weights is removed after the bench."""
    if plan.backbone is None:
        yield plan.checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_random_checkpoint(
            plan.backbone.lower(), Path(folder), dtype=plan.type, device=plan.place
        )

"""`sedem bench`: turns a plan into one document of measurements, floors and provenance."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter

from sedem.baselines.registry import TRAINED
from sedem.bench.ceilings import Ceilings, measure_ceilings
from sedem.bench.cold_start import measure_cold_start
from sedem.bench.contexts import context, source
from sedem.bench.floors import Work, busy, floors
from sedem.bench.keeping import WarmSedem, open_keeping
from sedem.bench.layers import EncoderLayers
from sedem.bench.measure import Bench, Subject
from sedem.bench.peers import PEERS
from sedem.bench.plan import FULL, Plan
from sedem.bench.random_weights import write_random_checkpoint
from sedem.bench.selection import WARM_UP, measure_selection, selection_floor_ms
from sedem.demo import QUESTIONS
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.method import decoding_of
from sedem.evaluation.readers import BoundSedem, frozen_encoder
from sedem.evaluation.registry import METHODS, default_checkpoint, has_selection_budget, open_method
from sedem.evaluation.results import Signatures, claim, write_json
from sedem.evaluation.run import Progress
from sedem.quantization import BFLOAT16
from sedem.untrusted import read_json

NO_TOKEN = -1
"""An end token that no model generates, so that every answer has its full length."""

DOCUMENT = "bench.json"


def run_bench(
    plan: Plan, out: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure methods side by side.

    Args:
        plan: the methods, contexts and settings.
        out: folder for the document and for finished parts, from which an interrupted run resumes.
            None stores nothing.
        progress: called with the number of finished steps and of all steps.

    Returns:
        `settings`, `ceilings`, `results` by method and context length, `selection` by blocks,
        `cold_start` in processor seconds if the plan asks for it,
        `left_out` (methods that cannot run here, with the reason), `notes`, and the provenance of
        the last measurement, with its ceilings and load; `earlier` has those of earlier ones.

    Raises:
        SedemError: something cannot be opened or measured.
    """
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as folder:
        results = Path(str(folder))
        claim(results, plan.settings())
        files = [*results.glob("context-*.json"), *results.glob("blocks-*.json")]
        signatures = Signatures(results, sorted(f.name for f in files), DOCUMENT, plan.place)
        load = [os.getloadavg()[0]]
        ceilings = measure_ceilings(plan.place, plan.type)
        with _checkpoint(plan) as checkpoint:
            subjects, left_out = open_subjects(plan, checkpoint)
            missing = _MissingParts(plan, subjects, results, signatures, progress)
            missing.measure()
            cold = measure_cold_start(str(checkpoint), plan.engine) if plan.cold_start else None
            del subjects
        # Measured before and after, so that neither warm-up nor other processes lower a ceiling.
        ceilings = ceilings.best_with(measure_ceilings(plan.place, plan.type))
        load.append(os.getloadavg()[0])
        conditions: dict[str, Any] = {"ceilings": vars(ceilings), "load_average": load}
        if not missing.done and (results / DOCUMENT).is_file():
            before = _figures(results / DOCUMENT, _CONDITIONS)
            # Nothing new was measured, so the ceilings of the earlier measurement stay.
            conditions = {name: before[name] for name in conditions}
        measured = _with_floors(plan, results, Ceilings(**conditions["ceilings"]))
        document = {
            "settings": plan.settings(),
            **conditions,
            **measured,
            "cold_start": cold,
            "left_out": left_out,
            "notes": [*notes(plan), *busy(measured["results"])],
            **signatures.of([file.name for file in _files(plan, results)]),
        }
        write_json(results / DOCUMENT, document)
    return document


def open_subjects(plan: Plan, checkpoint: Path | str) -> tuple[list[Subject], dict[str, str]]:
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
    settings = MethodSettings(**entries)
    subjects: list[Subject] = []
    left_out: dict[str, str] = {}
    for name in plan.methods:
        try:
            if name == "sedem":
                opened, reasons = _open_sedem(settings, plan)
                left_out |= reasons
            else:
                opened = _open_method(name, settings, plan)
        except ConfigError as error:
            if name in METHODS and name not in TRAINED:
                raise
            left_out[name] = str(error)
            continue
        for subject in opened:
            if subject.backbone is not None:
                subject.backbone.eos_token_id = NO_TOKEN
        subjects += opened
    if not subjects:
        raise ConfigError("; ".join(left_out.values()))
    return subjects, left_out


def _open_method(name: str, settings: MethodSettings, plan: Plan) -> list[Subject]:
    """Open any method other than SeDeM."""
    if name in PEERS:
        peer = PEERS[name][0].open(settings)
        return [Subject(name, peer, peer.backbone)]
    if name in TRAINED:
        if plan.backbone is not None:
            raise ConfigError(f"'{name}' has no weights of the shape '{plan.backbone}'")
        settings = settings.with_changes(checkpoint=default_checkpoint(name))
    # k applies only to methods with a selection budget.
    method = open_method(
        name, settings if has_selection_budget(name) else settings.with_changes(k=None)
    )
    return [Subject(name, method.reader, method.backbone)]


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
                    None if subjects else EncoderLayers(model.config, frozen_encoder(settings)),
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


class _MissingParts:
    """The parts that a results folder lacks; each is stored as soon as it is measured."""

    def __init__(
        self,
        plan: Plan,
        subjects: Sequence[Subject],
        folder: Path,
        signatures: Signatures,
        progress: Progress | None,
    ) -> None:
        self.plan = plan
        self.subjects = subjects
        self.folder = folder
        self.signatures = signatures
        self.progress = progress
        self.bench = Bench(
            QUESTIONS, plan.batches, plan.answer_tokens, plan.runs, plan.place, plan.online
        )
        self.contexts = [n for n in plan.contexts if not _context_file(folder, n).is_file()]
        self.blocks = [n for n in plan.blocks if not _blocks_file(folder, n).is_file()]
        self.done = 0

    def measure(self) -> None:
        """Measure and store all missing parts."""
        backbone = next(s.backbone for s in self.subjects if s.backbone is not None)
        text, _ = source(self.plan.text)
        for tokens in self.contexts:
            documents = context(text, backbone, tokens)
            rows = self.bench.measure(self.subjects, documents, self._tick)
            self._store(_context_file(self.folder, tokens), rows)
        readers = [s.reader for s in self.subjects if isinstance(s.reader, BoundSedem)]
        for blocks in self.blocks:
            row = measure_selection(readers[0], blocks, QUESTIONS[0], self.plan.runs, self._tick)
            self._store(_blocks_file(self.folder, blocks), row)

    def _store(self, path: Path, measured: dict[str, Any]) -> None:
        self.signatures.sign(path.name)
        write_json(path, measured)

    def _tick(self) -> None:
        self.done += 1
        if self.progress is not None:
            steps = len(self.contexts) * len(self.subjects) * self.bench.rounds
            self.progress(self.done, steps + len(self.blocks) * (WARM_UP + self.plan.runs))


def _with_floors(plan: Plan, folder: Path, ceilings: Ceilings) -> dict[str, Any]:
    """The stored results by method and length, with their floors."""
    results: dict[str, Any] = {}
    for tokens in plan.contexts:
        rows = _figures(_context_file(folder, tokens), _CONTEXT)
        for name, row in rows.items():
            work = row["work"] and {
                stage: [Work(**part) for part in parts] for stage, parts in row["work"].items()
            }
            floor = floors(work, tokens, ceilings) if work else None
            results.setdefault(name, {})[str(tokens)] = {**row, "floor": floor}
    selection = {}
    for blocks in plan.blocks:
        row = _figures(_blocks_file(folder, blocks), _SELECTION)
        selection[str(blocks)] = {**row, "floor_ms": selection_floor_ms(row["work"], ceilings)}
    return {"results": results, "selection": selection}


class _Selection(BaseModel):
    """What the floor of a selection needs."""

    work: Work


class _Stages(BaseModel):
    """The work of each stage."""

    read: list[Work]
    first: list[Work]
    answer: list[Work]
    token: list[Work]


class _Measured(BaseModel):
    """What the floors of a method in one context need."""

    work: _Stages | None


class _Conditions(BaseModel):
    """What a document keeps if nothing new is measured."""

    ceilings: Ceilings
    load_average: list[float]


_SELECTION = TypeAdapter(_Selection)
_CONTEXT = TypeAdapter(dict[str, _Measured])
_CONDITIONS = TypeAdapter(_Conditions)


def _figures(path: Path, kind: TypeAdapter[Any]) -> Any:
    """Stored results, with the fields of `kind`.

    Raises:
        ConfigError: they cannot be read, or lack one of the fields.
    """
    try:
        figures = read_json(path, ConfigError)
        kind.validate_python(figures)
    except (ConfigError, ValueError, FileNotFoundError):
        raise ConfigError(f"'{path}' is damaged; remove it and run the command again") from None
    return figures


@contextmanager
def _checkpoint(plan: Plan) -> Iterator[Path | str]:
    """The checkpoint of a plan; one with random weights is removed after the bench."""
    if plan.backbone is None:
        yield plan.checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_random_checkpoint(
            plan.backbone.lower(), Path(folder), dtype=plan.type, device=plan.place
        )


def _files(plan: Plan, folder: Path) -> list[Path]:
    contexts = [_context_file(folder, tokens) for tokens in plan.contexts]
    return contexts + [_blocks_file(folder, blocks) for blocks in plan.blocks]


def _context_file(folder: Path, tokens: int) -> Path:
    return folder / f"context-{tokens}.json"


def _blocks_file(folder: Path, blocks: int) -> Path:
    return folder / f"blocks-{blocks}.json"

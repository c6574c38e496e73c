"""`sedem bench`: turns a plan into one document of measurements and provenance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter

from sedem.bench.contexts import context, source
from sedem.bench.measure import WARM_UP, Detail, measure
from sedem.bench.plan import Plan
from sedem.bench.subjects import Opener, checkpoint_of, open_subjects
from sedem.errors import ConfigError, SedemError
from sedem.evaluation.cost import PRESETS
from sedem.evaluation.results import Signatures, claim, write_json
from sedem.evaluation.run import Progress
from sedem.model import SeDeM
from sedem.types import Document
from sedem.untrusted import read_json

DOCUMENT = "bench.json"
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
    settings = {**plan.settings(), **({"peers": list(peers)} if peers else {})}
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as folder:
        results = Path(str(folder))
        claim(results, settings)
        kept = sorted(file.name for file in results.glob("context-*.json"))
        signatures = Signatures(results, kept, DOCUMENT, plan.place)
        load = [os.getloadavg()[0]]
        files = {tokens: results / f"context-{tokens}.json" for tokens in plan.contexts}
        with checkpoint_of(plan) as checkpoint:
            subjects, left_out = open_subjects(plan, checkpoint, peers)
            missing = {tokens: file for tokens, file in files.items() if not file.is_file()}
            done, steps = 0, len(missing) * len(subjects) * (WARM_UP + plan.runs)

            def tick() -> None:
                nonlocal done
                done += 1
                if progress is not None:
                    progress(done, steps)

            backbone = next(s.backbone for s in subjects if s.backbone is not None)
            text, _ = source(plan.text)
            for tokens, file in missing.items():
                documents = context(text, backbone, tokens)
                rows = measure(plan, subjects, documents, tick, detail)
                signatures.sign(file.name)
                write_json(file, rows)
            cold = measure_cold_start(str(checkpoint), plan.engine) if plan.cold_start else None
            del subjects
        by_method: dict[str, Any] = {}
        for tokens, file in files.items():
            for name, row in read_rows(file).items():
                by_method.setdefault(name, {})[str(tokens)] = row
        document = {
            "settings": settings,
            "load_average": [*load, os.getloadavg()[0]],
            "results": by_method,
            "cold_start": cold,
            "left_out": left_out,
            "notes": notes(plan),
            **signatures.of([file.name for file in files.values()]),
        }
        write_json(results / DOCUMENT, document)
    return document


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Read the finished measurements over one context.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        return _ROWS.validate_python(read_json(path, ConfigError))
    except (ConfigError, ValueError, FileNotFoundError):
        raise ConfigError(f"'{path}' is damaged; remove it and run the command again") from None


def notes(plan: Plan) -> list[str]:
    """What a reader of the results must know, one sentence each."""
    sentences = []
    if plan.place.type != "cuda":
        gpu = "a GPU is here but was not asked for" if torch.cuda.is_available() else "no GPU here"
        sentences.append(f"{gpu}: these are times of the CPU")
    if plan.backbone:
        whose = "sedem-nano's" if plan.backbone in PRESETS else "its own"
        sentences.append(
            f"{plan.backbone} on random weights: times and bytes hold, answers are noise and are "
            f"not shown; text is cut by {whose} tokenizer"
        )
    if plan.block_context:
        sentences.append(
            f"SeDeM's block_context is set to '{plan.block_context}' whatever its checkpoint was "
            "trained with: times and bytes hold, answers are not shown"
        )
    _, description = source(plan.text)
    sentences.append(f"contexts are cut from {description}, which is repeated if it is too short")
    return sentences


# Cold start: processor time of one `sedem ask` in a fresh process, on a small bank

PARTS = ("imports", "opening", "first_answer", "all")
SMALL = Document("lease.txt", "The rent is 1,240 crowns a month, due on the third.")
QUESTION = "What is the rent?"

# What `sedem ask` runs, with the clock read between its parts.
PROCESS = """
import json, os, sys, time
clock = [0.0]
note = lambda: clock.append(sum(os.times()[:2]))
import sedem.cli.main
from sedem.bank.memory_bank import MemoryBank
from sedem.cli.options import open_model
from sedem.model import SeDeM
note()
bank, model = MemoryBank.open(sys.argv[1]), open_model(sys.argv[2], sys.argv[3])
bank.check_made_by(model.fingerprint())
note()
model.answer(bank, sys.argv[4])
note()
print(json.dumps([after - before for before, after in zip(clock, clock[1:])] + clock[-1:]))
"""


def measure_cold_start(checkpoint: str, engine: str, runs: int = 5) -> dict[str, float]:
    """Answer one question in each of several fresh processes.

    Returns:
        Median processor seconds, summed over threads, by the names in `PARTS`. Process exit is not
        included.

    Raises:
        SedemError: a process fails; the message contains the last line it wrote.
    """
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        bank = Path(folder) / "small.bank"
        SeDeM.from_pretrained(checkpoint).read([SMALL]).save(bank)
        command = [sys.executable, "-c", PROCESS, str(bank), checkpoint, engine, QUESTION]
        for _ in range(runs):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
                raise SedemError(f"a process that asks '{checkpoint}' ended with: {reason}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return dict(zip(PARTS, (median(times) for times in zip(*found, strict=True)), strict=True))

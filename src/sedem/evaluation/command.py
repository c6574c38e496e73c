"""`sedem eval`: from names on a command line to metrics."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sedem.baselines.registry import TRAINED, reader_class
from sedem.baselines.settings import method_of
from sedem.config import SedemConfig
from sedem.data.examples import ExampleSet
from sedem.data.question_sets import counts_tokens, identify, open_examples, sniff
from sedem.durable_files import sha256
from sedem.errors import ConfigError
from sedem.evaluation.method import Setting
from sedem.evaluation.registry import open_method
from sedem.evaluation.run import Progress, evaluate, sample
from sedem.inference.checkpoint import BACKBONE, EXTRA_ENTRIES, locate
from sedem.inference.prompts import ANSWER_LIMIT, LONG_ANSWER_LIMIT
from sedem.method.selector import Budget

DTYPES = ("float32", "bfloat16")

LONG_ANSWERS = ("qasper", "ruler-qa2")
"""Sets with the long answer limit (appendix Implementation Details)."""

SEEDED = ("squad", "exact-facts", "cloze")
"""Sets whose contexts are drawn with a seed."""


def run_evaluation(
    method: str,
    data: str | Path,
    *,
    checkpoint: str,
    schema: str | None = None,
    records: str | None = None,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    limit: int | None = None,
    k: Budget | None = None,
    control: str = "selected",
    max_new_tokens: int | None = None,
    batch: int = 32,
    shift: int = 0,
    memory: str = "bfloat16",
    dtype: str = "float32",
    engine: str = "auto",
    seed: int = 0,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a method by name on a set of questions.

    Args:
        method: a name in `METHODS`.
        data: the set, as a file.
        checkpoint: folder or hub id of the model.
        schema: of the file; None means that it is found out.
        records: which records of the file, as "start:stop".
        split: of a set that has several.
        options: of the schema's loader.
        limit: a seeded sample of so many questions; None means all.
        k: selection budget.
        control: which blocks SeDeM uses.
        max_new_tokens: answer limit; None means the set's own.
        batch: questions that SeDeM answers together; their times are one.
        shift: tokens by which SeDeM moves every boundary between segments.
        memory: what SeDeM stores slots as: bfloat16, int8 or fp8.
        dtype: type of the backbone.
        engine: what runs SeDeM.
        seed: of sample and distractors.
        out: folder for predictions and metrics; None keeps nothing.
        progress: called with examples done and examples in all.

    Returns:
        Metrics with intervals, counts, settings and provenance.

    Raises:
        SedemError: something in this is not known or cannot be read.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is '{dtype}'; it can be {' or '.join(DTYPES)}")
    if batch < 1:
        raise ConfigError(f"batch is {batch}; it must be at least 1")
    found, examples, identity = _open(data, schema, records, split, seed, options or {}, checkpoint)
    if max_new_tokens is None:
        max_new_tokens = LONG_ANSWER_LIMIT if found in LONG_ANSWERS else ANSWER_LIMIT
    setting = Setting(
        checkpoint, k, control, max_new_tokens, dtype, batch, shift, engine=engine, memory=memory
    )
    settings = {
        "method": method,
        **identity,
        "weights_sha256": sha256(*weight_files(locate(checkpoint), method)),
        "schema": found,
        "records": records,
        "split": split,
        "options": dict(options or {}),
        "limit": limit,
        "seed": seed,
        **asdict(setting),
        "dropped": dict(examples.dropped),
    }
    opened, chosen = open_method(method, setting), sample(examples.examples, limit, seed)
    if opened.backbone is not None:
        # A checkpoint may only name its backbone, and another may come to stand there.
        settings["backbone_digest"] = opened.backbone.digest
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as folder:
        return evaluate(opened, chosen, settings, Path(str(folder)), progress)


def _open(
    data: str | Path,
    schema: str | None,
    records: str | None,
    split: str | None,
    seed: int,
    options: Mapping[str, Any],
    checkpoint: str,
) -> tuple[str, ExampleSet, dict[str, str | None]]:
    """The schema of a set, its examples, and what says which content it had."""
    found = schema or sniff(data)
    given: dict[str, Any] = {"seed": seed} if found in SEEDED else {}
    if counts_tokens(found):
        given["tokenizer"] = _tokenizer(checkpoint)
    identity = identify(data, split)
    examples = open_examples(
        data,
        found,
        records=records,
        split=split,
        revision=identity.get("revision"),
        **{**given, **options},
    )
    return found, examples, identity


def _tokenizer(checkpoint: str) -> str:
    """Whose tokens make up the length of a context: those of the backbone that reads it."""
    folder = locate(checkpoint)
    if (method := method_of(folder)) != "sedem":
        return reader_class(method).Config.load(folder).backbone
    encoder = SedemConfig.load(folder, extra=EXTRA_ENTRIES).encoder
    return str(folder) if encoder == BACKBONE else encoder


def weight_files(checkpoint: Path, method: str) -> list[Path]:
    """What decides a method's answers: all weights of the checkpoint, or its backbone's alone."""
    own = method == "sedem" or method in TRAINED
    return sorted((checkpoint if own else checkpoint / BACKBONE).rglob("*.safetensors"))

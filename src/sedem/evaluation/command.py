"""`sedem eval`: from names on a command line to metrics."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sedem.checkpoint import BACKBONE, locate
from sedem.data.catalog import open_examples, sniff
from sedem.errors import ConfigError
from sedem.evaluation.methods import Setting, open_method
from sedem.evaluation.run import Progress, evaluate, sample
from sedem.selector import Budget

DTYPES = ("float32", "bfloat16")


def run_evaluation(
    method: str,
    data: Path,
    *,
    checkpoint: str,
    schema: str | None = None,
    records: str | None = None,
    limit: int | None = None,
    k: Budget | None = None,
    control: str = "selected",
    max_new_tokens: int = 64,
    dtype: str = "float32",
    seed: int = 0,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a method by name on a file of questions.

    Args:
        method: a name in `METHODS`.
        data: the file.
        checkpoint: folder or hub id of the model.
        schema: of the file; None means that it is found out.
        records: which records of the file, as "start:stop".
        limit: a seeded sample of so many questions; None means all.
        k: selection budget.
        control: which blocks SeDeM uses.
        max_new_tokens: answer limit.
        dtype: type of the backbone.
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
    found = schema or sniff(data)
    options: dict[str, Any] = {"seed": seed} if found in ("squad", "exact-facts", "cloze") else {}
    examples = open_examples(data, found, records=records, **options)
    setting = Setting(checkpoint, k, control, max_new_tokens, dtype)
    settings = {
        "method": method,
        "data": data.name,
        "data_sha256": _digest(data),
        "weights_sha256": _digest(*_weight_files(locate(checkpoint), method)),
        "schema": found,
        "records": records,
        "limit": limit,
        "seed": seed,
        **asdict(setting),
        "dropped": dict(examples.dropped),
    }
    opened, chosen = open_method(method, setting), sample(examples.examples, limit, seed)
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as folder:
        return evaluate(opened, chosen, settings, Path(str(folder)), progress)


def _weight_files(checkpoint: Path, method: str) -> list[Path]:
    """What decides a method's answers: all weights of the checkpoint, or its backbone's alone."""
    folder = checkpoint if method == "sedem" else checkpoint / BACKBONE
    return sorted(folder.rglob("*.safetensors"))


def _digest(*paths: Path) -> str:
    """SHA-256 of some files: a name may come to stand for another content between two runs."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()

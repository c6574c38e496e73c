"""Answers at several budgets K: documents are read once, and differences to K=1 are paired."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from sedem.config import SedemConfig
from sedem.data.examples import Example
from sedem.evaluation.compare import compare
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import SedemMethod, open_sedem
from sedem.evaluation.records import Record, measure, to_record
from sedem.inference.checkpoint import ADAPTER, EXTRA_ENTRIES, WEIGHTS_FILE
from sedem.method.guidance import Guidance
from sedem.method.selector import Budget
from sedem.provenance import provenance

BUDGETS: tuple[Budget, ...] = (1, 2, 4, 8, "all")
METRICS = ("f1", "em")
FORMS = {
    "joint": {"block_context": "joint", "guidance": False},
    "guided": {"block_context": "independent", "guidance": True},
}
"""Settings of a checkpoint that are changed without training, by form."""
BATCH = 16


def with_form(checkpoint: Path, form: str, folder: Path) -> Path:
    """Write a checkpoint anew with other settings of attention, and the same weights.

    Args:
        checkpoint: the checkpoint.
        form: a key of `FORMS`. Guidance starts with its tau before any training.
        folder: where to write it; an existing one is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = SedemConfig.load(checkpoint, extra=EXTRA_ENTRIES)
    if (checkpoint / config.encoder).is_dir():
        config = config.with_changes(encoder=str((checkpoint / config.encoder).resolve()))
    config.with_changes(**FORMS[form]).save(folder)
    weights = load_file(checkpoint / WEIGHTS_FILE)
    weights = {name: t for name, t in weights.items() if not name.startswith("guidance.")}
    if FORMS[form]["guidance"]:
        weights["guidance.log_tau"] = Guidance().log_tau.detach()
    save_file(weights, folder / WEIGHTS_FILE)
    if (checkpoint / ADAPTER).is_dir():
        shutil.copytree(checkpoint / ADAPTER, folder / ADAPTER)
    return folder


def answers_by_budget(
    folder: Path,
    examples: Sequence[Example],
    *,
    condition: str,
    dtype: str,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Scores at every K of `BUDGETS`, and how they differ from those at K=1.

    Args:
        folder: the checkpoint.
        examples: the questions.
        condition: form in which the decoder reads the blocks; empty means the model's own.
        dtype: type of the backbone.
        max_new_tokens: answer limit.

    Returns:
        `budgets` has the scores by K, and `change` the paired differences to K=1.
    """
    settings = MethodSettings(
        checkpoint=str(folder), k=1, dtype=dtype, max_new_tokens=max_new_tokens, batch=BATCH
    )
    method = open_sedem(settings)
    assert isinstance(method, SedemMethod)
    records: dict[str, list[Record]] = {str(k): [] for k in BUDGETS}
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        # The same banks for every K: blocks are read once, and kept keys and values are used again.
        asked = method.requests(batch)
        for k in BUDGETS:
            requests = [
                replace(
                    request,
                    k=k,
                    blocks=method.best_that_fit(request.bank, example) if k == "all" else None,
                    condition=condition or None,
                )
                for request, example in zip(asked, batch, strict=True)
            ]
            found = method.model.answer_requests(requests, method.decoding)
            records[str(k)] += [to_record(*pair) for pair in zip(batch, found, strict=True)]
    first = records[str(BUDGETS[0])]
    return {
        "budgets": {k: measure(found) for k, found in records.items()},
        "change": {
            k: {name: one.to_dict() for name, one in compare(first, found, METRICS).items()}
            for k, found in records.items()
            if found is not first
        },
        "settings": {
            **{name: getattr(method.model.config, name) for name in FORMS["joint"]},
            "tau": None if method.model.guidance is None else float(method.model.guidance.tau),
            "condition": condition or method.model.config.condition,
            "dtype": dtype,
            "max_new_tokens": max_new_tokens,
            "examples": len(examples),
        },
        **provenance(),
    }

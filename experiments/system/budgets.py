"""Answers at several budgets K: documents are read once, and differences to K=1 are paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.system.forms import FORMS, PAPER_FORM
from sedem.data.examples import Example
from sedem.evaluation.compare import compare
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import SedemMethod, open_sedem
from sedem.evaluation.records import Record, measure, to_record
from sedem.guidance.budgets import Budget
from sedem.provenance import provenance

BUDGETS: tuple[Budget, ...] = (1, 2, 4, 8, "all")
METRICS = ("f1", "em")
BATCH = 16


def answers_by_budget(
    folder: Path,
    examples: Sequence[Example],
    *,
    condition: str,
    dtype: str,
    max_new_tokens: int,
    kept: str = "",
) -> dict[str, Any]:
    """Scores at every K of `BUDGETS`, and how they differ from those at K=1.

    All blocks as text do not fit a small decoder's positions, so text has no K "all".

    Args:
        folder: the checkpoint.
        examples: the questions.
        condition: form in which the decoder reads the blocks; empty means the model's own.
        dtype: data type of the backbone.
        max_new_tokens: answer limit.
        kept: type in which keys and values of blocks are kept; empty means unchanged.

    Returns:
        `budgets` has the scores by K, and `change` the paired differences to K=1.
    """
    settings = MethodSettings(
        checkpoint=str(folder),
        k=1,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        batch=BATCH,
        kept_dtype=kept or None,
    )
    method = open_sedem(settings)
    assert isinstance(method, SedemMethod)
    budgets = [k for k in BUDGETS if k != "all" or condition != "text"]
    records: dict[str, list[Record]] = {str(k): [] for k in budgets}
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        # The same banks for every K: blocks are read once, and kept keys and values are reused.
        asked = method.requests(batch)
        for k in budgets:
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
    first = records[str(budgets[0])]
    return {
        "budgets": {k: measure(found) for k, found in records.items()},
        "change": {
            k: {name: one.to_dict() for name, one in compare(first, found, METRICS).items()}
            for k, found in records.items()
            if found is not first
        },
        "form": {
            **{name: getattr(method.model.config, name) for name in FORMS[PAPER_FORM]},
            "tau": None if method.model.guidance is None else float(method.model.guidance.tau),
            "condition": condition or method.model.config.condition,
            "dtype": dtype,
            "kept_dtype": kept or None,
            "max_new_tokens": max_new_tokens,
            "examples": len(examples),
        },
        **provenance(),
    }

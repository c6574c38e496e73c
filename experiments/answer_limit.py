"""Answers of at most 32 and of at most 64 new tokens. The paper has no such table."""

from __future__ import annotations

from typing import Any

from experiments.shipped_model import MAX_NEW_TOKENS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model

SETS = ("hotpotqa", "2wiki", "musique", "qasper")
ROWS: dict[str, dict[str, Any]] = {
    "K=2": {"k": 2},
    "K=4": {"k": 4},
    "no memory": {"control": "none"},
}
LIMITS = {("qasper", "K=4"): 500, ("qasper", "no memory"): 500}
"""Number of questions at the shorter limit at nano, if it differs from the set's own."""


def numbers(scale: Scale) -> list[Number]:
    """F1 of the main model at both limits."""
    result = []
    for key in SETS:
        questions = scale.sets[key]
        for row, fields in ROWS.items():
            limit = LIMITS.get((key, row)) if scale.name == "nano" else None
            short = {**fields, "k": fields.get("k", 2), "limit": limit}
            for tokens, changes in (
                (MAX_NEW_TOKENS, {**short, "max_new_tokens": MAX_NEW_TOKENS}),
                (questions.max_new_tokens, fields),
            ):
                cell = Cell(variant=main_model(scale), questions=key, **changes)
                column = f"{questions.title} F1, {tokens} tokens"
                result.append(Number(row, column, None, cell))
    return result


STUDY = Study(
    "answer_limit",
    "The shipped model's answers by their limit",
    numbers,
    "The paper gives no numbers. On COVID-QA the rows K=4 and no memory have 491 questions at 32 "
    "tokens and 200 at 64.",
)

if __name__ == "__main__":
    command(STUDY)()

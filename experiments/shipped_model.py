"""The shipped model, its controls and the frozen backbone. The paper has no such table."""

from __future__ import annotations

from typing import Any

from experiments import more_memory
from experiments.system import study
from experiments.system.budgets import BUDGETS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import main_model

MAX_NEW_TOKENS = 32
NAME = "sedem-nano"
BEFORE = "before guided training, in the paper's form"
SCORES = {"exact-facts": "em"}
"""The metric of a set, if it is not F1."""

SEDEM: dict[str, dict[str, Any]] = {
    "K=1": {"k": 1},
    "K=2": {"k": 2},
    "K=4": {"k": 4, "limit": 500},
    "K=2, gold first": {"k": 2, "control": "gold", "limit": 500},
    "K=all": {"k": "all", "limit": 200},
    "K=2, wrong blocks": {"k": 2, "control": "wrong", "limit": 500},
    "no memory": {"k": 2, "control": "none", "limit": 500},
}
"""Ways to answer from memory in the paper's form: table rows, with fields of their cells."""

TEXT: dict[str, dict[str, Any]] = {
    "every paragraph as text": {"method": "full-context", "limit": 200},
    "BM25's two paragraphs as text": {"method": "bm25", "k": 2, "limit": 200},
}
"""Ways to answer from text, with fewer questions: a base model does not stop by itself."""


def numbers(scale: Scale) -> list[Number]:
    """Score and recall by way to answer, on the sets of the ablations."""
    model, result = main_model(scale), []
    for k in map(str, BUDGETS):
        for key in scale.ablation:
            metric = SCORES.get(key, "f1")
            column = f"{scale.sets[key].title} {study.SCORES[metric]}"
            cell = more_memory.answers(scale, key)
            row = f"{NAME}, K={k}"
            result.append(Number(row, column, None, cell, f"budgets.{k}.{metric}"))
    for prefix, rows in (
        (f"{NAME} {BEFORE}, ", SEDEM),
        ("frozen backbone, ", TEXT),
    ):
        for label, fields in rows.items():
            for key in scale.ablation:
                cell = answers(scale, key, fields)
                title = scale.sets[key].title
                result += scores(prefix + label, title, cell, _metrics(key, fields))
    for key in scale.ablation:
        cell = Cell("block-recall", "bm25", model, questions=key)
        title = scale.sets[key].title
        result += scores("BM25 over the same blocks", title, cell, ("recall@2",))
    return result


def answers(scale: Scale, questions: str, fields: dict[str, Any]) -> Cell:
    """A row's answers to a set."""
    limit = fields.get("limit")
    if scale.name == "smoke":
        limit = scale.limit
    changes = {**fields, "limit": limit, "max_new_tokens": MAX_NEW_TOKENS}
    return Cell(variant=main_model(scale), questions=questions, **changes)


def _metrics(key: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """The metric of a set, and recall if two blocks or paragraphs are selected."""
    score = SCORES.get(key, "f1")
    selects = fields.get("control", "selected") == "selected" and fields.get("k", 1) != 1
    return (score, "recall@2") if selects else (score,)


STUDY = Study(
    "shipped_model",
    "The shipped model, its controls and the frozen backbone",
    numbers,
    "The paper gives no numbers. Answers have at most 32 new tokens.",
    drawn=("F1", "EM"),
)

if __name__ == "__main__":
    command(STUDY)()

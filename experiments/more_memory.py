"""Answers by K with and without guided attention. The paper has no such table."""

from __future__ import annotations

from experiments.system.budgets import BUDGETS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import SCORES, Number, Study, command
from experiments.system.variants import guided_model, main_model
from sedem.guidance.budgets import Budget

LIMITS = {"squad-10": 100, "exact-facts": 100, "hotpotqa": 300, "2wiki": 100, "musique": 40}
"""Number of questions of each set."""
PAPER, BEFORE, TRAINED = "the paper's form", "guided, same weights", "guided, trained further"
PAPER_LIMITS: dict[Budget, int] = {4: 500, "all": 200}
"""Number of questions of the ablation sets in the paper's form, by K."""


def numbers(scale: Scale) -> list[Number]:
    """F1, or EM of exact facts, by form and K."""
    result = []
    for form in (PAPER, BEFORE, TRAINED):
        for k in BUDGETS:
            for key in (key for key in LIMITS if key in scale.sets):
                metric = "em" if key == "exact-facts" else "f1"
                column = f"{scale.sets[key].title} {SCORES[metric]}"
                row = f"{form}, K={k}"
                if form != PAPER:
                    cell: Cell | None = answers(scale, key, trained=form == TRAINED)
                    place = f"budgets.{k}.{metric}"
                    result.append(Number(row, column, None, cell, place))
                elif (cell := in_paper_form(scale, key, k)) is not None:
                    result.append(Number(row, column, None, cell, metric))
    return result


def answers(scale: Scale, questions: str, *, trained: bool = True) -> Cell:
    """Guided answers to a set at every K, by the model trained with guidance or before that."""
    nano = scale.name == "nano"
    return Cell(
        "budgets",
        variant=guided_model(scale) if trained else main_model(scale),
        questions=questions,
        form="" if trained else "guided",
        limit=LIMITS[questions] if nano else scale.limit,
        max_new_tokens=32 if nano else None,
        dtype="float32",
    )


def in_paper_form(scale: Scale, questions: str, k: Budget) -> Cell | None:
    """Answers to a set in the paper's form, as measured by other studies; None if missing."""
    model = main_model(scale)
    if questions in scale.ablation:
        if k == 8:
            return None
        limit = PAPER_LIMITS.get(k) if scale.name == "nano" else scale.limit
        return Cell(variant=model, questions=questions, k=k, limit=limit, max_new_tokens=32)
    if k == 8 and questions == "musique":
        return None
    limit = scale.costly_limit if k == "all" else None
    return Cell(variant=model, questions=questions, k=k, limit=limit)


STUDY = Study(
    "more_memory",
    "More memory: answers by K, with and without guided attention",
    numbers,
    "The paper gives no numbers. Guided answers have at most 32 new tokens.",
)

if __name__ == "__main__":
    command(STUDY)()

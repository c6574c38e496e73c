"""Answers by K with and without guided attention. Ours; the paper has no such table."""

from __future__ import annotations

from experiments.system.budgets import BUDGETS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import SCORES, Number, Study, command
from experiments.system.variants import main_model

FORMS = {"": "the paper's form", "guided": "guided"}
"""What is compared: rows of the table, by form."""
LIMITS = {"squad-10": 100, "exact-facts": 100, "hotpotqa": 100, "2wiki": 100, "musique": 40}
"""Questions of each set."""


def numbers(scale: Scale) -> list[Number]:
    """F1, or EM of exact facts, by K and form."""
    result = []
    for form, label in FORMS.items():
        for k in map(str, BUDGETS):
            for key in LIMITS:
                if key not in scale.sets:
                    continue
                metric = "em" if key == "exact-facts" else "f1"
                column = f"{scale.sets[key].title} {SCORES[metric]}"
                cell = answers(scale, key, form)
                row = f"{label}, K={k}"
                result.append(Number(row, column, None, cell, f"budgets.{k}.{metric}"))
    return result


def answers(scale: Scale, questions: str, form: str) -> Cell:
    """Answers to a set at every K, in a form of attention."""
    nano = scale.name == "nano"
    return Cell(
        "budgets",
        variant=main_model(scale),
        questions=questions,
        form=form,
        limit=LIMITS[questions] if nano else scale.limit,
        max_new_tokens=32 if nano else None,
        dtype="float32",
    )


STUDY = Study(
    "more_memory",
    "More memory: answers by K, with and without guided attention",
    numbers,
    "The paper gives no numbers. Answers have at most 32 new tokens.",
)

if __name__ == "__main__":
    command(STUDY)()

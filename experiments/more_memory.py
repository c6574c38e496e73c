"""Answers by K with and without guided attention. Ours; the paper has no such table."""

from __future__ import annotations

from experiments.system.budgets import BUDGETS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import SCORES, Number, Study, command
from experiments.system.variants import main_model

FORMS = {
    "joint": "the paper's form",
    "guided": "guided, independent, not trained so",
    "": "guided, independent, trained so",
}
"""What is compared: rows of the table, by form."""
LIMITS = {"squad-10": 100, "exact-facts": 100, "hotpotqa": 100, "2wiki": 100, "musique": 40}
"""Questions of each set."""


def numbers(scale: Scale) -> list[Number]:
    """F1 and EM by K and form."""
    model, result = main_model(scale), []
    for form, label in FORMS.items():
        for k in map(str, BUDGETS):
            for key, limit in LIMITS.items():
                if key not in scale.sets:
                    continue
                cell = Cell(
                    "budgets",
                    variant=model,
                    questions=key,
                    form=form,
                    limit=limit if scale.name == "nano" else scale.limit,
                    max_new_tokens=32 if scale.name == "nano" else None,
                    dtype="float32",
                )
                metric = "em" if key == "exact-facts" else "f1"
                column = f"{scale.sets[key].title} {SCORES[metric]}"
                row = f"{label}, K={k}"
                result.append(Number(row, column, None, cell, f"budgets.{k}.{metric}"))
    return result


STUDY = Study(
    "more_memory",
    "More memory: answers by K, with and without guided attention",
    numbers,
    "Answers have at most 32 new tokens.",
)

if __name__ == "__main__":
    command(STUDY)()

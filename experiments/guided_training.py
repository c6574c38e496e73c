"""What training with guided attention achieves, and which changes help. Not in the paper."""

from __future__ import annotations

from experiments.system.budgets import BUDGETS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import GUIDED, Variant, main_model

SHORT = ("optimization.steps=200", "run.save_every=100", "run.keep=1")
"""Overrides that set the stage-2 steps of every row."""
RECIPE = GUIDED[0]
RECALLED = (1, 2)


def rows(scale: Scale) -> dict[str, Variant]:
    """The main model in guided form, and the ways to train it further."""
    short = SHORT if scale.name == "nano" else ()
    labels = ("losses.select=0", "losses.conditioning=selected")
    return {
        "before training": main_model(scale),
        "stage 2, guided": Variant("guided-base", stage2=short, further=(RECIPE,)),
        "a new selector, with evidence labels": Variant(
            "guided-new-selector", stage2=short, further=(RECIPE,), new_selector=True
        ),
        "a new selector, from answers alone": Variant(
            "guided-unlabelled", stage2=(*short, *labels), further=(RECIPE,), new_selector=True
        ),
    }


def numbers(scale: Scale) -> list[Number]:
    """Losses of the reference answer by K, and recall of the evidence, on held-out questions."""
    return [n for label, variant in rows(scale).items() for n in of_row(label, variant, scale)]


def of_row(label: str, variant: Variant, scale: Scale) -> list[Number]:
    """The numbers of one model."""
    result = []
    for key, questions in scale.held_out.items():
        cell = losses(variant, key)
        for k in BUDGETS:
            if k != "all":
                column = f"{questions.title}, loss at K={k}"
                result.append(Number(label, column, None, cell, f"budgets.{k}", digits=3))
        for k in RECALLED:
            column = f"{questions.title}, recall@{k}"
            result.append(Number(label, column, None, cell, f"recall.{k}"))
    return result


def losses(variant: Variant, questions: str) -> Cell:
    """Losses by K of a model in guided form."""
    return Cell("losses", variant=variant, questions=questions, form="guided", dtype="float32")


STUDY = Study(
    "guided_training",
    "Stage 2 with guided attention: answer losses by K on held-out questions",
    numbers,
    "The paper gives no numbers. The blocks are the selector's K best.",
)

if __name__ == "__main__":
    command(STUDY)()

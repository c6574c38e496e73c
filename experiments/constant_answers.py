"""The constant answer for every set: the score reached without reading. Not in the paper."""

from __future__ import annotations

from experiments.system.constants import RULER, constant_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores

METRICS = ("f1", "rouge_l", "em")


def numbers(scale: Scale) -> list[Number]:
    """The answer chosen on training questions, its score there, and its score in evaluation."""
    result = []
    for key, questions in scale.sets.items():
        if questions.schema == RULER:
            continue
        cell, row = constant_cell(key), questions.title
        result.append(Number(row, "constant answer", None, cell, "settings.answer"))
        if scale.name != "smoke":
            chosen = "settings.chosen"
            result += [
                Number(row, "training questions", None, cell, f"{chosen}.questions", digits=0),
                Number(row, "F1 on them", None, cell, f"{chosen}.f1"),
            ]
        result.append(Number(row, "evaluation questions", None, cell, "counts.examples", digits=0))
        result += scores(row, "", cell, METRICS)
    return result


STUDY = Study(
    "constant_answers",
    "The constant answer of every set",
    numbers,
    "The paper gives no numbers. The answer has the best mean F1 on training questions.",
    drawn=("F1",),
)

if __name__ == "__main__":
    command(STUDY)()

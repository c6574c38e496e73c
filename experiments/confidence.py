"""How well scores predict whether the documents contain the evidence. Not in the paper."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.confidence import DISTRACTORS
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import guided_model

COLUMNS = {
    "AUROC": ("auroc", 3),
    "AUROC of the best score alone": ("auroc_of_one_feature.best", 3),
    "AUROC of its lead alone": ("auroc_of_one_feature.lead", 3),
    "calibration error": ("calibration_error", 3),
    "% declined, evidence there": ("declined_with_evidence", 1),
    "% declined, evidence missing": ("declined_without_evidence", 1),
}
"""Columns, with the name in the result and the number of decimals."""


def numbers(scale: Scale) -> list[Number]:
    """Metrics of the confidence by the number of paragraphs per question."""
    limit = scale.limit if scale.name == "smoke" else None
    questions = "squad-10" if "squad-10" in scale.sets else scale.ablation[0]
    cell = Cell("confidence", variant=guided_model(scale), questions=questions, limit=limit)
    return [
        Number(
            f"{1 + distractors} paragraphs",
            column,
            None,
            cell,
            f"by_paragraphs.{1 + distractors}.{metric}",
            digits=digits,
        )
        for distractors in DISTRACTORS
        for column, (metric, digits) in COLUMNS.items()
    ]


STUDY = Study(
    "confidence",
    "How well scores tell whether the evidence is in the documents",
    numbers,
    "The paper gives no numbers.",
    drawn=("AUROC",),
)

if __name__ == "__main__":
    command(STUDY)()

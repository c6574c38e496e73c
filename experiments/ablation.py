"""What every ablation shows of its variants: answers, loss of answers, losses of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number
from experiments.variants import Variant

Row = tuple[str, Variant, Mapping[str, float | None]]
"""A label, its variant, and the paper's scores by set ("hotpotqa") and metric ("f1")."""


def numbers(
    scale: Scale, rows: Sequence[Row], metrics: Sequence[str] = ("f1",), only: str | None = None
) -> list[Number]:
    """The numbers of an ablation.

    Args:
        scale: which.
        rows: variants; paper scores by "set metric", such as "hotpotqa f1".
        metrics: scores of answers that are shown.
        only: the one set that the paper asked, at paper scale.
    """
    result: list[Number] = []
    for label, variant, paper in rows:
        papers = dict(paper)
        for questions in asked(scale, only):
            title = scale.sets[questions].title
            cell = answers(scale, variant, questions)
            for metric in metrics:
                known = papers.pop(f"{questions} {metric}", None)
                result.append(Number(label, f"{title} {NAMES[metric]}", known, cell, metric))
            loss = Cell("loss", variant=variant, questions=questions, limit=scale.limit)
            result.append(
                Number(label, f"{title} answer loss", None, loss, "answer_loss", digits=3)
            )
        for key, value in papers.items():
            questions, metric = key.split()
            column = f"{PAPER_SETS[questions]} {NAMES[metric]} (28 layers)"
            result.append(Number(label, column, value, metric=""))
        memory = Cell("memory", variant=variant)
        for target in ("continuation", "recall"):
            metric = f"{target}.memory"
            result.append(Number(label, f"{target} loss", None, memory, metric, digits=3))
    return result


def asked(scale: Scale, only: str | None) -> tuple[str, ...]:
    """The sets of an ablation: the paper's own at paper scale, elsewhere the scale's."""
    return (only,) if only and scale.name == "paper" else scale.ablation


def subset(scale: Scale) -> tuple[str, ...]:
    """Stage-2 overrides of the depth studies: 3,000 training questions of HotpotQA."""
    if scale.name != "paper":
        return ()
    return ("data.training=[{path: hotpotqa, set: hotpotqa, records: ':3000'}]",)


def answers(
    scale: Scale, variant: Variant, questions: str, k: int | str | None = None, shift: int = 0
) -> Cell:
    """Answers of a variant with selection taken out, or with a budget of its own."""
    disabled, control = scale.disabled
    if variant.k and disabled != "all":
        disabled = variant.k
    return Cell(
        variant=variant,
        questions=questions,
        k=disabled if k is None else k,
        control=control if k is None else "selected",
        shift=shift,
        limit=scale.limit,
    )


NAMES = {"f1": "F1", "em": "EM", "rouge_l": "ROUGE-L"}
PAPER_SETS = {"hotpotqa": "HotpotQA", "qasper": "QASPER"}

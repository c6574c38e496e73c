"""The numbers of every ablation: scores and loss of answers, and losses of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import SCORES, Number, scores
from experiments.system.variants import Variant, without_selector

Row = tuple[str, Variant, Mapping[str, float | None]]
"""A label, its variant, and the paper's scores by set and metric, such as "hotpotqa f1"."""

PAPER_SETS = {"hotpotqa": "HotpotQA", "qasper": "QASPER"}


def numbers(
    scale: Scale, rows: Sequence[Row], metrics: Sequence[str] = ("f1",), only: str | None = None
) -> list[Number]:
    """The numbers of an ablation.

    Args:
        scale: sets and limits.
        rows: the variants, with the paper's scores.
        metrics: answer scores to show.
        only: the one set that the paper uses; at paper scale it is the only one.
    """
    result: list[Number] = []
    for label, variant, paper in rows:
        left, trained = dict(paper), without_selector(scale, variant)
        for questions in asked(scale, only):
            title = scale.sets[questions].title
            printed = {m: left.pop(f"{questions} {m}", None) for m in metrics}
            result += scores(label, title, answers(scale, variant, questions), metrics, printed)
            loss = Cell("loss", variant=trained, questions=questions, limit=scale.limit)
            column = f"{title} answer loss"
            result.append(Number(label, column, None, loss, "answer_loss", digits=3))
        for key, value in left.items():
            questions, metric = key.split()
            column = f"{PAPER_SETS[questions]} {SCORES[metric]} (28 layers)"
            result.append(Number(label, column, value, metric=""))
        memory = Cell("memory", variant=trained)
        for target in ("continuation", "recall"):
            metric = f"{target}.memory"
            result.append(Number(label, f"{target} loss", None, memory, metric, digits=3))
    return result


def asked(scale: Scale, only: str | None) -> tuple[str, ...]:
    """The sets of an ablation: `only` at paper scale if it is given, else the scale's own."""
    return (only,) if only and scale.name == "paper" else scale.ablation


def subset(scale: Scale) -> tuple[str, ...]:
    """Stage-2 overrides of the depth studies: 3,000 training questions of HotpotQA.

    The first 500 choose the checkpoint, as in the recipe.
    """
    if scale.name != "paper":
        return ()
    return ("data.training=[{path: hotpotqa, records: '500:3500'}]",)


def answers(
    scale: Scale, variant: Variant, questions: str, k: int | str | None = None, shift: int = 0
) -> Cell:
    """Answers of a variant: without selection, or with a budget K if one is given."""
    disabled, control = scale.disabled
    if variant.k and disabled != "all":
        disabled = variant.k
    return Cell(
        variant=without_selector(scale, variant) if k is None else variant,
        questions=questions,
        k=disabled if k is None else k,
        control=control if k is None else "selected",
        shift=shift,
        limit=scale.limit,
    )

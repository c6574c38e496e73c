"""The shipped model compared with rows of Table main_qa_results, on the sets that both have."""

from __future__ import annotations

from experiments.shipped_model import BEFORE, NAME, SEDEM, TEXT, answers
from experiments.system import paper
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores

SETS = ("hotpotqa", "2wiki", "musique")
PRINTED = (
    ("llama-3.2-1b", "Backbone (Frozen)", "Llama-3.2-1B frozen"),
    ("llama-3.2-1b", "SeDeM", "SeDeM, Llama-3.2-1B, C=4"),
    ("llama-3.2-3b", "SeDeM", "SeDeM, Llama-3.2-3B, C=4"),
)
ROWS = ("K=2", "K=4", "no memory")


def numbers(scale: Scale) -> list[Number]:
    """Rows of the paper, then ours."""
    result = []
    for backbone, method, label in PRINTED:
        where = {"backbone": paper.BACKBONES[backbone], "method": method}
        for key in SETS:
            value = paper.number("tab:main_qa_results", f"{key}_f1", **where)
            column = f"{scale.sets[key].title} F1"
            result.append(Number(label, column, value, metric=""))
    ours = {f"{NAME} {BEFORE}, {row}": SEDEM[row] for row in ROWS}
    ours |= {f"frozen backbone, {row}": fields for row, fields in TEXT.items()}
    for label, fields in ours.items():
        for key in SETS:
            if "method" not in fields:
                # These sets are smaller than the limit.
                fields = {**fields, "limit": None}
            result += scores(label, scale.sets[key].title, answers(scale, key, fields))
    return result


STUDY = Study(
    "shipped_beside_paper",
    "The shipped model beside the paper (rows of Table main_qa_results)",
    numbers,
    "Nothing makes the rows comparable: the backbone, the training and the samples differ.",
    drawn=("F1",),
)

if __name__ == "__main__":
    command(STUDY)()

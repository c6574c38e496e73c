"""Methods trained on equal windows and questions, and bytes against F1. Not in the paper."""

from __future__ import annotations

from experiments.main_qa import SETS
from experiments.system.cells import Cell
from experiments.system.peers import answer_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import equal_budget, guided_model, main_model
from sedem.baselines.registry import TRAINED

COMPRESSIONS = (4, 2, 1)
SLOTS = {"": "", ", int8 slots": "int8"}
"""Types of stored slots; combined with the compressions, they form a ladder of bytes."""


def rows(scale: Scale, questions: str) -> dict[str, Cell | None]:
    """The cells of a set by label."""
    guided = guided_model(scale)
    others = {
        "SeDeM, the guided model": answer_cell(scale, guided, questions),
        "frozen backbone": answer_cell(scale, guided, questions, "full-context"),
        **{name: answer_cell(scale, main_model(scale), questions, name) for name in TRAINED},
    }
    if scale.name == "paper":
        return others  # its recipes give every method the same supervision
    few = {"limit": scale.costly_limit}
    ladder = {
        f"SeDeM, C={c}{label}": answer_cell(
            scale, equal_budget(scale, c), questions, slots=slots, **few
        )
        for c in COMPRESSIONS
        for label, slots in SLOTS.items()
    }
    return {**ladder, **others}


def numbers(scale: Scale) -> list[Number]:
    """F1 on every set, and the stored bytes per token of the documents."""
    result = []
    for key in SETS:
        title = scale.sets[key].title
        for label, cell in rows(scale, key).items():
            if cell is not None:
                result += scores(label, title, cell)
                column = f"{title}, bytes a token"
                result.append(Number(label, column, None, cell, "bytes_per_token"))
    return result


STUDY = Study(
    "equal_training",
    "Methods trained on equal windows and questions; SeDeM at several sizes of memory",
    numbers,
    "The paper gives no numbers. The guided model has had more training than the other rows.",
    drawn=("F1",),
)

if __name__ == "__main__":
    command(STUDY)()

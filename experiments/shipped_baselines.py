"""What trained baselines lose when they are made small enough to ship. Not in the paper."""

from __future__ import annotations

from dataclasses import replace

from experiments.system.peers import answer_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model
from sedem.baselines.registry import TRAINED

SETS = ("hotpotqa", "2wiki")


def numbers(scale: Scale) -> list[Number]:
    """F1 of the trained checkpoint, and of the one in checkpoints/METHOD-nano."""
    result = []
    for method in TRAINED:
        for questions in SETS:
            cell = answer_cell(scale, main_model(scale), questions, method)
            if cell is None:
                continue
            title = scale.sets[questions].title
            result.append(Number(method, f"{title} F1, as trained", None, cell))
            if scale.shipped:
                small = replace(cell, shipped=True)
                result.append(Number(method, f"{title} F1, as shipped", None, small))
    return result


STUDY = Study(
    "shipped_baselines",
    "Trained baselines as they are shipped",
    numbers,
    "The paper gives no numbers.",
)

if __name__ == "__main__":
    command(STUDY)()

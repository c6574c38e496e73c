"""What the trained baselines that travel with sedem have lost by being made small."""

from __future__ import annotations

from dataclasses import replace

from experiments import peers
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main
from sedem.baselines.registry import TRAINED

SETS = ("hotpotqa", "2wiki")


def numbers(scale: Scale) -> list[Number]:
    """F1 of the checkpoint that was trained, and of the one in checkpoints/METHOD-nano."""
    result = []
    variant = main(scale.backbones[0])
    for method in TRAINED:
        for questions in SETS:
            cell = peers.own(scale, variant, questions, method)
            if cell is None:
                continue
            title = scale.sets[questions].title
            result.append(Number(method, f"{title} F1, as trained", None, cell))
            if scale.shipped:
                small = replace(cell, shipped=True)
                result.append(Number(method, f"{title} F1, as shipped", None, small))
    return result


STUDY = Study(
    "shipped",
    "Trained baselines as they are shipped",
    numbers,
    "The paper gives no numbers.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

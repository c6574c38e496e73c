"""What training the shipped model cost, recipe by recipe. The paper has no such table."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import GUIDED, main_model

COLUMNS = (
    ("steps", "steps", 1.0, 0),
    ("examples", "examples_seen", 1.0, 0),
    ("minutes", "seconds", 60.0, 0),
    ("trained parameters", "trained_parameters", 1.0, 0),
    ("machine", "machine.device", 1.0, 0),
    ("threads", "machine.threads", 1.0, 0),
)
"""Column, name in the run's summary, divisor, and number of decimals."""


def numbers(scale: Scale) -> list[Number]:
    """Steps, examples, minutes and trained parameters of each recipe."""
    result = []
    for stage in (*scale.stages, *GUIDED) if scale.shipped else scale.stages:
        cell = Cell("training", variant=main_model(scale), stage=stage)
        for column, metric, per, digits in COLUMNS:
            result.append(Number(f"{stage}.yaml", column, None, cell, metric, per, digits))
    return result


STUDY = Study(
    "shipped_training",
    "What training the shipped model took",
    numbers,
    "The paper gives no numbers.",
    drawn=("minutes",),
)

if __name__ == "__main__":
    command(STUDY)()

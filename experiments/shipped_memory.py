"""What the memory of the shipped model carries before stage 2. The paper has no such table."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model

CONDITIONS = ("raw_text", "true_states", "memory", "other_memory", "nothing")


def numbers(scale: Scale) -> list[Number]:
    """Loss per token in each condition, on the text after a segment and on the segment itself."""
    cell = Cell("memory", variant=main_model(scale))
    return [
        Number(
            f"after stage 1: {target}",
            condition.replace("_", " "),
            None,
            cell,
            f"{target}.{condition}",
            digits=3,
        )
        for target in ("continuation", "recall")
        for condition in CONDITIONS
    ]


STUDY = Study(
    "shipped_memory",
    "What memory carries before stage 2, in loss a token",
    numbers,
    "The paper gives no numbers.",
)

if __name__ == "__main__":
    command(STUDY)()

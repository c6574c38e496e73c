"""What a first search with pooled keys misses in larger banks, and its cost. Not in the paper."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.large_banks import BUDGET, COUNTS
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

SIZES = {"smoke": (400, 800)}
NANO = (18_000, 100_000, 300_000, 1_000_000)
LIMIT = 40


def numbers(scale: Scale) -> list[Number]:
    """Recall and cost by the number of candidates, for each bank size."""
    limit = scale.limit if scale.name == "smoke" else LIMIT
    cell = Cell("large-banks", questions=scale.ablation[0], limit=limit, shipped=True)
    result = []
    for size in sizes(scale.name):
        for count in COUNTS:
            row, place = f"{size:,} blocks, C={count}", f"sizes.{size}"
            column = f"% of the best {BUDGET} among C candidates"
            result.append(Number(row, column, None, cell, f"{place}.recall.{count}"))
            column = "% of the products of an exact search"
            result.append(Number(row, column, None, cell, f"{place}.products.{count}"))
    return result


def sizes(scale: str) -> tuple[int, ...]:
    """Numbers of blocks measured at a scale."""
    return SIZES.get(scale, NANO)


STUDY = Study(
    "large_banks",
    "What a first search misses and costs in large banks",
    numbers,
    "The paper gives no numbers. The blocks are made from real ones.",
    drawn=("%",),
)

if __name__ == "__main__":
    command(STUDY)()

"""Which exact selections a first search with pooled keys misses. Not in the paper."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.coarse_search import COUNTS, GROUPS
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model

BUDGET = 2


def numbers(scale: Scale) -> list[Number]:
    """Percentage of the exact best two among the best C by pooled keys, and the search time."""
    limit = scale.limit if scale.name == "smoke" else 200
    cell = Cell(
        "coarse-search", variant=main_model(scale), questions=scale.ablation[0], limit=limit
    )
    result = []
    for groups in GROUPS:
        place, label = f"by_pooled_keys_of_a_block.{groups}", f"{groups} pooled keys a block"
        for count in COUNTS:
            metric = f"{place}.recall.k{BUDGET}.{count}"
            column = f"% of the best {BUDGET} among {count:,}"
            result.append(Number(label, column, None, cell, metric))
        metric = f"{place}.cpu_ms_per_question_and_1000_blocks"
        column = "CPU ms a question and 1,000 blocks"
        result.append(Number(label, column, None, cell, metric, digits=2))
    return result


STUDY = Study(
    "coarse_search",
    "What a first search with pooled keys misses",
    numbers,
    "The paper gives no numbers.",
    drawn=("%",),
)

if __name__ == "__main__":
    command(STUDY)()

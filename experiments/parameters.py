"""Table ours_inference_params: parameters that SeDeM adds, by part."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

TABLE = "tab:ours_inference_params"
BACKBONES = (("llama-3.2-1b", "1b"), ("llama-3.2-3b", "3b"))


def numbers(scale: Scale) -> list[Number]:
    """Millions, counted on the meta device; the same at every scale."""
    result = []
    for backbone, short in BACKBONES:
        cell, column = Cell("cost", backbone=backbone), f"{backbone}, M"
        for row in paper.rows(TABLE):
            metric = f"parameters.{row['module'].lower()}"
            result.append(Number(row["module"], column, row[f"{short}_m"], cell, metric, 1e6, 2))
        total = paper.number(TABLE, f"{short}_pct", module="Total")
        label = "Total, % of the backbone"
        result.append(Number(label, column, total, cell, "parameters.percent", 1.0, 2))
    return result


STUDY = Study(
    "parameters",
    "Parameters by part (Table ours_inference_params)",
    numbers,
    "The paper's compressor has 6d to 7d parameters more than its equation; sedem follows the "
    "equation.",
)

if __name__ == "__main__":
    command(STUDY)()

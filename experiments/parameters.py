"""Parameters that SeDeM adds, by part."""

from __future__ import annotations

from experiments import paper
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command

BACKBONES = (("llama-3.2-1b", "1b"), ("llama-3.2-3b", "3b"))


def numbers(scale: Scale) -> list[Number]:
    """Millions, counted on the meta device; the same at every scale."""
    result = []
    for backbone, short in BACKBONES:
        cell = Cell("cost", backbone=backbone)
        for row in paper.rows("tab:ours_inference_params"):
            metric = f"parameters.{row['module'].lower()}"
            result.append(
                Number(row["module"], f"{backbone}, M", row[f"{short}_m"], cell, metric, 1e6, 2)
            )
        total = paper.number("tab:ours_inference_params", f"{short}_pct", module="Total")
        label = "Total, % of the backbone"
        result.append(Number(label, f"{backbone}, M", total, cell, "parameters.percent", 1.0, 2))
    return result


STUDY = Study(
    "parameters",
    "Parameters by part (Table ours_inference_params)",
    numbers,
    "The paper's compressor holds 6d to 7d parameters more than its equation, which is followed.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

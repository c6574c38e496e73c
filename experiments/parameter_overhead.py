"""Table inference_parameter_overhead: parameters that a method adds, without adapters."""

from __future__ import annotations

from experiments.system.costs import cost_rows
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

COLUMNS = (
    ("added, M", "added_params_m", "without_lora", 1e6),
    ("% of the backbone", "added_over_backbone_pct", "percent_without_lora", 1.0),
)
"""Column, the paper's name, our name among the parameters, and the divisor of ours."""


def numbers(scale: Scale) -> list[Number]:
    """Millions, and percentage of the frozen backbone; the same at every scale."""
    result = []
    for label, cell, row in cost_rows("tab:inference_parameter_overhead"):
        digits = 3 if row["added_params_m"] < 0.1 else 2
        for column, printed, ours, per in COLUMNS:
            metric = f"parameters.{ours}"
            result.append(Number(label, column, row[printed], cell, metric, per, digits))
    return result


STUDY = Study(
    "parameter_overhead",
    "Parameters added at inference, without adapters (Table inference_parameter_overhead)",
    numbers,
)

if __name__ == "__main__":
    command(STUDY)()

"""Parameters that each method adds at inference, adapters left out."""

from __future__ import annotations

from experiments import paper
from experiments.cells import Cell
from experiments.peers import PEERS
from experiments.scales import Scale
from experiments.study import Number, Study, command
from sedem.evaluation.registry import METHODS

BACKBONES = {"Llama-3.2-1B-Base": "llama-3.2-1b", "Llama-3.2-3B-Base": "llama-3.2-3b"}


def numbers(scale: Scale) -> list[Number]:
    """Millions and percent of the frozen backbone."""
    result = []
    for row in paper.rows("tab:inference_parameter_overhead"):
        backbone = BACKBONES[row["backbone"]]
        method = PEERS[row["method"]]
        known = method in METHODS
        cell = Cell("cost", method=method, backbone=backbone) if known else None
        label = f"{backbone}: {row['method']}"
        added, share = row["added_params_m"], row["added_over_backbone_pct"]
        digits = 3 if added < 0.1 else 2
        result += [
            Number(label, "added, M", added, cell, "parameters.without_lora", 1e6, digits),
            Number(
                label,
                "% of the backbone",
                share,
                cell,
                "parameters.percent_without_lora",
                digits=digits,
            ),
        ]
    return result


STUDY = Study(
    "parameter_overhead",
    "Parameters added at inference, without adapters (Table inference_parameter_overhead)",
    numbers,
)
app = command(STUDY)

if __name__ == "__main__":
    app()

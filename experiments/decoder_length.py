"""Table length_matched_controls: positions above the injection layer, by selection budget."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model


def numbers(scale: Scale) -> list[Number]:
    """Positions at the paper's low and high K of each set, if the scale's decoder has room."""
    result = []
    variant = main_model(scale)
    for key in ("hotpotqa", "2wiki", "musique", "qasper"):
        row = paper.row("tab:length_matched_controls", key)
        for level in ("low", "high"):
            k = row[f"k_{level}"]
            label = f"{scale.sets[key].title}, K={k}"
            cell = Cell(variant=variant, questions=key, k=k) if k <= max(scale.budgets) else None
            length = float(row[f"len_{level}"])
            result.append(Number(label, "positions", length, cell, "conditioning", digits=0))
    return result


STUDY = Study(
    "decoder_length",
    "Decoder-side positions by selection budget (Table length_matched_controls)",
    numbers,
)

if __name__ == "__main__":
    command(STUDY)()

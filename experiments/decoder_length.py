"""Positions above the injection layer, by selection budget."""

from __future__ import annotations

from experiments import paper
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main


def numbers(scale: Scale) -> list[Number]:
    """Length at the paper's low and high K of each set, as far as the scale's decoder has room."""
    result = []
    variant = main(scale.backbones[0])
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
app = command(STUDY)

if __name__ == "__main__":
    app()

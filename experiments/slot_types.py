"""Answers by the type of the stored slots. The paper has no such table."""

from __future__ import annotations

from experiments.system.bench import SLOT_TYPES
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import main_model


def numbers(scale: Scale) -> list[Number]:
    """Bytes per token, scores and recall by type, on the first set of the ablations."""
    limit = scale.limit if scale.name == "smoke" else 300
    key, result = scale.ablation[0], []
    for slots in SLOT_TYPES:
        cell = Cell(
            variant=main_model(scale),
            questions=key,
            max_new_tokens=32,
            dtype="float32",
            slots=slots,
            limit=limit,
        )
        result.append(Number(slots, "bytes a token", None, cell, "bytes_per_token", digits=0))
        result += scores(slots, scale.sets[key].title, cell, ("f1", "em", "recall@2"))
    return result


STUDY = Study(
    "slot_types",
    "Answers with slots in fewer bytes",
    numbers,
    "The paper gives no numbers.",
    drawn=("F1", "EM", "recall"),
)

if __name__ == "__main__":
    command(STUDY)()

"""What one `sedem eval` of the shipped model prints. The paper has no such table."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import guided_model

METRICS = ("f1", "em", "rouge_l", "recall@1", "recall@2")


def numbers(scale: Scale) -> list[Number]:
    """`sedem eval sedem --data FILE -k 2 --limit 200`: float32 and the set's own answer limit."""
    limit = scale.limit if scale.name == "smoke" else 200
    key = scale.ablation[0]
    cell = Cell(
        variant=guided_model(scale),
        questions=key,
        k=2,
        dtype="float32",
        limit=limit,
    )
    return scores(scale.sets[key].title, "", cell, METRICS)


STUDY = Study(
    "shipped_command",
    "What one command prints of the shipped model",
    numbers,
    "The paper gives no numbers.",
)

if __name__ == "__main__":
    command(STUDY)()

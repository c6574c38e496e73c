"""Effect of the selection budget K."""

from __future__ import annotations

from experiments import paper
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main

METRICS = (("em", "EM"), ("f1", "F1"), ("rouge_l", "ROUGE-L"))


def numbers(scale: Scale) -> list[Number]:
    """EM, F1 and ROUGE-L by K, on HotpotQA and 2Wiki."""
    result = []
    variant = main(scale.backbones[0])
    for key in ("hotpotqa", "2wiki"):
        for k in scale.budgets:
            cell = Cell(variant=variant, questions=key, k=k)
            for metric, name in METRICS:
                value = paper.number("tab:k_sweep", metric, dataset=paper.DATASETS[key], k=k)
                column = f"{scale.sets[key].title} {name}"
                result.append(Number(f"K={k}", column, value, cell, metric))
    return result


STUDY = Study(
    "selection_budget",
    "Effect of the selection budget K (Table k_sweep)",
    numbers,
    drawn="F1",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

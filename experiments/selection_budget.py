"""Table k_sweep: answers by the selection budget K."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import main_model

METRICS = ("em", "f1", "rouge_l")


def numbers(scale: Scale) -> list[Number]:
    """EM, F1 and ROUGE-L by K, on HotpotQA and 2Wiki."""
    result = []
    for key in ("hotpotqa", "2wiki"):
        for k in scale.budgets:
            cell = Cell(variant=main_model(scale), questions=key, k=k)
            where = {"dataset": paper.DATASETS[key], "k": k}
            printed = {m: paper.number("tab:k_sweep", m, **where) for m in METRICS}
            result += scores(f"K={k}", scale.sets[key].title, cell, METRICS, printed)
    return result


STUDY = Study(
    "selection_budget",
    "Effect of the selection budget K (Table k_sweep)",
    numbers,
    drawn=("F1",),
)

if __name__ == "__main__":
    command(STUDY)()

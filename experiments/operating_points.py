"""Table comprexit_operating_points: few blocks or all of them, compared with ComprExIT."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.peers import paper_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import full_bank, main_model

METRICS = ("f1", "em")
BUDGETS: dict[str, int | str] = {"SeDeM learned-K=2": 2, "SeDeM full-bank": "all"}


def numbers(scale: Scale) -> list[Number]:
    """F1, EM and time to the first token on HotpotQA and 2Wiki."""
    result = []
    variant = main_model(scale)
    for key in ("hotpotqa", "2wiki"):
        for row in paper.rows("tab:comprexit_operating_points"):
            method = row["method"]
            if row["dataset"] != paper.DATASETS[key]:
                continue
            label = f"{scale.sets[key].title}: {method}"
            if method in BUDGETS:
                k = BUDGETS[method]
                limit = scale.costly_limit if k == "all" else None
                model = full_bank(scale, key) if k == "all" else variant
                cell: Cell | None = Cell(variant=model, questions=key, k=k, limit=limit)
            else:
                cell = paper_cell(scale, method, variant, key)
            result += scores(label, "", cell, METRICS, row)
            result.append(Number(label, "TTFT, ms (A100)", row["ttft_ms"], metric=""))
    return result


STUDY = Study(
    "operating_points",
    "Operating points beside ComprExIT (Table comprexit_operating_points)",
    numbers,
    "If the full bank exceeds the decoder's positions, its best blocks are used as far as they "
    "fit.",
)

if __name__ == "__main__":
    command(STUDY)()

"""Table normalized_erank: normalized effective rank of memory slots."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.peers import PEERS
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model


def numbers(scale: Scale) -> list[Number]:
    """Percentage of the number of slots, for ICAE and SeDeM."""
    result = []
    for key in ("hotpotqa", "qasper", "musique", "2wiki"):
        for method in ("ICAE", "SeDeM"):
            row = paper.row("tab:normalized_erank", key, method=method)
            printed = row["normalized_effective_rank_pct"]
            cell = Cell("rank", PEERS[method], main_model(scale), questions=key, limit=100)
            title = scale.sets[key].title
            result.append(Number(title, f"{method}, %", printed, cell, "effective_rank"))
    return result


STUDY = Study(
    "effective_rank", "Normalized effective rank of memory slots (Table normalized_erank)", numbers
)

if __name__ == "__main__":
    command(STUDY)()

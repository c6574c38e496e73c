"""Normalized effective rank of memory slots."""

from __future__ import annotations

from experiments import paper, peers
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main


def numbers(scale: Scale) -> list[Number]:
    """Percent of the slot count, SeDeM and ICAE."""
    result = []
    for key in ("hotpotqa", "qasper", "musique", "2wiki"):
        for method in ("ICAE", "SeDeM"):
            row = paper.row("tab:normalized_erank", key, method=method)
            printed = row["normalized_effective_rank_pct"]
            variant, name = main(scale.backbones[0]), peers.PEERS[method]
            cell = Cell("rank", name, variant, key, limit=100)
            title = scale.sets[key].title
            result.append(Number(title, f"{method}, %", printed, cell, "effective_rank"))
    return result


STUDY = Study(
    "effective_rank", "Normalized effective rank of memory slots (Table normalized_erank)", numbers
)
app = command(STUDY)

if __name__ == "__main__":
    app()

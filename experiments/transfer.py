"""Out-of-distribution transfer: a mixture of tasks without QASPER, asked QASPER."""

from __future__ import annotations

from experiments import paper, peers
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import BASE


def numbers(scale: Scale) -> list[Number]:
    """SeDeM and ICAE on a set that neither was trained for."""
    result = []
    for method, changes in (("SeDeM", {"limit": scale.limit}), ("ICAE", {"method": "icae"})):
        value = paper.number("inline_ood_transfer", "token_f1", method=method)
        cell = peers.own(scale, BASE, "qasper", trained_for="mixture", **changes)
        result.append(Number(method, f"{scale.sets['qasper'].title} F1", value, cell))
    return result


STUDY = Study(
    "transfer", "Transfer to a set that was not trained for (appendix OOD Transfer)", numbers
)
app = command(STUDY)

if __name__ == "__main__":
    app()

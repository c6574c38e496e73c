"""Appendix OOD Transfer: models trained on a mixture without QASPER, evaluated on QASPER."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.peers import answer_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import BASE


def numbers(scale: Scale) -> list[Number]:
    """SeDeM and ICAE on a set that neither was trained for."""
    result = []
    for method, fields in (("SeDeM", {"limit": scale.limit}), ("ICAE", {"method": "icae"})):
        printed = {"f1": paper.number("inline_ood_transfer", "token_f1", method=method)}
        cell = answer_cell(scale, BASE, "qasper", trained_for="mixture", **fields)
        result += scores(method, scale.sets["qasper"].title, cell, paper=printed)
    return result


STUDY = Study(
    "transfer", "Transfer to a set that was not trained for (appendix OOD Transfer)", numbers
)

if __name__ == "__main__":
    command(STUDY)()

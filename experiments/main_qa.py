"""Tables main_qa_results and sedem_em: every method on the four sets."""

from __future__ import annotations

from typing import Any

from experiments.system import paper
from experiments.system.constants import constant_cell
from experiments.system.peers import answer_cell, paper_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import Variant, equal_budget, main_model

SETS = ("2wiki", "musique", "qasper", "hotpotqa")
METRICS = ("f1", "rouge_l", "em")
CONSTANTS = {"constant answer": "", 'always "no"': "no"}
"""Rows that read nothing: the answer chosen on training questions, and another one."""
LONG = {"setting": "1024"}
"""Activation Beacon's recipe with the paper's windows."""


def numbers(scale: Scale) -> list[Number]:
    """Every method on every backbone; a smaller one is compared with the paper's 1B numbers."""
    result = [
        number
        for label, answer in CONSTANTS.items()
        for key in SETS
        for number in scores(label, scale.sets[key].title, constant_cell(key, answer), METRICS)
    ]
    for backbone in scale.backbones:
        variant = main_model(scale, backbone)
        source = backbone if backbone in paper.BACKBONES else "llama-3.2-1b"
        prefix = "" if len(scale.backbones) == 1 else f"{backbone}: "
        for row in paper.rows("tab:main_qa_results"):
            if row["backbone"] != paper.BACKBONES[source]:
                continue
            method = row["method"]
            for key in SETS:
                printed = {m: row.get(f"{key}_{m}") for m in METRICS}
                printed["em"] = _em(source, method, key)
                title, cell = scale.sets[key].title, paper_cell(scale, method, variant, key)
                result += scores(prefix + method, title, cell, METRICS, printed)
        for label, model, fields in _more_rows(scale, variant):
            for key in SETS:
                cell = answer_cell(scale, model, key, **fields)
                if cell is not None:
                    result += scores(prefix + label, scale.sets[key].title, cell, METRICS)
    return result


def _more_rows(scale: Scale, variant: Variant) -> list[tuple[str, Variant, dict[str, Any]]]:
    """Rows that the paper's table lacks: a label, a model, and fields of its cells."""
    few: dict[str, Any] = {"limit": scale.costly_limit}
    rows: list[tuple[str, Variant, dict[str, Any]]] = [
        ("SeDeM, evidence selected", variant, {"control": "gold"}),
        ("SeDeM, every block", variant, {"k": "all", **few}),
        ("SeDeM, no memory", variant, {"control": "none"}),
        ("frozen backbone, BM25's paragraphs as text", variant, {"method": "bm25"}),
        ("raw-text RAG with matched supervision", variant, {"method": "rag"}),
        ("ComprExIT, pieces of 512 tokens", variant, {"method": "comprexit"}),
        ("Activation Beacon, windows of 1,024 tokens", variant, {"method": "beacon", **LONG}),
    ]
    if scale.name != "paper":
        equal = equal_budget(scale)
        budgets = (("one block", 1), ("two blocks", 2), ("four blocks", 4))
        rows += [(f"SeDeM with {blocks}", variant, {"k": k}) for blocks, k in budgets]
        rows += [
            ("SeDeM, trained as little as the methods above", equal, few),
            ("the same, no memory", equal, {"control": "none", **few}),
        ]
    return rows


def _em(backbone: str, method: str, key: str) -> float | None:
    names = {"llama-3.2-1b": "Llama-3.2-1B", "llama-3.2-3b": "Llama-3.2-3B"}
    if method != "SeDeM" or backbone not in names:
        return None
    return paper.number("tab:sedem_em", f"{key}_em", backbone=names[backbone])


STUDY = Study(
    "main_qa",
    "Main long-context QA (Tables main_qa_results and sedem_em)",
    numbers,
    "Answers have at most 64 new tokens, 128 on QASPER. K is 2, 2, 4 and 8 as in the paper.",
    drawn=("F1",),
)

if __name__ == "__main__":
    command(STUDY)()

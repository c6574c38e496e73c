"""Main results: F1 and ROUGE-L of every method on the four sets, EM of SeDeM."""

from __future__ import annotations

from typing import Any

from experiments import paper, peers
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import Variant, equal_budget, main

SETS = ("2wiki", "musique", "qasper", "hotpotqa")
METRICS = (("f1", "F1"), ("rouge_l", "ROUGE-L"), ("em", "EM"))
LONG = {"setting": "1024"}
"""Activation Beacon's recipe with the paper's windows."""


def numbers(scale: Scale) -> list[Number]:
    """Every method on every backbone of the scale; the paper's 1B values beside smaller ones."""
    result = []
    for backbone in scale.backbones:
        variant = main(backbone)
        source = backbone if backbone in paper.BACKBONES else "llama-3.2-1b"
        printed = {
            row["method"]: row
            for row in paper.rows("tab:main_qa_results")
            if row["backbone"] == paper.BACKBONES[source]
        }
        for method in printed:
            label = _label(scale, backbone, method)
            for key in SETS:
                cell = peers.cell(scale, method, variant, key)
                for metric, name in METRICS:
                    value = printed[method].get(f"{key}_{metric}")
                    if metric == "em":
                        value = _em(source, method, key)
                    column = f"{scale.sets[key].title} {name}"
                    result.append(Number(label, column, value, cell, metric))
        for title, model, changes in _beside(scale, variant):
            for key in SETS:
                cell = peers.own(scale, model, key, **changes)
                if cell is None:
                    continue
                for metric, name in METRICS:
                    column = f"{scale.sets[key].title} {name}"
                    label = _label(scale, backbone, title)
                    result.append(Number(label, column, None, cell, metric))
    return result


def _beside(scale: Scale, variant: Variant) -> list[tuple[str, Variant, dict[str, Any]]]:
    """What the paper's main table has not: a label, a model, and a cell's fields."""
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
        named = (("one block", 1), ("two blocks", 2), ("four blocks", 4))
        rows += [(f"SeDeM with {blocks}", variant, {"k": k}) for blocks, k in named]
        rows += [
            ("SeDeM, trained as little as the methods above", equal, few),
            ("the same, no memory", equal, {"control": "none", **few}),
        ]
    return rows


def _label(scale: Scale, backbone: str, method: str) -> str:
    return method if len(scale.backbones) == 1 else f"{backbone}: {method}"


def _em(backbone: str, method: str, key: str) -> float | None:
    names = {"llama-3.2-1b": "Llama-3.2-1B", "llama-3.2-3b": "Llama-3.2-3B"}
    if method != "SeDeM" or backbone not in names:
        return None
    return paper.number("tab:sedem_em", f"{key}_em", backbone=names[backbone])


STUDY = Study(
    "main_qa",
    "Main long-context QA (Tables main_qa_results and sedem_em)",
    numbers,
    "Generated with 64 new tokens at most, 128 on QASPER; K is 2, 2, 4 and 8 as in the paper.",
    drawn="F1",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

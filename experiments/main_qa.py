"""Main results: F1 and ROUGE-L of every method on the four sets, EM of SeDeM."""

from __future__ import annotations

from typing import Any

from experiments import paper, peers
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main

SETS = ("2wiki", "musique", "qasper", "hotpotqa")
METRICS = (("f1", "F1"), ("rouge_l", "ROUGE-L"), ("em", "EM"))


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
        for title, changes in _controls(scale):
            for key in SETS:
                cell = peers.own(scale, variant, key, **changes)
                if cell is None:
                    continue
                for metric, name in METRICS:
                    column = f"{scale.sets[key].title} {name}"
                    label = _label(scale, backbone, title)
                    result.append(Number(label, column, None, cell, metric))
    return result


def _controls(scale: Scale) -> list[tuple[str, dict[str, Any]]]:
    """What the paper's main table has not: a label, and a cell's fields."""
    few = {"limit": scale.costly_limit}
    return [
        ("SeDeM, evidence selected", {"control": "gold"}),
        ("SeDeM, every block", {"k": "all", **few}),
        ("SeDeM, no memory", {"control": "none"}),
        ("frozen backbone, BM25's documents as text", {"method": "bm25", **few}),
        ("raw-text RAG with matched supervision", {"method": "rag"}),
        ("Activation Beacon, windows of 1,024 tokens", {"method": "beacon", "setting": "1024"}),
    ]


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

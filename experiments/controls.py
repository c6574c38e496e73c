"""Controls that part selection from compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import ablation, paper, peers
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import BASE, Variant, equal_budget, main

SHIFT = 64


def numbers(scale: Scale) -> list[Number]:
    """Identical input, full bank, distant supervision, raw text, moved boundaries."""
    small = scale.backbones[0]
    large = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else small
    result = [
        *_given(scale, large, "hotpotqa", CONTROLS),
        *_given(scale, large, "hotpotqa", [BM25]),
        *_alike(scale, small),
        *_given(scale, small, "2wiki", RETRIEVED),
    ]
    for key in ("hotpotqa", "2wiki"):
        value = paper.number("inline_control_full_bank", "f1", dataset=paper.DATASETS[key])
        cell = Cell(variant=main(small), questions=key, k="all", limit=scale.costly_limit)
        result.append(Number("full bank: SeDeM", f"{scale.sets[key].title} F1", value, cell))
    return [*result, *_distant(scale), *_shifted(scale)]


IDENTICAL, RAW = "inline_control_identical_input", "inline_control_raw_text_rag"

Row = tuple[str, dict[str, Any], str, dict[str, Any]]
"""A label, a cell's fields, and the table and row of the paper's number; no table, no number."""

RETRIEVED: tuple[Row, ...] = (
    (
        "raw-text RAG, K=2: trained reader",
        {"method": "rag", "k": 2},
        RAW,
        {"method": "raw-text RAG", "k": 2},
    ),
    (
        "raw-text RAG, K=10: trained reader",
        {"method": "rag", "k": 10},
        RAW,
        {"method": "raw-text RAG", "k": 10},
    ),
)
CONTROLS: tuple[Row, ...] = (
    (
        "identical gold input: SeDeM",
        {"control": "gold-documents", "k": "all"},
        IDENTICAL,
        {"method": "SeDeM"},
    ),
    (
        "identical gold input: ICAE",
        {"method": "icae", "control": "gold"},
        IDENTICAL,
        {"method": "ICAE"},
    ),
    ("evidence first, K=2: SeDeM", {"control": "gold"}, "", {}),
    (
        "raw text, gold paragraphs: trained reader",
        {"method": "full-context-tuned", "control": "gold"},
        RAW,
        {"method": "raw-text reader on gold paragraphs"},
    ),
    *RETRIEVED,
)


BM25: Row = ("raw text, BM25, K=2: frozen reader", {"method": "bm25"}, "", {})


def _given(scale: Scale, backbone: str, key: str, rows: Sequence[Row]) -> list[Number]:
    """What a reader makes of the input that it is given, on one set."""
    result = []
    for label, changes, table, where in rows:
        cell = peers.own(scale, main(backbone), key, **changes)
        for metric, name in (("f1", "F1"), ("em", "EM")):
            value = None
            if table:
                value = paper.number(table, metric, dataset=paper.DATASETS[key], **where)
            result.append(Number(label, f"{scale.sets[key].title} {name}", value, cell, metric))
    return result


def _alike(scale: Scale, backbone: str) -> list[Number]:
    """Gold documents for the methods that the paper does not ask them, and for a SeDeM as small."""
    if scale.name == "paper":
        return []
    given = peers.PEERS.items()
    others = [(name, method) for name, method in given if method in ("hmt", "500x", "beacon")]
    others.append(("ComprExIT", "comprexit"))
    rows = [
        (name, peers.own(scale, main(backbone), "hotpotqa", method, control="gold"))
        for name, method in others
    ]
    equal = peers.own(
        scale,
        equal_budget(scale),
        "hotpotqa",
        control="gold-documents",
        k="all",
        limit=scale.costly_limit,
    )
    rows.append(("SeDeM, trained as little", equal))
    column = scale.sets["hotpotqa"].title
    return [
        Number(f"identical gold input: {name}", f"{column} {title}", None, cell, metric)
        for name, cell in rows
        for metric, title in (("f1", "F1"), ("em", "EM"))
    ]


def _distant(scale: Scale) -> list[Number]:
    """Labels from answer strings against labels from evidence, trained alike and selecting K=2."""
    known = paper.number(
        "inline_control_distant_supervision", "f1", method="SeDeM, answer-string selector"
    )
    result = []
    for label, variant, value in (
        ("labels from answer strings", distant(scale), known),
        ("labels from evidence", BASE, None),
    ):
        for key in scale.ablation:
            cell = ablation.answers(scale, variant, key, k=2)
            title = scale.sets[key].title
            printed = value if key == "hotpotqa" else None
            result += [
                Number(label, f"{title} F1", printed, cell),
                Number(label, f"{title} recall@2", None, cell, "recall@2"),
            ]
    return result


def distant(scale: Scale) -> Variant:
    """The study's mixture, labelled by answer strings."""
    sources = {
        "smoke": "[{path: squad.json, set: squad, label: answer}]",
        "nano": (
            '[{path: squad/train-44-articles.json, records: ":6", label: answer}, '
            '{path: wikipedia/articles.jsonl.xz, set: exact-facts, records: ":200", '
            "label: answer, options: {split: train, count: 1200}}]"
        ),
        "paper": "[{path: hotpotqa, set: hotpotqa, split: train, label: answer}]",
    }
    return Variant("distant-supervision", stage2=(f"data.training={sources[scale.name]}",))


def _shifted(scale: Scale) -> list[Number]:
    """Every boundary between segments moved by 64 tokens, selection taken out."""
    result = []
    for shift, column in ((0, "f1_before"), (SHIFT, "f1_after")):
        label = f"boundaries moved by {shift} tokens"
        for key in scale.ablation:
            cell = ablation.answers(scale, BASE, key, shift=shift)
            value = None
            if key == "hotpotqa":
                value = paper.number("inline_control_boundary_shift", column)
            result.append(Number(label, f"{scale.sets[key].title} F1", value, cell))
    return result


STUDY = Study(
    "controls",
    "Controls of selection, retrieval and compression (appendix Controlled Comparisons)",
    numbers,
    "Rows have different backbones, budgets and supervision; only those of one group compare.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

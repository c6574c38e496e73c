"""Appendix Controlled Comparisons: controls that separate selection from compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.system import ablation, paper
from experiments.system.cells import Cell
from experiments.system.constants import constant_cell
from experiments.system.peers import answer_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import BASE, Variant, equal_budget, full_bank, main_model

SHIFT = 64
METRICS = ("f1", "em")
IDENTICAL, RAW = "inline_control_identical_input", "inline_control_raw_text_rag"

Row = tuple[str, dict[str, Any], str, dict[str, Any]]
"""A label, a cell's fields, and table and row of the paper's number; "" means no table."""

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
GIVEN: tuple[Row, ...] = (
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
    ("raw text, BM25, K=2: frozen reader", {"method": "bm25"}, "", {}),
)
MORE_GIVEN = {
    "HMT": "hmt",
    "500xCompressor": "500x",
    "Activation Beacon": "beacon",
    "ComprExIT": "comprexit",
}
"""Methods that do not get the identical input in the paper."""


def numbers(scale: Scale) -> list[Number]:
    """Given input, full bank, distant supervision, moved boundaries, and the constant answer."""
    large = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else scale.backbones[0]
    result = [
        *_given(scale, large, "hotpotqa", GIVEN),
        *_more_given(scale),
        *_given(scale, scale.backbones[0], "2wiki", RETRIEVED),
    ]
    for key in ("hotpotqa", "2wiki"):
        value = paper.number("inline_control_full_bank", "f1", dataset=paper.DATASETS[key])
        limit = scale.costly_limit
        cell = Cell(variant=full_bank(scale, key), questions=key, k="all", limit=limit)
        title = scale.sets[key].title
        result += scores("full bank: SeDeM", title, cell, paper={"f1": value})
    return [*result, *_distant(scale), *_shifted(scale), *_constant(scale)]


def _given(scale: Scale, backbone: str, key: str, rows: Sequence[Row]) -> list[Number]:
    """Answers of readers with a given input, on one set."""
    result = []
    for label, fields, table, where in rows:
        cell = answer_cell(scale, main_model(scale, backbone), key, **fields)
        printed: dict[str, float | None] = {}
        if table:
            dataset = paper.DATASETS[key]
            printed = {m: paper.number(table, m, dataset=dataset, **where) for m in METRICS}
        result += scores(label, scale.sets[key].title, cell, METRICS, printed)
    return result


def _more_given(scale: Scale) -> list[Number]:
    """Gold documents for more methods, and for a SeDeM with equally little training."""
    if scale.name == "paper":
        return []
    cells = {
        name: answer_cell(scale, main_model(scale), "hotpotqa", method, control="gold")
        for name, method in MORE_GIVEN.items()
    }
    fields: dict[str, Any] = {
        "control": "gold-documents",
        "k": "all",
        "limit": scale.costly_limit,
    }
    cells["SeDeM, trained as little"] = answer_cell(
        scale, equal_budget(scale), "hotpotqa", **fields
    )
    title = scale.sets["hotpotqa"].title
    return [
        number
        for name, cell in cells.items()
        for number in scores(f"identical gold input: {name}", title, cell, METRICS)
    ]


def _distant(scale: Scale) -> list[Number]:
    """Labels from answer strings and from evidence; both are trained alike and select K=2."""
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
            printed = {"f1": value if key == "hotpotqa" else None}
            title = scale.sets[key].title
            result += scores(label, title, cell, ("f1", "recall@2"), printed)
    return result


def distant(scale: Scale) -> Variant:
    """SeDeM trained on labels from answer strings."""
    sources = {
        "smoke": "[{path: squad.json, set: squad, label: answer}]",
        "nano": (
            '[{path: squad/train-44-articles.json, records: ":6", label: answer}, '
            '{path: wikipedia/articles.jsonl.xz, set: exact-facts, records: ":200", '
            "label: answer, options: {split: train, count: 1200}}]"
        ),
        "paper": '[{path: hotpotqa, records: "500:", label: answer}]',
    }
    return Variant("distant-supervision", stage2=(f"data.training={sources[scale.name]}",))


def _shifted(scale: Scale) -> list[Number]:
    """Every segment boundary moved by 64 tokens, without selection."""
    result = []
    for shift, column in ((0, "f1_before"), (SHIFT, "f1_after")):
        label = f"boundaries moved by {shift} tokens"
        known = paper.number("inline_control_boundary_shift", column)
        for key in scale.ablation:
            cell = ablation.answers(scale, BASE, key, shift=shift)
            printed = {"f1": known if key == "hotpotqa" else None}
            result += scores(label, scale.sets[key].title, cell, paper=printed)
    return result


def _constant(scale: Scale) -> list[Number]:
    """The constant answer for every set of the table."""
    keys = dict.fromkeys(("hotpotqa", "2wiki", *scale.ablation))
    return [
        number
        for key in keys
        for number in scores(
            "constant answer",
            scale.sets[key].title,
            constant_cell(key),
            METRICS if key in ("hotpotqa", "2wiki") else ("f1",),
        )
    ]


STUDY = Study(
    "controls",
    "Controls of selection, retrieval and compression (appendix Controlled Comparisons)",
    numbers,
    "Rows differ in backbone, budget and supervision; only those of one group compare.",
)

if __name__ == "__main__":
    command(STUDY)()

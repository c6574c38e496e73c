"""Controls: what separates selection, retrieval, compression and guessing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from experiments import ablations, quality
from experiments.system import paper
from experiments.system.cells import Cell, answer_cell
from experiments.system.models import BASE, Variant, equal_budget, full_bank, main_model
from experiments.system.scales import Scale
from experiments.system.tables import Number, scores, study

SHIFT = 64
SHIFTED = (
    ("llama-3.2-1b", "hotpotqa"),
    ("llama-3.2-1b", "2wiki"),
    ("llama-3.2-3b", "hotpotqa"),
    ("llama-3.2-3b", "2wiki"),
    ("llama-3.2-1b-to-3b", "2wiki"),
)
"""Backbones and sets whose boundaries are moved at paper scale, with every block. The paper has
five configurations with the full bank and names one, the first of ours."""
METRICS = ("f1", "em")
IDENTICAL, RAW = "inline_control_identical_input", "inline_control_raw_text_rag"

Row = tuple[str, dict[str, Any], str, str]
"""A label, a cell's fields, and table and method of the paper's number; "" means no table."""

RETRIEVED: tuple[Row, ...] = tuple(
    (f"raw-text RAG, K={k}: trained reader", {"method": "rag", "k": k}, RAW, "raw-text RAG")
    for k in (2, 10)
)
_GOLD = {"control": "gold"}
GIVEN: tuple[Row, ...] = (
    (
        "identical gold input: SeDeM",
        {"control": "gold-documents", "k": "all"},
        IDENTICAL,
        "SeDeM",
    ),
    ("identical gold input: ICAE", {"method": "icae", **_GOLD}, IDENTICAL, "ICAE"),
    ("evidence first, K=2: SeDeM", _GOLD, "", ""),
    (
        "raw text, gold paragraphs: trained reader",
        {"method": "full-context-tuned", **_GOLD},
        RAW,
        "raw-text reader on gold paragraphs",
    ),
    *RETRIEVED,
    ("raw text, BM25, K=2: frozen reader", {"method": "bm25"}, "", ""),
)
MORE_GIVEN = {
    "HMT": "hmt", "500xCompressor": "500x", "Activation Beacon": "beacon", "ComprExIT": "comprexit"
}  # fmt: skip
"""Methods that do not get the identical input in the paper."""
DISTANT = {
    "nano": (
        '[{path: squad/train-44-articles.json, records: ":6", label: answer}, '
        '{path: wikipedia/articles.jsonl.xz, set: exact-facts, records: ":200", '
        "label: answer, options: {split: train, count: 1200}}]"
    ),
    "paper": '[{path: hotpotqa, records: "500:", label: answer}]',
}
"""Training questions whose labels come from answer strings."""


@study()
def controls(scale: Scale) -> Iterator[Number]:
    """Controls of selection, retrieval and compression (appendix Controlled Comparisons).

    Rows differ in backbone, budget and supervision; only those of one group compare.
    """
    large = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else scale.backbones[0]
    hotpot, at_paper = scale.sets["hotpotqa"].title, scale.name == "paper"
    # Readers with a given input; at nano also more methods, and a SeDeM trained as little.
    yield from _given(scale, large, "hotpotqa", GIVEN)
    if not at_paper:
        cells = {
            name: answer_cell(scale, main_model(scale), "hotpotqa", method, control="gold")
            for name, method in MORE_GIVEN.items()
        }
        fields = {"control": "gold-documents", "k": "all", "limit": scale.costly_limit}
        equal = answer_cell(scale, equal_budget(scale), "hotpotqa", **fields)
        for name, cell in (cells | {"SeDeM, trained as little": equal}).items():
            yield from scores(f"identical gold input: {name}", hotpot, cell, METRICS)
    yield from _given(scale, scale.backbones[0], "2wiki", RETRIEVED)
    for key, backbone in {"hotpotqa": large, "2wiki": scale.backbones[0]}.items():
        where = {"dataset": paper.DATASETS[key], "control": "main configuration"}
        cell = answer_cell(scale, main_model(scale, backbone), key, k=2)
        printed = {"f1": paper.number(RAW, "f1", **where)}
        yield from scores("SeDeM, K=2", scale.sets[key].title, cell, METRICS, printed)
    # The full bank.
    for key in ("hotpotqa", "2wiki"):
        where = {"dataset": paper.DATASETS[key]}
        printed = {m: paper.number("inline_control_full_bank", m, **where) for m in METRICS}
        model, limit = full_bank(scale, key), scale.costly_limit
        cell = Cell(variant=model, questions=key, k="all", limit=limit)
        yield from scores("full bank: SeDeM", scale.sets[key].title, cell, METRICS, printed)
    # Labels from answer strings and from evidence; both are trained alike and select K=2. An answer
    # of yes or no labels no block, but the reader learns from it.
    own = (f"data.training={DISTANT[scale.name]}", "data.evidence_only=false")
    for label, variant, method in (
        (
            "labels from answer strings",
            Variant("distant-supervision", stage2=own),
            "SeDeM, answer-string selector",
        ),
        ("labels from evidence", main_model(scale) if at_paper else BASE, "SeDeM learned-K=2"),
    ):
        for key in ("hotpotqa",) if at_paper else scale.ablation:
            cell, printed = ablations.answers(scale, variant, key, k=2), {}
            if at_paper:  # on the whole set
                cell = Cell(variant=variant, questions=key, k=2)
                table = "inline_control_distant_supervision"
                printed = {"f1": paper.number(table, "f1", method=method)}
            yield from scores(label, scale.sets[key].title, cell, ("f1", "recall@2"), printed)
    # Every segment boundary moved by 64 tokens, without selection.
    for shift, column in ((0, "f1_before"), (SHIFT, "f1_after")):
        label = f"boundaries moved by {shift} tokens"
        for key in () if at_paper else scale.ablation:
            cell = ablations.answers(scale, BASE, key, shift=shift)
            yield from scores(label, scale.sets[key].title, cell)
        for backbone, key in SHIFTED if at_paper else ():
            model = full_bank(scale, key, backbone)
            cell = Cell(variant=model, questions=key, k="all", shift=shift)
            known = (backbone, key) == SHIFTED[0]
            printed = {
                "f1": paper.number("inline_control_boundary_shift", column) if known else None
            }
            row = f"{backbone}: {label}"
            yield from scores(row, scale.sets[key].title, cell, paper=printed)
    for key in dict.fromkeys(("hotpotqa", "2wiki", *scale.ablation)):
        metrics = METRICS if key in ("hotpotqa", "2wiki") else ("f1",)
        yield from scores("constant answer", scale.sets[key].title, quality.constant(key), metrics)


def _given(scale: Scale, backbone: str, key: str, rows: Sequence[Row]) -> Iterator[Number]:
    """Answers of readers with a given input, on one set."""
    for label, fields, table, method in rows:
        cell = answer_cell(scale, main_model(scale, backbone), key, **fields)
        retrieves, title = fields.get("method") == "rag", scale.sets[key].title
        where = {"dataset": paper.DATASETS[key], "method": method}
        where |= {"k": fields["k"]} if retrieves else {}
        printed = {m: paper.number(table, m, **where) for m in METRICS} if table else {}
        yield from scores(label, title, cell, METRICS, printed)
        if scale.name == "paper" and retrieves:
            # "Despite retrieval recall increasing to 1.0"
            recall = 100.0 if (key, fields["k"]) == ("2wiki", 10) else None
            yield Number(label, f"{title} recall", recall, cell, f"recall@{fields['k']}")

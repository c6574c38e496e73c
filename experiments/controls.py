"""Controls: what separates selection, retrieval, compression and guessing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from experiments import ablations, quality, training
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
"""Backbones and sets whose boundaries are moved at paper scale, with every block."""
DISTANT = "inline_control_distant_supervision"
METRICS = ("f1", "em")
IDENTICAL, RAW = "inline_control_identical_input", "inline_control_raw_text_rag"

Row = tuple[str, dict[str, Any], str, str]
"""A label, a cell's fields, and table and method of the paper's number; "" means no table."""

RETRIEVED: tuple[Row, ...] = tuple(
    (f"raw-text RAG, K={k}: trained reader", {"method": "rag", "k": k}, RAW, "raw-text RAG")
    for k in (2, 10)
)
GIVEN: tuple[Row, ...] = (
    (
        "identical gold input: SeDeM",
        {"control": "gold-documents", "k": "all"},
        IDENTICAL,
        "SeDeM",
    ),
    ("identical gold input: ICAE", {"method": "icae", "control": "gold"}, IDENTICAL, "ICAE"),
    ("evidence first, K=2: SeDeM", {"control": "gold"}, "", ""),
    (
        "raw text, gold paragraphs: trained reader",
        {"method": "full-context-tuned", "control": "gold"},
        RAW,
        "raw-text reader on gold paragraphs",
    ),
    *RETRIEVED,
    ("raw text, BM25, K=2: frozen reader", {"method": "bm25"}, "", ""),
)
MORE_GIVEN = {
    "HMT": "hmt",
    "500xCompressor": "500x",
    "Activation Beacon": "beacon",
    "ComprExIT": "comprexit",
}
"""Methods that do not get the identical input in the paper."""


@study(
    "Controls of selection, retrieval and compression (appendix Controlled Comparisons)",
    "Rows differ in backbone, budget and supervision; only those of one group compare.",
)
def controls(scale: Scale) -> Iterator[Number]:
    """Given input, full bank, distant supervision, moved boundaries, and the constant answer."""
    large = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else scale.backbones[0]
    yield from _given(scale, large, "hotpotqa", GIVEN)
    yield from _more_given(scale)
    yield from _given(scale, scale.backbones[0], "2wiki", RETRIEVED)
    for key, backbone in {"hotpotqa": large, "2wiki": scale.backbones[0]}.items():
        where = {"dataset": paper.DATASETS[key], "control": "main configuration"}
        cell = answer_cell(scale, main_model(scale, backbone), key, k=2)
        printed = {"f1": paper.number(RAW, "f1", **where)}
        yield from scores("SeDeM, K=2", scale.sets[key].title, cell, METRICS, printed)
    for key in ("hotpotqa", "2wiki"):
        where = {"dataset": paper.DATASETS[key]}
        printed = {m: paper.number("inline_control_full_bank", m, **where) for m in METRICS}
        limit = scale.costly_limit
        cell = Cell(variant=full_bank(scale, key), questions=key, k="all", limit=limit)
        yield from scores("full bank: SeDeM", scale.sets[key].title, cell, METRICS, printed)
    yield from _distant(scale)
    yield from _shifted(scale)
    for key in dict.fromkeys(("hotpotqa", "2wiki", *scale.ablation)):
        metrics = METRICS if key in ("hotpotqa", "2wiki") else ("f1",)
        cell = quality.constant(key)
        yield from scores("constant answer", scale.sets[key].title, cell, metrics)


def _given(scale: Scale, backbone: str, key: str, rows: Sequence[Row]) -> Iterator[Number]:
    """Answers of readers with a given input, on one set."""
    for label, fields, table, method in rows:
        cell = answer_cell(scale, main_model(scale, backbone), key, **fields)
        printed: dict[str, float | None] = {}
        if table:
            where = {"dataset": paper.DATASETS[key], "method": method}
            where |= {"k": fields["k"]} if fields.get("method") == "rag" else {}
            printed = {m: paper.number(table, m, **where) for m in METRICS}
        title = scale.sets[key].title
        yield from scores(label, title, cell, METRICS, printed)
        if scale.name == "paper" and fields.get("method") == "rag":
            # "Despite retrieval recall increasing to 1.0"
            recall = 100.0 if (key, fields["k"]) == ("2wiki", 10) else None
            yield Number(label, f"{title} recall", recall, cell, f"recall@{fields['k']}")


def _more_given(scale: Scale) -> Iterator[Number]:
    """Gold documents for more methods, and for a SeDeM with equally little training."""
    if scale.name == "paper":
        return
    cells = {
        name: answer_cell(scale, main_model(scale), "hotpotqa", method, control="gold")
        for name, method in MORE_GIVEN.items()
    }
    fields = {"control": "gold-documents", "k": "all", "limit": scale.costly_limit}
    equal = answer_cell(scale, equal_budget(scale), "hotpotqa", **fields)
    cells["SeDeM, trained as little"] = equal
    title = scale.sets["hotpotqa"].title
    for name, cell in cells.items():
        yield from scores(f"identical gold input: {name}", title, cell, METRICS)


def _distant(scale: Scale) -> Iterator[Number]:
    """Labels from answer strings and from evidence; both are trained alike and select K=2."""
    sources = {
        "nano": (
            '[{path: squad/train-44-articles.json, records: ":6", label: answer}, '
            '{path: wikipedia/articles.jsonl.xz, set: exact-facts, records: ":200", '
            "label: answer, options: {split: train, count: 1200}}]"
        ),
        "paper": '[{path: hotpotqa, records: "500:", label: answer}]',
    }
    # An answer of yes or no labels no block, but the reader learns from it.
    own = (f"data.training={sources[scale.name]}", "data.evidence_only=false")
    distant = Variant("distant-supervision", stage2=own)
    main = main_model(scale) if scale.name == "paper" else BASE
    for label, variant, method in (
        ("labels from answer strings", distant, "SeDeM, answer-string selector"),
        ("labels from evidence", main, "SeDeM learned-K=2"),
    ):
        for key in ("hotpotqa",) if scale.name == "paper" else scale.ablation:
            cell, printed = ablations.answers(scale, variant, key, k=2), {}
            if scale.name == "paper":  # on the whole set
                cell = Cell(variant=variant, questions=key, k=2)
                printed["f1"] = paper.number(DISTANT, "f1", method=method)
            title = scale.sets[key].title
            yield from scores(label, title, cell, ("f1", "recall@2"), printed)


def _shifted(scale: Scale) -> Iterator[Number]:
    """Every segment boundary moved by 64 tokens, without selection.

    The paper has five configurations with the full bank and names one, the first of ours.
    """
    for shift, column in ((0, "f1_before"), (SHIFT, "f1_after")):
        label = f"boundaries moved by {shift} tokens"
        if scale.name != "paper":
            for key in scale.ablation:
                cell = ablations.answers(scale, BASE, key, shift=shift)
                yield from scores(label, scale.sets[key].title, cell)
            continue
        known: float | None = paper.number("inline_control_boundary_shift", column)
        for backbone, key in SHIFTED:
            cell = Cell(
                variant=full_bank(scale, key, backbone), questions=key, k="all", shift=shift
            )
            yield from scores(
                f"{backbone}: {label}", scale.sets[key].title, cell, paper={"f1": known}
            )
            known = None


KINDS = {"yes_no": "yes/no questions", "other": "other questions"}
"""Kinds of questions in a result, with their names in the table."""


@study(
    "Yes/no questions apart from the others",
    "The paper gives no numbers. A question is one of yes or no if its reference is.",
    drawn=("F1",),
)
def yes_no(scale: Scale) -> Iterator[Number]:
    """F1 by kind of question: rows of other tables that have it, and two constant answers."""
    sets = ("hotpotqa", "2wiki")
    rows: dict[tuple[Cell, str], str] = {}
    for row, cell, metric in _answered(scale, sets):
        if cell is not None and cell.questions in sets:
            rows.setdefault((cell, metric.removesuffix("f1")), row)
    for (cell, place), row in rows.items():
        title = scale.sets[cell.questions].title
        for kind, name in KINDS.items():
            found = Number(row, f"{title}, {name}: F1", None, cell, f"{place}{kind}.f1")
            if cell.read(scale) is None or found.value(scale) is not None:
                yield found
                column, metric = f"{title}, {name}", f"{place}{kind}.f1.n"
                yield Number(row, column, None, cell, metric, digits=0)


def _answered(scale: Scale, sets: Sequence[str]) -> Iterator[tuple[str, Cell | None, str]]:
    """Rows with their cells and the key of F1 in them; an answer in two tables appears twice."""
    for one in (quality.main_qa, controls, quality.more_memory, training.equal_training):
        for number in one.numbers(scale):
            if number.metric == "f1" or number.metric.endswith(".f1"):
                yield number.row, number.cell, number.metric
    for answer in ("yes", "no"):
        for key in sets:
            yield f'always "{answer}"', quality.constant(key, answer), "f1"

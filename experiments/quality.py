"""Quality of answers: methods, amounts of memory, and forms in which blocks are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments.system import paper
from experiments.system.answers import BUDGETS
from experiments.system.cells import Cell, answer_cell, answers_by_k, paper_cell
from experiments.system.models import (
    BASE,
    PAPER_FORM,
    Variant,
    equal_budget,
    further_trained,
    guided_model,
    main_model,
)
from experiments.system.scales import Scale
from experiments.system.tables import Number, entries, metric_of, ours, scores, study

SETS = ("2wiki", "musique", "qasper", "hotpotqa")
METRICS = ("f1", "rouge_l", "em")
REPORTS = "govreport"
"""The set of reports to summarize."""


@study()
def main_qa(scale: Scale) -> Iterator[Number]:
    """Main long-context QA (Tables main_qa_results and sedem_em).

    Answers have at most 64 new tokens, 128 on QASPER. K is 2, 2, 4 and 8 as in the paper.
    """
    for label, answer in {"constant answer": "", 'always "no"': "no"}.items():
        for key in SETS:
            yield from scores(label, scale.sets[key].title, constant(key, answer), METRICS)
    # Every method on every backbone; a smaller one is compared with the paper's 1B numbers.
    for backbone in scale.backbones:
        variant = main_model(scale, backbone)
        source = paper.BACKBONES.get(backbone, paper.BACKBONES["llama-3.2-1b"])
        prefix = "" if len(scale.backbones) == 1 else f"{backbone}: "
        for row in paper.rows("tab:main_qa_results"):
            if row["backbone"] != source:
                continue
            for key in SETS:
                printed = {m: row.get(f"{key}_{m}") for m in METRICS} | {"em": None}
                if row["method"] == "SeDeM" and source.endswith("-Base"):
                    where = {"backbone": source.removesuffix("-Base")}
                    printed["em"] = paper.number("tab:sedem_em", f"{key}_em", **where)
                title, cell = scale.sets[key].title, paper_cell(scale, row["method"], variant, key)
                yield from scores(prefix + row["method"], title, cell, METRICS, printed)
        for label, model, fields in _more_rows(scale, variant):
            for key in SETS:
                if cell := answer_cell(scale, model, key, **fields):
                    yield from scores(prefix + label, scale.sets[key].title, cell, METRICS)


def _more_rows(scale: Scale, variant: Variant) -> list[tuple[str, Variant, dict[str, Any]]]:
    """Rows that the paper's table lacks: a label, a model, and fields of its cells."""
    few: dict[str, Any] = {"limit": scale.costly_limit}
    setting, width = ("", "128") if scale.name == "paper" else ("1024", "1,024")
    windows = {"method": "beacon", "setting": setting}
    rows: list[tuple[str, Variant, dict[str, Any]]] = [
        ("SeDeM, evidence selected", variant, {"control": "gold"}),
        ("SeDeM, every block", variant, {"k": "all", **few}),
        ("SeDeM, no memory", variant, {"control": "none"}),
        ("frozen backbone, BM25's paragraphs as text", variant, {"method": "bm25"}),
        ("raw-text RAG with matched supervision", variant, {"method": "rag"}),
        ("ComprExIT, pieces of 512 tokens", variant, {"method": "comprexit"}),
        (f"Activation Beacon, windows of {width} tokens", variant, windows),
    ]
    if scale.name != "paper":
        equal, none = equal_budget(scale), {"control": "none", **few}
        for blocks, k in (("one block", 1), ("two blocks", 2), ("four blocks", 4)):
            rows.append((f"SeDeM with {blocks}", variant, {"k": k}))
        rows.append(("SeDeM, trained as little as the methods above", equal, few))
        rows.append(("the same, no memory", equal, none))
    elif variant.backbone == scale.backbones[0]:
        eleven = Variant("extract-11", ("model.extract_layers=[11]",))
        rows.append(("SeDeM, extraction after layer 11", eleven, {}))
    if scale.name == "nano":
        # A decoder with other tokens. Memory enters at the same relative depth as in the paper's
        # cross-model row, 10 of 28. States of other tokens cannot be regressed, so all of stage 1
        # is the paper's.
        decoder = "model.decoder=HuggingFaceTB/SmolLM2-135M-Instruct", "model.inject_layer=11"
        stage1 = (*equal.stage1, "losses.regress=0", "losses.regress_first=0")
        cross = replace(equal, name="smollm2-decoder", changes=decoder, stage1=stage1)
        rows.append(("SeDeM, trained as little, with SmolLM2-135M as decoder", cross, few))
        rows.append(("the same decoder, no memory", cross, none))
    return rows


def constant(questions: str, answer: str = "") -> Cell:
    """The same answer to every question; if it is empty, the best one on training questions."""
    return Cell("constant", questions=questions, answer=answer)


LIMITS = {"squad-10": 100, "exact-facts": 100, "hotpotqa": 300, "2wiki": 100, "musique": 40}
"""Number of questions of each set in guided form."""


@ours()
def more_memory(scale: Scale) -> Iterator[Number]:
    """More memory: answers by K, with and without guided attention.

    Guided answers have at most 32 new tokens.
    """
    sets = [key for key in LIMITS if key in scale.sets]
    for k in BUDGETS:
        for key in sets:
            # As other studies measure them, if they do.
            cell, limit = Cell(variant=main_model(scale), questions=key, k=k), None
            if k == 8 and key in (*scale.ablation, "musique"):
                continue
            if key in scale.ablation:
                limit = {4: 500, "all": 200}.get(k) if scale.name == "nano" else scale.limit
                cell = replace(cell, max_new_tokens=32)
            elif k == "all":
                limit = scale.costly_limit
            label, title = f"the paper's form, K={k}", scale.sets[key].title
            yield from scores(label, title, replace(cell, limit=limit), (metric_of(key),))
    for form, trained in {"guided, same weights": False, "guided, trained further": True}.items():
        for k in BUDGETS:
            for key in sets:
                yield by_k(f"{form}, K={k}", scale, guided_answers(scale, key, trained), k)


def by_k(row: str, scale: Scale, cell: Cell, k: int | str) -> Number:
    """The score at one K of a cell of answers at every K."""
    metric = metric_of(cell.questions)
    title = f"{scale.sets[cell.questions].title} {metric.upper()}"
    return Number(row, title, None, cell, f"budgets.{k}.{metric}")


def guided_answers(scale: Scale, questions: str, trained: bool = True) -> Cell:
    """Guided answers to a set at every K, by the model trained with guidance or before that."""
    limit = LIMITS.get(questions, 0)
    if trained:
        return answers_by_k(scale, questions, guided_model(scale), limit)
    return answers_by_k(scale, questions, main_model(scale), limit, form="guided")


MIXED, ALONE = "guided-conditions", "guided-text"
CONDITIONS = {
    "memory": (MIXED, "memory"),
    "text": (MIXED, "text"),
    "the best as text, the others as memory": (MIXED, "both"),
    "text, trained on text alone": (ALONE, "text"),
}
"""The model and the form in which it reads blocks, by label."""


@ours()
def conditions(scale: Scale) -> Iterator[Number]:
    """The same blocks as memory, as text, or as both.

    Answers have at most 32 new tokens.
    """
    # One model is trained on all three conditions, another on text alone with as many steps.
    models = {
        MIXED: further_trained(scale, MIXED, "stage2-conditions"),
        ALONE: further_trained(scale, ALONE, "stage2-text", form=PAPER_FORM),
    }
    asked = {"questions": scale.ablation[0], "limit": 10 if scale.name == "nano" else scale.limit}
    times = Cell("condition-times", variant=models[MIXED], dtype="float32", **asked)
    for label, (name, condition) in CONDITIONS.items():
        for k in (1, 2, 4, 8):
            row = f"{label}, K={k}"
            for key in scale.ablation:
                cell = answers_by_k(scale, key, models[name], 100, condition=condition)
                yield by_k(row, scale, cell, k)
            stored = "stored bytes a token", f"bytes.{condition}", 0
            yield from entries(row, times, ("TTFT, ms", f"times.{condition}.{k}"), stored)


@study()
def ruler(scale: Scale) -> Iterator[Number]:
    """RULER qa_2 by context length (Table ruler_qa2).

    Lengths are counted in the backbone's own tokens. Text beyond its positions is cut off, and the
    result counts it. The paper stops at 16K.
    """
    backbone = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else None
    methods = {"Full-context reference": "Backbone (Frozen)", "SeDeM": "SeDeM", "ICAE": "ICAE"}
    if scale.name == "paper":
        # The paper does not say which of its two references it is.
        methods["Full-context reference, fine-tuned"] = "Backbone (Fine-Tuned)"
    known = {row["method"]: row for row in paper.rows("tab:ruler_qa2")}
    for printed, method in methods.items():
        for key in (key for key in scale.sets if key.startswith("ruler-")):
            value = known.get(printed, {}).get(key.removeprefix("ruler-"))
            cell = paper_cell(scale, method, main_model(scale, backbone), key)
            yield Number(printed, scale.sets[key].title, value, cell, "string_match")


@study()
def summaries(scale: Scale) -> Iterator[Number]:
    """Summaries of whole reports (GovReport).

    The paper gives no numbers, and has no such set. SeDeM reads every block; for the reference,
    text beyond its positions is cut off.
    """
    # The models were trained for HotpotQA.
    if REPORTS in scale.sets:
        for row, method, k in (
            ("SeDeM, every block", "sedem", "all"),
            ("Full-context reference", "full-context", None),
        ):
            cell = answer_cell(scale, main_model(scale), REPORTS, method, k=k)
            yield from scores(row, scale.sets[REPORTS].title, cell, ("rouge_l",))


@ours()
def adaptive(scale: Scale) -> Iterator[Number]:
    """An adaptive budget: as many blocks as their scores ask for.

    The model was trained with guided attention, which 'auto' needs.
    """
    for k in (1, 2, 4, 8, "auto") if scale.name == "paper" else ():
        for key in scale.ablation:
            cell = answer_cell(scale, guided_model(scale), key, k=k, limit=scale.limit)
            title = scale.sets[key].title
            yield from scores(f"K={k}", title, cell)
            yield Number(f"K={k}", f"{title} states", None, cell, "conditioning")


@study()
def transfer(scale: Scale) -> Iterator[Number]:
    """Transfer to a set that was not trained for (appendix OOD Transfer)."""
    # Both are trained on a mixture without QASPER.
    for method, fields in (("SeDeM", {"limit": scale.limit}), ("ICAE", {"method": "icae"})):
        printed = {"f1": paper.number("inline_ood_transfer", "token_f1", method=method)}
        cell = answer_cell(scale, BASE, "qasper", trained_for="mixture", **fields)
        yield from scores(method, scale.sets["qasper"].title, cell, paper=printed)

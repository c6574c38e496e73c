"""What ships with sedem: sedem-nano and its controls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments.quality import by_k, guided_answers
from experiments.system import paper
from experiments.system.answers import BUDGETS
from experiments.system.bench import SLOT_TYPES
from experiments.system.cells import Cell
from experiments.system.models import GUIDED, guided_model, main_model
from experiments.system.scales import Scale
from experiments.system.tables import Number, entries, metric_of, scores, study

MAX_NEW_TOKENS = 32
NAME = "sedem-nano"
BEFORE = "before guided training, in the paper's form"

SEDEM: dict[str, dict[str, Any]] = {
    "K=1": {"k": 1},
    "K=2": {"k": 2},
    "K=4": {"k": 4, "limit": 500},
    "K=2, gold first": {"k": 2, "control": "gold", "limit": 500},
    "K=all": {"k": "all", "limit": 200},
    "K=2, wrong blocks": {"k": 2, "control": "wrong", "limit": 500},
    "no memory": {"k": 2, "control": "none", "limit": 500},
}
"""Ways to answer from memory in the paper's form: table rows, with fields of their cells."""

TEXT: dict[str, dict[str, Any]] = {
    "every paragraph as text": {"method": "full-context", "limit": 200},
    "BM25's two paragraphs as text": {"method": "bm25", "k": 2, "limit": 200},
}
"""Ways to answer from text, with fewer questions: a base model does not stop by itself."""


@study(
    "The shipped model, its controls and the frozen backbone",
    "The paper gives no numbers. Answers have at most 32 new tokens.",
    drawn=("F1", "EM"),
)
def shipped_model(scale: Scale) -> Iterator[Number]:
    """Score and recall by way to answer, on the sets of the ablations."""
    for k in BUDGETS:
        for key in scale.ablation:
            yield by_k(f"{NAME}, K={k}", scale, guided_answers(scale, key), k)
    for prefix, rows in ((f"{NAME} {BEFORE}", SEDEM), ("frozen backbone", TEXT)):
        for label, fields in rows.items():
            for key in scale.ablation:
                selects = "control" not in fields and fields.get("k", 1) != 1
                metrics = (metric_of(key), *(["recall@2"] if selects else []))
                cell, title = _answers(scale, key, fields), scale.sets[key].title
                yield from scores(f"{prefix}, {label}", title, cell, metrics)
    for key in scale.ablation:
        cell = Cell("block-recall", "bm25", main_model(scale), questions=key)
        title = scale.sets[key].title
        yield from scores("BM25 over the same blocks", title, cell, ("recall@2",))


def _answers(scale: Scale, questions: str, fields: dict[str, Any]) -> Cell:
    limit = scale.limit if scale.stand_in else fields.get("limit")
    changes = {**fields, "limit": limit, "max_new_tokens": MAX_NEW_TOKENS}
    return Cell(variant=main_model(scale), questions=questions, **changes)


@study(
    "The shipped model beside the paper (rows of Table main_qa_results)",
    "Nothing makes the rows comparable: the backbone, the training and the samples differ.",
    drawn=("F1",),
)
def shipped_beside_paper(scale: Scale) -> Iterator[Number]:
    """Rows of the paper, then ours, on the sets that both have."""
    sets = ("hotpotqa", "2wiki", "musique")
    for backbone, method, label in (
        ("llama-3.2-1b", "Backbone (Frozen)", "Llama-3.2-1B frozen"),
        ("llama-3.2-1b", "SeDeM", "SeDeM, Llama-3.2-1B, C=4"),
        ("llama-3.2-3b", "SeDeM", "SeDeM, Llama-3.2-3B, C=4"),
    ):
        where = {"backbone": paper.BACKBONES[backbone], "method": method}
        for key in sets:
            value = paper.number("tab:main_qa_results", f"{key}_f1", **where)
            yield Number(label, f"{scale.sets[key].title} F1", value, metric="")
    # These sets are smaller than the limits of answers from memory.
    own = {f"{NAME} {BEFORE}, {row}": SEDEM[row] for row in ("K=2", "K=4", "no memory")}
    rows = {label: {**fields, "limit": None} for label, fields in own.items()}
    rows |= {f"frozen backbone, {row}": fields for row, fields in TEXT.items()}
    for label, fields in rows.items():
        for key in sets:
            yield from scores(label, scale.sets[key].title, _answers(scale, key, fields))


@study("What one command prints of the shipped model", "The paper gives no numbers.")
def shipped_command(scale: Scale) -> list[Number]:
    """`sedem eval sedem -k 2 --limit 200` in the paper's form, with the set's own answer limit."""
    key, limit = scale.ablation[0], scale.limit if scale.stand_in else 200
    cell = Cell(variant=guided_model(scale), questions=key, k=2, dtype="float32", limit=limit)
    metrics = ("f1", "em", "rouge_l", "recall@1", "recall@2")
    return scores(scale.sets[key].title, "", cell, metrics)


@study("What memory carries before stage 2, in loss a token", "The paper gives no numbers.")
def shipped_memory(scale: Scale) -> Iterator[Number]:
    """Loss per token in each condition, on the text after a segment and on the segment itself."""
    names = ("raw_text", "true_states", "memory", "other_memory", "nothing")
    cell = Cell("memory", variant=main_model(scale))
    for target in ("continuation", "recall"):
        columns = ((name.replace("_", " "), f"{target}.{name}", 3) for name in names)
        yield from entries(f"after stage 1: {target}", cell, *columns)


@study("What training the shipped model took", "The paper gives no numbers.", drawn=("minutes",))
def shipped_training(scale: Scale) -> Iterator[Number]:
    """Steps, examples, minutes and trained parameters of each recipe."""
    for stage in (*scale.stages, *GUIDED) if scale.shipped else scale.stages:
        yield from entries(
            f"{stage}.yaml",
            Cell("training", variant=main_model(scale), stage=stage),
            ("steps", "steps", 0),
            ("examples", "examples_seen", 0),
            ("minutes", "seconds", 0, 60.0),
            ("trained parameters", "trained_parameters", 0),
            ("machine", "machine.device", 0),
            ("threads", "machine.threads", 0),
        )


@study(
    "The shipped model's answers by their limit",
    "The paper gives no numbers. On COVID-QA the rows K=4 and no memory have 491 questions at 32 "
    "tokens and 200 at 64.",
)
def answer_limit(scale: Scale) -> Iterator[Number]:
    """F1 of the main model with answers of at most 32 new tokens, and of the set's own limit."""
    rows: dict[str, dict[str, Any]] = {
        "K=2": {"k": 2},
        "K=4": {"k": 4},
        "no memory": {"control": "none"},
    }
    more = {("qasper", "K=4"): 500, ("qasper", "no memory"): 500}
    for key in ("hotpotqa", "2wiki", "musique", "qasper"):
        questions = scale.sets[key]
        for row, fields in rows.items():
            limit = more.get((key, row)) if scale.name == "nano" else None
            few = {"k": 2, **fields, "limit": limit, "max_new_tokens": MAX_NEW_TOKENS}
            for tokens, changes in ((MAX_NEW_TOKENS, few), (questions.max_new_tokens, fields)):
                cell = Cell(variant=main_model(scale), questions=key, **changes)
                yield Number(row, f"{questions.title} F1, {tokens} tokens", None, cell)


@study(
    "Answers with slots in fewer bytes",
    "The paper gives no numbers.",
    drawn=("F1", "EM", "recall"),
)
def slot_types(scale: Scale) -> Iterator[Number]:
    """Bytes per token, scores and recall by type, on the first set of the ablations."""
    limit = scale.limit if scale.stand_in else 300
    key = scale.ablation[0]
    model = Cell(variant=main_model(scale), questions=key, max_new_tokens=32, dtype="float32")
    for slots in SLOT_TYPES:
        cell = replace(model, slots=slots, limit=limit)
        yield from entries(slots, cell, ("bytes a token", "bytes_per_token", 0))
        yield from scores(slots, scale.sets[key].title, cell, ("f1", "em", "recall@2"))

"""The methods of the paper's tables, by the paper's names and ours."""

from __future__ import annotations

from typing import Any

from experiments.system.cells import Cell
from experiments.system.scales import Scale, recipe_exists
from experiments.system.variants import Variant
from sedem.baselines.registry import TRAINED
from sedem.evaluation.registry import METHODS

PEERS = {
    "Backbone (Frozen)": "full-context",
    "Backbone (Fine-Tuned)": "full-context-tuned",
    "LongLLMLingua": "longllmlingua",
    "HMT": "hmt",
    "ICAE": "icae",
    "500xCompressor": "500x",
    "Activation Beacon": "beacon",
    "ComprExIT (reference)": "comprexit",
    "ComprExIT (matched)": "comprexit",
    "SeDeM": "sedem",
}
SETTINGS = {"ComprExIT (matched)": "128"}
"""The recipes of a method that has several; the first recipe has no name."""
PAPER_SETS = {"comprexit": ("hotpotqa", "2wiki")}
"""The sets that the paper trains a method for, if not all; the paper scale trains no others."""


def paper_cell(scale: Scale, method: str, variant: Variant, questions: str) -> Cell | None:
    """The answers of a method of the paper's tables to a set, at the set's own K.

    See `answer_cell`; `method` is the paper's name.
    """
    name = PEERS[method]
    k = scale.sets[questions].k if name == "sedem" else None
    setting = SETTINGS.get(method, "")
    return answer_cell(scale, variant, questions, name, k=k, setting=setting)


def answer_cell(
    scale: Scale, variant: Variant, questions: str, method: str = "sedem", **fields: Any
) -> Cell | None:
    """The answers of a method to a set; None if sedem lacks the method.

    Args:
        scale: gives sets, recipes and limits.
        variant: the model, or the one whose backbone the method uses.
        questions: the set.
        method: its name in `sedem eval --list`. A trained one has no cell without a recipe for the
            backbone, nor at paper scale on a set that the paper does not train it for.
        fields: other fields of the cell. Without `limit`, `question_limit` sets the number of
            questions. Without `k`, raw-text RAG picks as many paragraphs as SeDeM picks
            blocks.
    """
    if method not in METHODS:
        return None
    backbone = variant.backbone or scale.backbones[0]
    recipe = scale.baseline_recipe(method, "questions", backbone, fields.get("setting", ""))
    if method in TRAINED and not recipe_exists(recipe):
        return None
    if scale.name == "paper" and questions not in PAPER_SETS.get(method, (questions,)):
        return None
    fields = {"limit": question_limit(scale, questions, method), **fields}
    if method == "rag":
        fields.setdefault("k", scale.sets[questions].k)
    return Cell(method=method, variant=variant, questions=questions, **fields)


def question_limit(scale: Scale, questions: str, method: str) -> int | None:
    """The number of questions for a method; None means the set's own limit."""
    limit, of_set = None, scale.sets[questions].limit
    if method == "longllmlingua":
        limit = scale.slowest_limit
    elif method == "bm25" or method in TRAINED:
        limit = scale.costly_limit
    return None if limit is None or (of_set is not None and of_set <= limit) else limit

"""The methods of the paper's tables, by its names and ours."""

from __future__ import annotations

from typing import Any

from experiments.cells import Cell
from experiments.scales import Scale
from experiments.variants import Variant
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
"""Recipes of methods that have several; the first has no name."""


def cell(scale: Scale, method: str, variant: Variant, questions: str) -> Cell | None:
    """A method of the paper's tables on a set, at the set's own K; see `own`."""
    name = PEERS[method]
    k = scale.sets[questions].k if name == "sedem" else None
    return own(scale, variant, questions, name, k=k, setting=SETTINGS.get(method, ""))


def own(
    scale: Scale, variant: Variant, questions: str, method: str = "sedem", **changes: Any
) -> Cell | None:
    """A method's answers to a set; None for what is not in the code.

    Args:
        scale: which.
        variant: whose backbone.
        questions: the set.
        method: its name in `sedem eval --list`; a trained one has no cell without a recipe for
            the backbone.
        changes: other fields of the cell; without a limit it is asked what `asked` says,
            without K raw-text RAG picks as many as SeDeM.
    """
    if method not in METHODS:
        return None
    backbone = variant.backbone or scale.backbones[0]
    recipe = scale.baseline_recipe(method, "questions", backbone, changes.get("setting", ""))
    if method in TRAINED and not recipe.is_file():
        return None
    changes = {"limit": asked(scale, questions, method), **changes}
    if method == "rag":
        changes.setdefault("k", scale.sets[questions].k)
    return Cell(method=method, variant=variant, questions=questions, **changes)


def asked(scale: Scale, questions: str, method: str) -> int | None:
    """How many questions of a set a method is asked; None means the set's own limit."""
    limit, own = None, scale.sets[questions].limit
    if method == "longllmlingua":
        limit = scale.slowest_limit
    elif method == "bm25" or method in TRAINED:
        limit = scale.costly_limit
    return None if limit is None or (own is not None and own <= limit) else limit

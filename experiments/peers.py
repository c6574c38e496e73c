"""The methods of the paper's tables, by its names and ours."""

from __future__ import annotations

from experiments.cells import Cell
from experiments.scales import Scale
from experiments.variants import Variant
from sedem.baselines.catalog import TRAINED
from sedem.evaluation.methods import METHODS

PEERS = {
    "Backbone (Frozen)": "full-context",
    "Backbone (Fine-Tuned)": "full-context-tuned",
    "LongLLMLingua": "longllmlingua",
    "HMT": "hmt",
    "ICAE": "icae",
    "500xCompressor": "500x",
    "Activation Beacon": "beacon",
    "ComprExIT (reference)": "comprexit",
    "SeDeM": "sedem",
}


def cell(scale: Scale, method: str, variant: Variant, questions: str) -> Cell | None:
    """A method's answers to a set at the set's own K; None for a method that is not in the code.

    A trained baseline without a recipe for the backbone has none either.
    """
    own = PEERS[method]
    if own not in METHODS:
        return None
    backbone = variant.backbone or scale.backbones[0]
    if own in TRAINED and not scale.baseline_recipe(own, "questions", backbone).is_file():
        return None
    k = scale.sets[questions].k if own == "sedem" else None
    return Cell(method=own, variant=variant, questions=questions, k=k)

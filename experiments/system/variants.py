"""The models of the studies: the main configuration, and variants trained on one equal budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments.system.scales import Scale


@dataclass(frozen=True)
class Variant:
    """A model to train for a comparison.

    Attributes:
        name: name of its folder and its cells.
        changes: overrides of both recipes, as `--set` takes them.
        stage1: overrides of stage 1 only.
        stage2: overrides of stage 2 only.
        main: whether it is the main configuration, or that trained further with guided attention; a
            scale may ship the latter.
        backbone: a backbone of the scale; None means its first.
        k: number of blocks without selection; None means the scale's.
        every_block: stage 2 restores every block and trains no selector; see `without_selector`.
        further: recipes that train it from the main model in its guided form, in order; empty means
            the recipes of the study, from the beginning.
        start: settings of the main model that are changed, with their values, before `further`.
        adapted: a key of `adapted.ADAPTED`: a model of `sedem adapt`, or one compared with it.
        new_selector: replace the main model's selector with an untrained one before `further`.
    """

    name: str
    changes: tuple[str, ...] = ()
    stage1: tuple[str, ...] = ()
    stage2: tuple[str, ...] = ()
    main: bool = False
    backbone: str | None = None
    k: int | None = None
    every_block: bool = False
    further: tuple[str, ...] = ()
    start: tuple[tuple[str, Any], ...] = ()
    new_selector: bool = False
    adapted: str = ""


def main_model(scale: Scale, backbone: str | None = None) -> Variant:
    """SeDeM as in the paper, on a backbone of the scale; None means the first."""
    backbone = backbone or scale.backbones[0]
    return Variant(f"sedem-{backbone}", main=True, backbone=backbone)


GUIDED = ("stage2-guided",)
"""The recipes that train the main model further, with guided attention, in order."""


def guided_model(scale: Scale) -> Variant:
    """The main model on the first backbone of a scale, trained further with guided attention."""
    return replace(main_model(scale), name=f"{main_model(scale).name}-guided", further=GUIDED)


BASE = Variant("base")
"""The model that the variants differ from; it is trained like them."""


def without_selector(scale: Scale, variant: Variant) -> Variant:
    """A variant trained like the paper's ablations: all blocks are restored, and none is ranked.

    If the evidence is put among few blocks instead (`Scale.disabled`), it is the variant itself.
    """
    if scale.disabled[0] != "all":
        return variant
    return replace(variant, name=f"{variant.name}-all", every_block=True)


def full_bank(scale: Scale, questions: str) -> Variant:
    """The model of the paper's full bank: trained without selector on HotpotQA, main on 2Wiki."""
    if scale.disabled[0] != "all" or questions != "hotpotqa":
        return main_model(scale)
    return without_selector(scale, BASE)


NEXT_TOKEN_ALONE = (
    "losses.distill=0",
    "losses.reconstruct=0",
    "losses.regress=0",
    "losses.regress_first=0",
)
"""Stage 1 of a model without restored states (section Is Decompression Necessary?)."""


def equal_budget(scale: Scale, compression: int | None = None) -> Variant:
    """SeDeM trained on the same windows and questions, and as many, as a trained baseline.

    Args:
        scale: gives recipes, with its overrides of the baselines' budgets.
        compression: C; None means that of the study recipes.
    """
    name = "equal-budget"
    changes: tuple[str, ...] = ()
    if compression is not None:
        name, changes = f"equal-c{compression}", (f"model.compression={compression}",)
    if scale.name == "smoke":
        # Every model of this scale is trained on the fixtures.
        return Variant(name, changes)
    text, questions = (
        _entries(scale.baseline_recipe("icae", stage, scale.backbones[0]), scale.baselines[stage])
        for stage in ("text", "questions")
    )
    return Variant(
        name,
        changes,
        stage1=_as_long(text),
        stage2=(
            *_as_long(questions),
            f"data.training={flow(questions['data']['training'])}",
            "losses.conditioning=gold-then-selected",
        ),
    )


@cache
def _entries(recipe: Path, overrides: tuple[str, ...]) -> Mapping[str, Any]:
    """The entries of a recipe; many variants need the same, and YAML is slow to read."""
    from sedem.training.recipe import read_entries

    return read_entries(recipe, overrides)


def _as_long(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    optimization = {"accumulation": 1, "warmup_ratio": 0, **recipe["optimization"]}
    names = ("steps", "batch_size", "accumulation", "warmup", "warmup_ratio")
    return tuple(f"optimization.{name}={optimization[name]}" for name in names)


FOLLOWED = {"qasper": 50}
"""Records that choose the checkpoint instead of training: papers of QASPER; 500 of other sets."""


def supervision(baseline: Path, sedem: Path) -> list[str]:
    """Overrides that give a baseline the training data of SeDeM for a set.

    If the paper limits the answers of the method itself, that limit is kept. If the recipe tracks
    losses on held-out data, the first records of the set are kept for that.

    Args:
        baseline: the recipe of a trained baseline on questions.
        sedem: the recipe of SeDeM's stage 2 for the set.
    """
    from sedem.training.recipe import read_entries

    own, theirs = read_entries(baseline), read_entries(sedem)
    training, result = theirs["data"]["training"], []
    if "evaluation" in own["data"]:
        first = [(source, FOLLOWED.get(source["path"], 500)) for source in training]
        followed = [{**source, "records": f":{count}"} for source, count in first]
        training = [{**source, "records": f"{count}:"} for source, count in first]
        result.append(f"data.evaluation={flow(followed)}")
    result.append(f"data.training={flow(training)}")
    if own["method"] != "500x":
        result.append(f"data.answer_limit={theirs['data']['answer_limit']}")
    if "max_paragraphs" in own["data"]:
        result.append(f"data.max_paragraphs={theirs['data']['max_blocks']}")
    if "k" in own["model"]:
        result.append(f"model.k={theirs['model']['k']}")
    return result


def flow(value: Any) -> str:
    """A value as one line of YAML, for an override."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()

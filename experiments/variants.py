"""Models that are compared: the main configuration, and variants trained under one equal budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from experiments.scales import RUNS, Scale, tiny_backbone


@dataclass(frozen=True)
class Variant:
    """A model to train for a comparison.

    Attributes:
        name: of its folder and cells.
        changes: overrides of both recipes, as `--set` takes them.
        stage1: overrides of stage 1 alone.
        stage2: overrides of stage 2 alone.
        main: the main configuration: where a scale ships it, that checkpoint.
        backbone: which backbone of the scale; None means its first.
        k: blocks it is asked with where selection is taken out; None means the scale's.
    """

    name: str
    changes: tuple[str, ...] = ()
    stage1: tuple[str, ...] = ()
    stage2: tuple[str, ...] = ()
    main: bool = False
    backbone: str | None = None
    k: int | None = None


def main(backbone: str | None = None) -> Variant:
    """SeDeM as the paper runs it."""
    return Variant(
        "sedem" if backbone is None else f"sedem-{backbone}", (), main=True, backbone=backbone
    )


BASE = Variant("base")
"""What the variants differ from, trained like them."""

NEXT_TOKEN_ALONE = (
    "losses.distill=0",
    "losses.reconstruct=0",
    "losses.regress=0",
    "losses.regress_first=0",
)
"""Stage 1 of a model without restored states (section Is Decompression Necessary?)."""


def equal_budget(scale: Scale) -> Variant:
    """The study's SeDeM on as many windows and questions, and the same, as a trained baseline."""
    from sedem.training.recipe import read_entries

    text, questions = (
        read_entries(scale.baseline_recipe("icae", stage, scale.backbones[0]))
        for stage in ("text", "questions")
    )
    if scale.name == "smoke":
        # It reads the fixtures, as all do.
        return Variant("equal-budget")
    return Variant(
        "equal-budget",
        stage1=_as_long(text),
        stage2=(
            *_as_long(questions),
            f"data.training={_flow(questions['data']['training'])}",
            "losses.conditioning=gold-then-selected",
        ),
    )


def _as_long(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    optimization = {"accumulation": 1, **recipe["optimization"]}
    names = ("steps", "batch_size", "accumulation", "warmup")
    return tuple(f"optimization.{name}={optimization[name]}" for name in names)


def checkpoint(variant: Variant, scale: Scale, questions: str, data: Path) -> Path:
    """The trained checkpoint of a variant, trained first if it is not there.

    Args:
        variant: which.
        scale: whose recipes and budget.
        questions: set that stage 2 is trained for; at smoke and nano one mixture serves all.
        data: folder that the recipes' data paths are relative to.
    """
    backbone = variant.backbone or scale.backbones[0]
    if variant.main and backbone in scale.shipped:
        return scale.shipped[backbone]
    return _stage(variant, scale, "stage2", questions, data)


def baseline_checkpoint(
    method: str,
    scale: Scale,
    backbone: str,
    questions: str,
    data: Path,
    *,
    setting: str = "",
    gold: bool = False,
) -> Path:
    """The trained checkpoint of a baseline, trained first if it is not there: text, then questions.

    Args:
        method: a trained baseline.
        scale: whose recipes.
        backbone: of the scale.
        questions: set that it is trained for; at smoke and nano one mixture serves all.
        data: folder that the recipes' data paths are relative to.
        setting: which recipe for questions; the text recipe of that name where there is one.
        gold: trained on documents with evidence alone.
    """
    from sedem.training.baseline import train_baseline
    from sedem.training.baseline_recipe import load_baseline_recipe

    if scale.name == "smoke":
        tiny_backbone()
    start: list[str] = []
    final = Path()
    for stage in ("text", "questions"):
        path = scale.baseline_recipe(method, stage, backbone, setting)
        if not path.is_file():
            continue
        own = [*scale.baselines[stage], *start]
        output = RUNS / scale.name / path.stem
        if scale.name == "paper":
            output = RUNS / scale.name / backbone / path.stem
        if stage == "questions":
            if gold:
                own.append("data.documents=gold")
                output = output.with_name(f"{output.name}-gold")
            if scale.name == "paper":
                output = output.with_name(f"{output.name}-{questions}")
                own += supervision(path, scale.recipe("stage2", backbone, questions))
        final = output / "final"
        if not (output / "training.json").is_file():
            overrides = [*own, f"data_root={data}", f"run.output={output}"]
            train_baseline(load_baseline_recipe(method, path, overrides))
        start = [f"start_from={final}"]
    return final


FOLLOWED = {"qasper": 50}
"""Records whose losses choose the checkpoint and are not trained on: papers of QASPER, else 500."""


def supervision(baseline: Path, sedem: Path) -> list[str]:
    """Overrides that give a baseline what SeDeM learns from for a set.

    A limit of answers that the paper sets for the method itself stays; where losses are followed,
    the first records are kept for that.

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
        result.append(f"data.evaluation={_flow(followed)}")
    result.append(f"data.training={_flow(training)}")
    if own["method"] != "500x":
        result.append(f"data.answer_limit={theirs['data']['answer_limit']}")
    if "max_paragraphs" in own["data"]:
        result.append(f"data.max_paragraphs={theirs['data']['max_blocks']}")
    if "k" in own["model"]:
        result.append(f"model.k={theirs['model']['k']}")
    return result


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def stage1_checkpoint(variant: Variant, scale: Scale, data: Path) -> Path:
    """The variant after stage 1, before any adapter."""
    return _stage(variant, scale, "stage1", "", data)


def budget(folder: Path) -> dict[str, Any]:
    """What training the run in a folder's parent took, and those it started from.

    It stands beside a result. `all_tokens_seen` are those of every run; None where one did not
    count them.
    """
    path = folder.parent / "training.json"
    if not path.is_file():
        return {}
    summary = json.loads(path.read_text(encoding="utf-8"))
    start = summary["recipe"].get("start_from")
    before = budget(Path(start)) if start else {}
    tokens, earlier = summary.get("tokens_seen"), before.get("all_tokens_seen", 0)
    return {
        "steps": summary["steps"],
        "examples_seen": summary["examples_seen"],
        "tokens_seen": tokens,
        "all_tokens_seen": None if tokens is None or earlier is None else tokens + earlier,
        "seconds": summary["seconds"],
        "trained_parameters": sum(summary["trained_parameters"].values()),
        "log": summary["log"],
        "before": before,
    }


def _stage(variant: Variant, scale: Scale, stage: str, questions: str, data: Path) -> Path:
    from sedem.training.recipe import load_recipe
    from sedem.training.run import STAGES

    backbone = variant.backbone or scale.backbones[0]
    if scale.name == "smoke":
        tiny_backbone()
    if stage == "stage1" and variant == replace(BASE, name=variant.name, stage2=variant.stage2):
        # What differs in stage 2 alone starts from the same memory.
        variant = BASE
    shared = questions if scale.name == "paper" else ""
    output = RUNS / scale.name / variant.name / f"{stage}{'-' if shared else ''}{shared}"
    if (output / "training.json").is_file():
        return output / "final"
    overrides = [*scale.overrides, *variant.changes, f"data_root={data}", f"run.output={output}"]
    if stage == "stage1":
        overrides += [*scale.stage1, *variant.stage1]
    else:
        start = _stage(variant, scale, "stage1", "", data)
        overrides += [*scale.stage2, *variant.stage2, f"start_from={start}"]
    kind, train = STAGES[stage]
    recipe = load_recipe(kind, scale.recipe(stage, backbone, questions), overrides)
    return train(recipe)

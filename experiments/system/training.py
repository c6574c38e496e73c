"""Trained models of the studies: a finished run is reused, a missing one is trained.

A run is finished when its folder contains training.json; its model is in `final`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.system.adapted import ADAPTED
from experiments.system.forms import FORMS, PAPER_FORM, with_new_selector, with_settings
from experiments.system.scales import ROOT, Scale, tiny_backbone
from experiments.system.variants import BASE, GUIDED, Variant, main_model, supervision


def checkpoint(
    variant: Variant, scale: Scale, questions: str, data: Path, form: str = PAPER_FORM
) -> Path:
    """The trained checkpoint of a variant.

    Args:
        variant: the model.
        scale: gives recipes and budget.
        questions: set that stage 2 is trained for; at smoke and nano one mixture serves all sets.
        data: folder that the recipes' data paths are relative to.
        form: a key of `forms.FORMS`. A model that was trained further has the form of its recipes.
    """
    if variant.adapted:
        return ADAPTED[variant.adapted](scale, data)
    if variant.further:
        return _shipped(variant, scale) or _further(variant, scale, data)
    if _has_own_recipes(variant, scale):
        folder = run_of_stage(variant, scale, scale.stages[-1], data) / "final"
    else:
        folder = _stage(variant, scale, "stage2", questions, data)
    if form == PAPER_FORM:
        return folder  # the recipes keep the paper's form
    return with_settings(folder, FORMS[form], scale.runs / "forms" / form / variant.name)


def stage1_checkpoint(variant: Variant, scale: Scale, data: Path) -> Path:
    """The variant after stage 1, before any adapter."""
    return run_of_stage(variant, scale, "stage1", data) / "final"


def run_of_stage(variant: Variant, scale: Scale, stage: str, data: Path) -> Path:
    """The folder of a finished run.

    Args:
        variant: the model.
        scale: gives recipes and budget.
        stage: one of `Scale.stages`, or of `variants.GUIDED` for the shipped model.
        data: folder that the recipes' data paths are relative to.
    """
    if not _has_own_recipes(variant, scale):
        return _stage(variant, scale, stage, scale.ablation[0], data).parent
    # Each recipe of the shipped model starts from the end of the previous one.
    stages = (*scale.stages, *GUIDED)
    for name in stages[: stages.index(stage) + 1]:
        folder = run_recipe(ROOT / "recipes" / scale.name / f"{name}.yaml", [f"data_root={data}"])
    return folder


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
    """The trained checkpoint of a baseline: trained on text, then on questions.

    Args:
        method: a trained baseline.
        scale: gives the recipes.
        backbone: a backbone of the scale.
        questions: set that it is trained for; at smoke and nano one mixture serves all sets.
        data: folder that the recipes' data paths are relative to.
        setting: which recipe for questions; the text recipe of that name if there is one.
        gold: train only on documents with evidence.
    """
    from sedem.training.baseline import load_baseline_recipe, train_baseline

    if scale.name == "smoke":
        tiny_backbone()
    start: list[str] = []
    final = Path()
    for stage in ("text", "questions"):
        path = scale.baseline_recipe(method, stage, backbone, setting)
        if not path.is_file():
            continue
        overrides = [*scale.baselines[stage], *start]
        output = scale.runs / path.stem
        if scale.name == "paper":
            output = scale.runs / backbone / path.stem
        if stage == "questions":
            if gold:
                overrides.append("data.documents=gold")
                output = output.with_name(f"{output.name}-gold")
            if scale.name == "paper":
                output = output.with_name(f"{output.name}-{questions}")
                overrides += supervision(path, scale.recipe("stage2", backbone, questions))
        final = output / "final"
        if not (output / "training.json").is_file():
            overrides += [f"data_root={data}", f"run.output={output}"]
            train_baseline(load_baseline_recipe(method, path, overrides))
        start = [f"start_from={final}"]
    return final


def budget(folder: Path) -> dict[str, Any]:
    """The cost of training a checkpoint, as reported with a result.

    `before` is the same for the run that it started from. `all_tokens_seen` counts the tokens of
    all runs; it is None if one run did not count them.

    Args:
        folder: the checkpoint, in the folder of its run.
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


def _shipped(variant: Variant, scale: Scale) -> Path | None:
    """The checkpoint of a guided model that the scale ships, if there is one."""
    guided = variant.main and bool(variant.further)
    return scale.shipped.get(variant.backbone or scale.backbones[0]) if guided else None


def _has_own_recipes(variant: Variant, scale: Scale) -> bool:
    """Whether it is a main model that recipes other than the studies' train, as it is shipped."""
    return variant.main and bool(scale.shipped)


def _stage(variant: Variant, scale: Scale, stage: str, questions: str, data: Path) -> Path:
    """The checkpoint of a stage of the study recipes."""
    if scale.name == "smoke":
        tiny_backbone()
    in_stage2 = replace(BASE, name=variant.name, stage2=variant.stage2)
    if stage == "stage1" and variant == replace(in_stage2, every_block=variant.every_block):
        # A variant that differs only in stage 2 starts from the same memory.
        variant = BASE
    shared = f"-{questions}" if scale.name == "paper" and stage == "stage2" else ""
    output = scale.runs / variant.name / f"{stage}{shared}"
    if (output / "training.json").is_file():
        return output / "final"
    recipe, overrides = recipe_of(variant, scale, stage, questions)
    overrides += [f"data_root={data}", f"run.output={output}"]
    if stage == "stage2":
        start = _stage(variant, scale, "stage1", questions, data)
        overrides.append(f"start_from={start}")
    return run_recipe(recipe, overrides) / "final"


def recipe_of(variant: Variant, scale: Scale, stage: str, questions: str) -> tuple[Path, list[str]]:
    """The study recipe of a stage, and the overrides that turn it into one of a variant.

    Args:
        variant: the model.
        scale: gives recipes and budget.
        stage: "stage1" or "stage2".
        questions: set that stage 2 is trained for.
    """
    backbone = variant.backbone or scale.backbones[0]
    own = {
        "stage1": (*scale.stage1, *variant.stage1),
        "stage2": (*scale.stage2, *variant.stage2),
    }
    recipe = scale.recipe(stage, backbone, questions, variant.every_block)
    return recipe, [*scale.overrides, *variant.changes, *own[stage]]


def _further(variant: Variant, scale: Scale, data: Path) -> Path:
    """The checkpoint of a variant that is the main model, trained further."""
    folder = scale.runs / variant.name
    main = main_model(scale, variant.backbone)
    recipes = scale.recipe("stage2", main.backbone or "", scale.ablation[0]).parent
    start = checkpoint(main, scale, scale.ablation[0], data, "guided")
    if variant.start:
        start = with_settings(start, dict(variant.start), folder / "start")
    if variant.new_selector:
        start = with_new_selector(start, folder / "new-selector")
    for recipe in variant.further:
        stage = recipe.split("-")[0]
        own = {
            "stage1": (*scale.stage1, *variant.stage1),
            "stage2": (*scale.stage2, *variant.stage2),
        }
        overrides = [*scale.overrides, *variant.changes, *own[stage], f"data_root={data}"]
        overrides += [f"start_from={start}", f"run.output={folder / recipe}"]
        start = run_recipe(recipes / f"{recipe}.yaml", overrides) / "final"
    return start


def run_recipe(recipe_file: Path, overrides: list[str]) -> Path:
    """The folder of a SeDeM recipe's run, trained if it is not finished.

    Args:
        recipe_file: the recipe; its name begins with the stage.
        overrides: overrides of its values, as `--set` takes them.
    """
    from sedem.training.recipe import load_recipe
    from sedem.training.stages import STAGES

    kind, train = STAGES[recipe_file.stem.split("-")[0]]
    recipe = load_recipe(kind, recipe_file, overrides)
    folder = Path(recipe.run.output)
    if not (folder / "training.json").is_file():
        train(recipe)
    return folder

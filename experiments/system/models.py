"""The models of the studies: variants of SeDeM, baselines, and their training on one equal budget.

A finished run is reused, a missing one is trained. A run is finished when its folder contains
training.json; its model is in `final`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from safetensors.torch import load_file, save_file

from experiments.system.scales import ROOT, Scale, recipe_exists
from experiments.system.stand_in import fitted
from sedem.checkpoint.folder import ADAPTER, EXTRA_ENTRIES, WEIGHTS_FILE, unfinished
from sedem.config import SedemConfig
from sedem.guidance import Guidance
from sedem_lab.training.recipe import read_entries, what_trains
from sedem_lab.training.run_setup import processes
from sedem_lab.training.stages import AnyRecipe, load_run

PAPER_FORM = "joint"
FORMS = {
    PAPER_FORM: {"block_context": "joint", "guidance": False},
    "guided": {"block_context": "independent", "guidance": True},
}
"""Settings of a checkpoint that can be changed without training, by form of attention."""
TAU = "guidance.log_tau"
WITHOUT_SELECTOR = "-all"
"""Ends the name of a variant that restores every block."""
GUIDED = "stage2-guided"
"""The recipe that trains the main model further, with guided attention."""
SHORT = ("optimization.steps=200", "run.save_every=100", "run.keep=1")
"""Overrides that set the stage-2 steps of a model that is trained further for a comparison."""
NEXT_TOKEN_ALONE = (
    "losses.distill=0",
    "losses.reconstruct=0",
    "losses.regress=0",
    "losses.regress_first=0",
)
"""Stage 1 of a model without restored states (section Is Decompression Necessary?)."""


@dataclass(frozen=True)
class Variant:
    """A model to train for a comparison.

    Attributes:
        name: name of its folder and its cells.
        changes: overrides of both recipes, as `--set` takes them; `stage1` and `stage2` have those
            of one stage.
        main: whether it is the main configuration, or that trained further with guided attention; a
            scale may ship the latter.
        backbone: a backbone of the scale; None means its first.
        k: number of blocks without selection; None means the scale's.
        every_block: stage 2 restores every block and trains no selector; see `without_selector`.
        further: a recipe that trains it from the main model; empty means the recipes of the study,
            from the beginning.
        form: the form of the main model before that, a key of `FORMS`.
    """

    name: str
    changes: tuple[str, ...] = ()
    stage1: tuple[str, ...] = ()
    stage2: tuple[str, ...] = ()
    main: bool = False
    backbone: str | None = None
    k: int | None = None
    every_block: bool = False
    further: str = ""
    form: str = "guided"


@dataclass(frozen=True)
class Planned:
    """A run that a cell needs.

    Attributes:
        trained: what is trained: "stage1", "stage2" or a baseline.
        path: the recipe's file.
    """

    trained: str
    path: Path
    recipe: AnyRecipe


PLANNED: ContextVar[dict[Path, Planned] | None] = ContextVar("planned", default=None)
"""Where runs are noted by their folder, instead of trained; None trains."""

BASE = Variant("base")
"""The model that the variants differ from; it is trained like them."""


def main_model(scale: Scale, backbone: str | None = None) -> Variant:
    """SeDeM as in the paper, on a backbone of the scale; None means the first."""
    backbone = backbone or scale.backbones[0]
    return Variant(f"sedem-{backbone}", main=True, backbone=backbone)


def guided_model(scale: Scale, backbone: str | None = None) -> Variant:
    """The main model, trained further with guided attention; arguments as in `main_model`."""
    main = main_model(scale, backbone)
    return replace(main, name=f"{main.name}-guided", further=GUIDED)


def further_trained(scale: Scale, name: str, recipe: str, **fields: Any) -> Variant:
    """A variant that a short stage 2 trains from the main model; `fields` are others of it."""
    short = SHORT if scale.name == "nano" else ()
    return Variant(name, stage2=short, further=recipe, **fields)


def without_selector(scale: Scale, variant: Variant) -> Variant:
    """A variant trained like the paper's ablations: all blocks are restored, and none is ranked.

    If the evidence is put among few blocks instead (`Scale.disabled`), it is the variant itself.
    """
    if scale.disabled[0] != "all":
        return variant
    return replace(variant, name=f"{variant.name}{WITHOUT_SELECTOR}", every_block=True)


def full_bank(scale: Scale, questions: str, backbone: str | None = None) -> Variant:
    """The model of the paper's full bank: trained without selector on HotpotQA, main on 2Wiki."""
    main = main_model(scale, backbone)
    if scale.disabled[0] != "all" or questions != "hotpotqa":
        return main
    own = main.backbone == scale.backbones[0]
    base = BASE if own else replace(BASE, name=f"base-{backbone}", backbone=backbone)
    return without_selector(scale, base)


def equal_budget(scale: Scale) -> Variant:
    """SeDeM trained on the same windows and questions, and as many, as a trained baseline."""

    def entries(stage: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """A stage of ICAE, and overrides that give another recipe its steps."""
        recipe = entries_of(scale.baseline_recipe("icae", stage, scale.backbones[0]))
        own = {"accumulation": 1, "warmup_ratio": 0, **recipe["optimization"]}
        names = ("steps", "batch_size", "accumulation", "warmup", "warmup_ratio")
        return recipe, tuple(f"optimization.{name}={own[name]}" for name in names)

    questions, steps = entries("questions")
    learned = f"data.training={flow(questions['data']['training'])}"
    stage2 = (*steps, learned, "losses.conditioning=gold-then-selected")
    return Variant("equal-budget", stage1=entries("text")[1], stage2=stage2)


@cache
def entries_of(recipe: Path, overrides: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The entries of a recipe; many variants need the same, and YAML is slow to read."""
    return read_entries(recipe, overrides)


def flow(value: Any) -> str:
    """A value as one line of YAML, for an override."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def recipe_of(variant: Variant, scale: Scale, stage: str, questions: str) -> tuple[Path, list[str]]:
    """The study recipe of a stage, and the overrides that turn it into one of a variant."""
    backbone = variant.backbone or scale.backbones[0]
    recipe = scale.recipe(stage, backbone, questions, variant.every_block)
    own = (*scale.stage1, *variant.stage1) if stage == "stage1" else variant.stage2
    return recipe, [*variant.changes, *own]


def checkpoint(
    variant: Variant, scale: Scale, questions: str, data: Path, form: str = PAPER_FORM
) -> Path:
    """The trained checkpoint of a variant.

    Args:
        questions: set that stage 2 is trained for; at nano one mixture serves all sets.
        data: folder that the recipes' data paths are relative to.
        form: a key of `FORMS`. A model that was trained further has the form of its recipes.
    """
    if variant.further:
        if variant.main and (shipped := scale.shipped.get(variant.backbone or scale.backbones[0])):
            return shipped
        main, own = main_model(scale, variant.backbone), scale.ablation[0]
        recipe, overrides = recipe_of(variant, scale, "stage2", own)
        overrides.append(f"start_from={checkpoint(main, scale, own, data, variant.form)}")
        overrides += [
            f"data_root={data}",
            f"run.output={scale.runs / variant.name / variant.further}",
        ]
        path = recipe.with_name(f"{variant.further}.yaml")
        return run_recipe(path, overrides, scale) / "final"
    if variant.main and scale.shipped:
        folder = run_of_stage(variant, scale, scale.stages[-1], data) / "final"
    else:
        folder = _stage(variant, scale, "stage2", questions, data)
    if form == PAPER_FORM:
        return folder  # the recipes keep the paper's form
    return with_settings(folder, FORMS[form], scale.runs / "forms" / form / variant.name)


def _stage(variant: Variant, scale: Scale, stage: str, questions: str, data: Path) -> Path:
    """The checkpoint of a stage of the study recipes."""
    # It is that of the first of all variants with the same training, so that it is trained once.
    if stage == "stage1":
        name = variant.name.removesuffix(WITHOUT_SELECTOR)
        variant = replace(variant, name=name, stage2=(), every_block=False)
    if not (variant.changes or variant.stage1 or variant.stage2 or variant.every_block):
        variant = BASE if scale.shipped else main_model(scale, variant.backbone)
    shared = f"-{questions}" if scale.name == "paper" and stage == "stage2" else ""
    output = scale.runs / variant.name / f"{stage}{shared}"
    if not (output / "training.json").is_file():
        recipe, overrides = recipe_of(variant, scale, stage, questions)
        overrides += [f"data_root={data}", f"run.output={output}"]
        if stage == "stage2":
            start = _stage(variant, scale, "stage1", questions, data)
            overrides.append(f"start_from={start}")
        run_recipe(recipe, overrides, scale)
    return output / "final"


def run_of_stage(variant: Variant, scale: Scale, stage: str, data: Path) -> Path:
    """The folder of a finished run; `stage` is one of `Scale.stages`, or of `GUIDED`."""
    if not (variant.main and scale.shipped):
        return _stage(variant, scale, stage, scale.ablation[0], data).parent
    # A model is shipped as recipes of its own train it. Each starts from the end of the previous.
    stages = (*scale.stages, GUIDED)
    for name in stages[: stages.index(stage) + 1]:
        path = ROOT / "recipes" / scale.name / f"{name}.yaml"
        folder = run_recipe(path, [f"data_root={data}"], scale)
    return folder


def run_recipe(path: Path, overrides: list[str], scale: Scale) -> Path:
    """The folder of a recipe's run, trained if it is not finished.

    Overrides are as `--set` takes them.
    """
    overrides = [*overrides, *fitted(read_entries(path, overrides), scale), *scale.changes]
    recipe, train = load_run(path, overrides)
    # The same steps in batches that the processes of a launcher share; `start_run` refuses others.
    own = recipe.optimization
    together = math.lcm(own.accumulation, processes().num_processes)
    rest, left = divmod(own.batch_size * own.accumulation, together)
    if not left:
        own = own.with_changes(batch_size=rest, accumulation=together)
    recipe = recipe.with_changes(optimization=own)
    folder, planned = Path(recipe.run.output), PLANNED.get()
    if planned is not None:
        planned[folder] = Planned(what_trains(path), path, recipe)
        return folder
    # No other process trains in this folder, unless a launcher started it for that.
    taken: AbstractContextManager[Any] = nullcontext()
    if processes().num_processes == 1:
        folder.parent.mkdir(parents=True, exist_ok=True)
        taken = FileLock(folder.with_name(f".{folder.name}-trained.lock"))
    with taken:
        if not (folder / "training.json").is_file():
            train(recipe)
    return folder


def with_settings(checkpoint: Path, settings: Mapping[str, Any], folder: Path) -> Path:
    """Write a checkpoint with other settings and the same weights.

    None of the settings changes a shape. Guidance uses the checkpoint's tau, or the initial one.
    """
    if PLANNED.get() is not None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}-made.lock")):  # other processes wait
        made, source = folder / WEIGHTS_FILE, checkpoint / WEIGHTS_FILE
        if made.is_file() and made.stat().st_mtime >= source.stat().st_mtime:
            return folder
        config = SedemConfig.load(checkpoint, extra=EXTRA_ENTRIES)
        if (checkpoint / config.encoder).is_dir():
            config = config.with_changes(encoder=str((checkpoint / config.encoder).resolve()))
        config = config.with_changes(**settings)
        weights = load_file(source)
        if config.guidance:
            weights.setdefault(TAU, Guidance().log_tau.detach())
        else:
            weights.pop(TAU, None)
        with unfinished(folder) as place:
            config.save(place)
            save_file(weights, place / WEIGHTS_FILE)
            if (checkpoint / ADAPTER).is_dir():
                shutil.copytree(checkpoint / ADAPTER, place / ADAPTER)
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
        questions: set that it is trained for; at nano one mixture serves all sets.
        data: folder that the recipes' data paths are relative to.
        setting: which recipe for questions; the text recipe of that name if there is one. A recipe
            for questions that ends in the set's name is for this set only.
        gold: train only on documents with evidence.
    """
    start: list[str] = []
    final = Path()
    for stage in ("text", "questions"):
        path = scale.baseline_recipe(method, stage, backbone, setting)
        if not recipe_exists(path):
            continue
        overrides = [*start]
        output = scale.runs / (backbone if scale.name == "paper" else "") / path.stem
        if stage == "questions":
            own = path.with_stem(f"{path.stem}-{questions}")
            path = own if recipe_exists(own) else path
            if gold:
                overrides.append("data.documents=gold")
                output = output.with_name(f"{output.name}-gold")
            if scale.name == "paper":
                output = output.with_name(f"{output.name}-{questions}")
                overrides += supervision(path, scale.recipe("stage2", backbone, questions))
        final = output / "final"
        run_recipe(path, [*overrides, f"data_root={data}", f"run.output={output}"], scale)
        start = [f"start_from={final}"]
    return final


def supervision(baseline: Path, sedem: Path) -> list[str]:
    """Overrides that give a baseline's recipe the questions of SeDeM's stage 2 for a set.

    It learns from the same records and is evaluated on the same ones, as many examples apart. If
    the paper limits the answers of the method itself, that limit is kept.
    """
    own, theirs = read_entries(baseline), read_entries(sedem)
    result = [f"data.{part}={flow(theirs['data'][part])}" for part in ("training", "evaluation")]
    step, own_step = (
        one["batch_size"] * one.get("accumulation", 1)
        for one in (theirs["optimization"], own["optimization"])
    )
    apart = theirs["run"]["eval_every"] * step
    result.append(f"run.eval_every={max(1, apart // own_step)}")
    if own["method"] != "500x":
        result.append(f"data.answer_limit={theirs['data']['answer_limit']}")
    if "max_paragraphs" in own["data"]:
        result.append(f"data.max_paragraphs={theirs['data']['max_blocks']}")
    if "k" in own["model"]:
        result.append(f"model.k={theirs['model']['k']}")
    return result

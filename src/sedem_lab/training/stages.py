"""The recipes of SeDeM's two stages, and training from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from torch.utils.data import Dataset

from sedem.backbone.decoder import check_compiler
from sedem.checkpoint.folder import open_backbones, portable
from sedem.config import FITTED, Condition, Flag, NumberAbove0, SedemConfig, Share, WholeAbove0
from sedem.errors import ConfigError
from sedem.guidance import Guidance
from sedem.method.selector import SelectorStart, resolve_budget
from sedem.model import SeDeM
from sedem_lab.training.baseline import BaselineRecipe, load_baseline_recipe, train_baseline
from sedem_lab.training.block_batch import BlockCollator
from sedem_lab.training.block_dataset import BlockDataset
from sedem_lab.training.fit import fit
from sedem_lab.training.recipe import (
    DataSource,
    Mixture,
    Optimization,
    Recipe,
    RunSettings,
    TextSource,
    load_recipe,
    what_trains,
)
from sedem_lab.training.run_setup import backbone_options, check_start, processes, shard, start_run
from sedem_lab.training.sources import open_windows, read_mixture
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses

CALIBRATION_WINDOWS = 64
CALIBRATED = ("confidence", "second_hop", "read_once", "second_reading")
"""Parts of a model that `sedem calibrate` fits to trained weights, and no training."""


class Stage1Recipe(Recipe):
    """All settings of a stage-1 run."""

    model: SedemConfig
    text: TextSource
    optimization: Optimization
    run: RunSettings
    losses: Stage1Losses = Stage1Losses()
    data_root: str = "data"
    cache: str = "runs/cache"
    start_from: str | None = None

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        if self.losses.recall and self.text.continuation > self.model.segment_length:
            raise ValueError(
                f"text.continuation is {self.text.continuation}, more than segment_length "
                f"{self.model.segment_length}; shorten it, or set losses.recall to 0"
            )
        return self


class Stage2Data(Mixture):
    """Questions that stage 2 learns from.

    Attributes:
        max_blocks: maximum blocks of one example in a training step, or "all".
        budgets: K of a batch is drawn from these; "all" restores every block.
        conditions: weights with which a batch reads its blocks as "memory", as "text" or as "both".
        sentences: share of the batches that read text which have the sentences of a second reading,
            as most answers have, instead of whole blocks.
        answer_limit: examples with more answer tokens are left out and counted.
        cache_states: cache frozen states on disk; much faster on a CPU, too large for big sets.
        calibration: questions that no step sees, for `sedem calibrate`.
        hops: questions with evidence in several documents, from which `sedem calibrate` trains the
            second hop.
    """

    max_blocks: WholeAbove0 | Literal["all"] = 16
    budgets: Annotated[tuple[WholeAbove0 | Literal["all"], ...], Field(min_length=1)] = (2,)
    conditions: Annotated[dict[Condition, NumberAbove0], Field(min_length=1)] = Field(
        default={"memory": 1.0}
    )
    sentences: Share = 0.0
    answer_limit: WholeAbove0 = 64
    cache_states: Flag = False
    calibration: tuple[DataSource, ...] = ()
    hops: tuple[DataSource, ...] = ()


class Stage2Recipe(Recipe):
    """All settings of a stage-2 run.

    Attributes:
        new_selector: start from a random selector instead of the checkpoint's, with W_Q and W_K
            "independent", as in the paper, or "shared"; null keeps the checkpoint's.
        best: write the weights with the lowest loss of all evaluations (`run.eval_every`), instead
            of the last ones.
    """

    model: SedemConfig
    data: Stage2Data
    optimization: Optimization
    run: RunSettings
    start_from: str | None = None
    new_selector: SelectorStart | None = None
    losses: Stage2Losses = Stage2Losses()
    data_root: str = "data"
    cache: str = "runs/cache"
    best: Flag = False

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        differing = {
            "data.cache_states": self.data.cache_states,
            "data.conditions other than memory": set(self.data.conditions) != {"memory"},
        }
        if self.optimization.shard_backbone and any(differing.values()):
            names = ", ".join(name for name, differs in differing.items() if differs)
            raise ValueError(
                "optimization.shard_backbone is true, so all processes must run the same layers, "
                f"but with {names} each runs those of its own batch; leave one of the two out"
            )
        if self.data.sentences and "text" not in self.data.conditions:
            raise ValueError(
                f"data.sentences is {self.data.sentences}, but data.conditions has no text, so no "
                "batch would read them; add text, or set data.sentences to 0"
            )
        if self.best and not self.run.eval_every:
            raise ValueError(
                "best is true, but run.eval_every is 0, so only the last weights are evaluated; "
                "set run.eval_every, or best to false"
            )
        return self


def train_stage1(recipe: Stage1Recipe) -> Path:
    """Run a stage-1 recipe to its end, from its last complete checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder contains a run with other settings.
    """
    start_run(recipe)
    model = open_model(recipe.model, recipe.optimization, recipe.start_from)
    shard(model, recipe.optimization)
    length = recipe.model.segment_length
    windows, held_out = open_windows(recipe.text, recipe, model.encoder, length)
    optimization = recipe.optimization
    stage = Stage1(model, recipe.losses, optimization.seed, optimization.logits_at_once)
    if recipe.start_from is None:
        calibrate(stage, windows)
    return fit(stage, model, recipe, windows, held_out)


def calibrate(stage: Stage1, windows: Dataset[Any]) -> None:
    """Initialize new parts to the mean and scale of the decoder's states on the first windows."""
    count = min(CALIBRATION_WINDOWS, len(windows))  # type: ignore[arg-type]
    sample = stage.collate([windows[index] for index in range(count)])
    stage.calibrate({name: ids.to(stage.model.device) for name, ids in sample.items()})


def train_stage2(recipe: Stage2Recipe) -> Path:
    """Run a stage-2 recipe to its end, from its last complete checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder contains a run with other settings.
    """
    start_run(recipe)
    model = open_model(recipe.model, recipe.optimization, recipe.start_from)
    if recipe.model.lora_rank and not model.decoder.has_lora:
        model.decoder.add_lora(recipe.model.lora_rank, recipe.model.lora_alpha)
    if recipe.new_selector:
        model.selector.restart(recipe.new_selector, recipe.optimization.seed)
    shard(model, recipe.optimization)
    dataset = BlockDataset(model, recipe.data.answer_limit, cache=Path(recipe.cache))
    training, evaluation = read_mixture(
        dataset, recipe.data, Path(recipe.data_root), selects=recipe.losses.select > 0
    )
    collator = BlockCollator(
        dataset,
        max_blocks=resolve_budget(recipe.data.max_blocks, dataset.most_blocks),
        budgets=[resolve_budget(k, dataset.most_blocks) for k in recipe.data.budgets],
        conditions=recipe.data.conditions,
        texts=recipe.losses.distill > 0,
        sentences=recipe.data.sentences,
        seed=recipe.optimization.seed,
        cache=Path(recipe.cache) if recipe.data.cache_states else None,
    )
    stage = Stage2(model, recipe.losses, collator, recipe.optimization.logits_at_once)
    left_out = {"left_out": dict(dataset.dropped)}
    return fit(stage, model, recipe, training, evaluation, data_summary=left_out, best=recipe.best)


def open_model(config: SedemConfig, optimization: Optimization, start_from: str | None) -> SeDeM:
    """Open a model to train: new parts on the recipe's backbones, or a checkpoint.

    Raises:
        ConfigError: the checkpoint has another shape or other backbones than the recipe, or the
            recipe asks for what is fitted afterwards, or for compiled layers on a machine without a
            compiler.
    """
    for part in CALIBRATED:
        if getattr(config, part):
            raise ConfigError(
                f"model.{part} is true in the recipe, but training does not fit it; leave it out "
                "and run 'sedem calibrate' on the trained checkpoint"
            )
    if optimization.compile:
        check_compiler(processes().device, "optimization.compile")
    options = backbone_options(optimization)
    if start_from is None:
        model = SeDeM(config, *open_backbones(config, **options))
        model.parts().to(options["device"])
    else:
        model = _continued(config, start_from, options)
    if optimization.compile:
        for backbone in (model.encoder, model.decoder):
            backbone.compile_layers()
    return model


def _continued(config: SedemConfig, start_from: str, options: dict[str, Any]) -> SeDeM:
    """Open a checkpoint with the settings of a recipe."""
    model = SeDeM.from_pretrained(start_from, engine="eager", **options)
    free = {"encoder", "decoder", "k", "auto_mass", "auto_min", "auto_max"}
    # Parts that a stage-1 checkpoint has not trained yet; blocks may be separated, or cut
    # elsewhere, from here on.
    free |= {"block_context", "guidance", "condition", "chat_template", "segmentation"}
    # What was fitted to the scores of one selector does not fit those of another.
    free |= {*FITTED}
    model.forget_fitted()
    if not model.decoder.has_lora:
        free |= {"lora_rank", "lora_alpha"}
    check_start(config, model.config, free, start_from)
    given, found = portable(config), portable(model.config)
    if (given.encoder, given.decoder) != (found.encoder, found.decoder):
        # The path may differ, but the weights must be those that the parts were trained on.
        opened = [backbone.digest for backbone in open_backbones(config, dtype=options["dtype"])]
        if opened != [model.encoder.digest, model.decoder.digest]:
            names = config.encoder, config.decoder
            raise ConfigError(
                f"model.encoder and model.decoder are {names} in the recipe, checkpoint "
                f"'{start_from}' was trained on other weights"
            )
    if not config.guidance:
        model.guidance = None
    elif model.guidance is None:
        model.guidance = Guidance().to(options["device"])
    model.config = config
    return model


AnyRecipe = Stage1Recipe | Stage2Recipe | BaselineRecipe


def load_run(path: Path, overrides: Sequence[str] = ()) -> tuple[AnyRecipe, Callable[[Any], Path]]:
    """Read a recipe of a stage or of a baseline, and return the function that trains from it.

    Args:
        overrides: as in `load_recipe`.

    Raises:
        ConfigError: the recipe is invalid.
    """
    trained = what_trains(path, overrides)
    if trained == "stage1":
        return load_recipe(Stage1Recipe, path, overrides), train_stage1
    if trained == "stage2":
        return load_recipe(Stage2Recipe, path, overrides), train_stage2
    return load_baseline_recipe(path, overrides), train_baseline

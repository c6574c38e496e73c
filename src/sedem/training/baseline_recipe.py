"""The recipe of a trained baseline, and the reader that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import SerializeAsAny, create_model, model_validator

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.trained import TrainedReader
from sedem.checkpoint.folder import open_named
from sedem.checkpoint.portable import portable_name
from sedem.errors import ConfigError
from sedem.training.recipe import (
    Mixture,
    Optimization,
    RunSettings,
    TextSource,
    check_evaluation,
    load_recipe,
    read_entries,
)
from sedem.training.run_setup import backbone_options, check_start
from sedem.training.selection_losses import ConditionedLosses
from sedem.validation import Flag, Settings, WholeAbove0


class WindowSource(TextSource):
    """Text that a baseline learns from.

    Attributes:
        context: tokens of a window before its continuation.
    """

    context: WholeAbove0 = 512


class QuestionData(Mixture):
    """Questions that a baseline learns from.

    With `run.eval_every` the final checkpoint has the weights with the lowest loss on `evaluation`.

    Attributes:
        answer_limit: examples with more answer tokens are left out and counted.
        documents: "all" takes every document of an example in order, "gold" only those with
            evidence.
        context_limit: maximum tokens of a context; None means as many as the method takes.
        max_paragraphs: maximum paragraphs of one example in a training step; None means all. Those
            with evidence are kept, others are sampled: once for a method that reads them all, in
            every step for a method that picks among them.
        cache_states: cache frozen states on disk, for a method that picks; too large for big sets.
    """

    answer_limit: WholeAbove0 = 64
    documents: Literal["all", "gold"] = "all"
    context_limit: WholeAbove0 | None = None
    max_paragraphs: WholeAbove0 | None = None
    cache_states: Flag = False


class BaselineRecipe(Settings):
    """All settings of a run of a trained baseline.

    Attributes:
        method: name of the baseline.
        model: settings of the baseline.
        optimization: optimizer and schedule.
        run: output folder and intervals.
        text: the text to train on; give either `text` or `data`.
        data: the questions to train on.
        data_root: folder that data paths are relative to.
        cache: folder for tokenized text and frozen states.
        start_from: checkpoint to continue from; None means new parts.
        losses: selection losses of a method that picks paragraphs; None means the defaults.
    """

    method: str
    model: SerializeAsAny[ReaderConfig]
    optimization: Optimization
    run: RunSettings
    text: WindowSource | None = None
    data: QuestionData | None = None
    data_root: str = "data"
    cache: str = "runs/cache"
    start_from: str | None = None
    losses: ConditionedLosses | None = None

    @model_validator(mode="after")
    def _learns_from_one(self) -> Self:
        if (self.text is None) == (self.data is None):
            given = "both" if self.text else "neither"
            raise ValueError(
                f"the recipe has {given} of text and data; a run learns from exactly one"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_on_something(self) -> Self:
        if self.text is not None:
            check_evaluation(self.run, self.text.held_out > 0, "text.held_out")
        elif self.data is not None:
            check_evaluation(self.run, bool(self.data.evaluation), "data.evaluation")
        return self

    @model_validator(mode="after")
    def _has_no_switch_of_sedem(self) -> Self:
        for name in ("logits_at_once", "compile", "shard_backbone"):
            if value := getattr(self.optimization, name):
                raise ValueError(
                    f"optimization.{name} is {value}, which only stage1 and stage2 of SeDeM can "
                    "do; leave it out"
                )
        return self


def load_baseline_recipe(method: str, path: Path, overrides: Sequence[str] = ()) -> BaselineRecipe:
    """Read the recipe of a trained baseline and check `model` against the method's settings.

    Args:
        method: name of the baseline.
        path: the YAML file.
        overrides: as in `load_recipe`.

    Raises:
        ConfigError: there is no such method, or the recipe is invalid or for another method.
    """
    settings = reader_class(method).Config
    named = read_entries(path, overrides).get("method", method)
    if named != method:
        raise ConfigError(
            f"'{path}' is a recipe of '{named}'; run 'sedem train {named}', or give a recipe of "
            f"'{method}'"
        )
    kind = create_model("Recipe", __base__=BaselineRecipe, model=(settings, ...))
    return load_recipe(kind, path, overrides)


def open_reader(recipe: BaselineRecipe) -> TrainedReader:
    """Open a baseline to train: new parts on the recipe's backbone, or a checkpoint.

    Raises:
        ConfigError: the checkpoint has other settings than the recipe, or another backbone.
    """
    kind = reader_class(recipe.method)
    config, options = recipe.model, backbone_options(recipe.optimization)
    if recipe.start_from is None:
        return kind(config, open_named(config.backbone, config.backbone_revision, None, **options))
    reader = kind.from_pretrained(recipe.start_from, **options)
    check_start(config, reader.config, {"backbone", *config.free}, recipe.start_from)
    if portable_name(config.backbone) != portable_name(reader.config.backbone):
        # The path may differ, but the weights must be those that the parts were trained on.
        backbone = open_named(
            config.backbone, config.backbone_revision, None, dtype=options["dtype"]
        )
        if backbone.digest != reader.backbone.digest:
            raise ConfigError(
                f"model.backbone is '{config.backbone}' in the recipe, checkpoint "
                f"'{recipe.start_from}' was trained on other weights"
            )
    reader.config = config
    return reader

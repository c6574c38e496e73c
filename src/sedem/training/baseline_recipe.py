"""The recipe of a trained baseline, and the reader that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import SerializeAsAny, create_model, model_validator

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.inference.checkpoint import open_named
from sedem.training.fit import check_start, placement
from sedem.training.recipe import (
    Mixture,
    Optimization,
    RunSettings,
    TextSource,
    load_recipe,
    read_entries,
)
from sedem.training.selecting import ConditionedLosses
from sedem.validation import Flag, Settings, WholeAbove0


class WindowSource(TextSource):
    """Text for a baseline.

    Attributes:
        context: tokens of a window before its continuation.
    """

    context: WholeAbove0 = 512


class QuestionData(Mixture):
    """Questions that a baseline learns from.

    With `run.eval_every` the final checkpoint is the one with the lowest loss of `evaluation`.

    Attributes:
        answer_limit: examples with longer answers are left out, counted.
        documents: "all" gives every document of an example in its order, "gold" those with
            evidence alone.
        context_limit: tokens of a context that are used at most; None means all that the method
            takes.
        max_paragraphs: of one example in a training step; evidence stays, others are sampled:
            once where all are read, in every step where a method picks among them. None means all.
        cache_states: a method that picks keeps frozen states on disk; too big for large sets.
    """

    answer_limit: WholeAbove0 = 64
    documents: Literal["all", "gold"] = "all"
    context_limit: WholeAbove0 | None = None
    max_paragraphs: WholeAbove0 | None = None
    cache_states: Flag = False


class BaselineRecipe(Settings):
    """Everything about a run of a trained baseline.

    Attributes:
        method: its name.
        model: its settings.
        optimization: how it learns.
        run: where it is kept.
        text: what it reads; either this or questions.
        data: questions that it learns from.
        data_root: folder that data paths are relative to.
        cache: folder for tokenized text.
        start_from: checkpoint to go on from; None means fresh parts.
        losses: of a method that picks paragraphs; None means their defaults.
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


def load_baseline_recipe(method: str, path: Path, overrides: Sequence[str] = ()) -> BaselineRecipe:
    """Read the recipe of a trained baseline; `model` is checked against the method's own settings.

    Args:
        method: its name.
        path: the YAML file.
        overrides: as in `load_recipe`.

    Raises:
        ConfigError: there is no such method, or the recipe is another's or not one.
    """
    settings = reader_class(method).Config
    own = read_entries(path, overrides).get("method", method)
    if own != method:
        raise ConfigError(
            f"'{path}' is a recipe of '{own}'; run 'sedem train {own}', or give a recipe of "
            f"'{method}'"
        )
    kind = create_model("Recipe", __base__=BaselineRecipe, model=(settings, ...))
    return load_recipe(kind, path, overrides)


def open_reader(recipe: BaselineRecipe) -> TrainedReader:
    """A baseline to train: fresh on the recipe's backbone, or a checkpoint's.

    Raises:
        ConfigError: the checkpoint has other settings than the recipe, or another backbone.
    """
    kind = reader_class(recipe.method)
    config, place = recipe.model, placement(recipe.optimization)
    if recipe.start_from is None:
        return kind(config, open_named(config.backbone, config.backbone_revision, None, **place))
    reader = kind.from_pretrained(recipe.start_from, **place)
    check_start(config, reader.config, {"backbone", *config.free}, recipe.start_from)
    if config.backbone != reader.config.backbone:
        # It may have moved, but it must be the one that the parts were trained for.
        named = open_named(config.backbone, config.backbone_revision, None, dtype=place["dtype"])
        if named.digest != reader.backbone.digest:
            raise ConfigError(
                f"model.backbone is '{config.backbone}' in the recipe, checkpoint "
                f"'{recipe.start_from}' was trained on other weights"
            )
    reader.config = config
    return reader

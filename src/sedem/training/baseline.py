"""Training a baseline from a recipe, on text or on questions, by the same trainer as SeDeM."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import set_seed

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.trained import TrainedReader
from sedem.data.windows import collate_windows
from sedem.errors import ConfigError
from sedem.inference.checkpoint import open_named
from sedem.training.fit import claim_output, fit
from sedem.training.questions import QuestionItem, Questions, collate_questions
from sedem.training.recipe import (
    DataSource,
    Optimization,
    Run,
    TextSource,
    check_numbers,
    load_recipe,
    read_entries,
)
from sedem.training.run import add_source, open_windows
from sedem.training.selecting import ConditionedLosses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WindowSource(TextSource):
    """Text for a baseline.

    Attributes:
        context: tokens of a window before its continuation.
    """

    context: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "text", positive=("context",))


@dataclass(frozen=True)
class QuestionData:
    """Questions that a baseline learns from.

    Attributes:
        training: the mixture.
        evaluation: examples whose losses are followed; never those of a reported evaluation. With
            `run.eval_every` the final checkpoint is the one with their lowest loss.
        answer_limit: examples with longer answers are left out, counted.
        documents: "all" gives every document of an example in its order, "gold" those with
            evidence alone.
        context_limit: tokens of a context that are used at most; None means all that the method
            takes.
        max_paragraphs: of one example in a training step; evidence stays, others are sampled:
            once where all are read, in every step where a method picks among them. None means all.
        cache_states: a method that picks keeps frozen states on disk; too big for large sets.
    """

    training: tuple[DataSource, ...]
    evaluation: tuple[DataSource, ...] = ()
    answer_limit: int = 64
    documents: Literal["all", "gold"] = "all"
    context_limit: int | None = None
    max_paragraphs: int | None = None
    cache_states: bool = False

    def __post_init__(self) -> None:
        if not self.training:
            raise ConfigError("data.training is empty; give at least one")
        check_numbers(self, "data", positive=("answer_limit", "context_limit", "max_paragraphs"))


@dataclass(frozen=True)
class BaselineRecipe:
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
    model: ReaderConfig
    optimization: Optimization
    run: Run
    text: WindowSource | None = None
    data: QuestionData | None = None
    data_root: str = "data"
    cache: str = "runs/cache"
    start_from: str | None = None
    losses: ConditionedLosses | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.data is None):
            given = "both" if self.text else "neither"
            raise ConfigError(
                f"the recipe has {given} of text and data; a run learns from exactly one"
            )


class Training(nn.Module):
    """A baseline as the trainer sees it; exactly its parameter groups are trained.

    Args:
        reader: what is trained.
    """

    def __init__(self, reader: TrainedReader) -> None:
        super().__init__()
        self.reader = reader
        reader.requires_grad_(False)
        for parameters in reader.parameter_groups().values():
            for parameter in parameters:
                parameter.requires_grad_(True)

    @property
    def progress(self) -> float:
        """Share of the training that is done; the reader's losses may depend on it."""
        return self.reader.progress

    @progress.setter
    def progress(self, value: float) -> None:
        """The trainer keeps it up to date."""
        self.reader.progress = value

    def train(self, mode: bool = True) -> Self:
        """Training mode, as the reader understands it."""
        super().train(mode)
        return self

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate."""
        return self.reader.parameter_groups()


class TextTraining(Training):
    """Training on windows of text."""

    def collate(self, windows: list[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
        """Windows as a batch."""
        return collate_windows(windows)

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Tokens of contexts and continuations that the method is given: its budget.

        They count whether or not its loss reads them all, so that budgets compare across methods.
        """
        return batch["context"].numel() + batch["continuation"].numel()

    def forward(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """The method's losses on text."""
        return self.reader.text_loss(context, continuation)


class QuestionTraining(Training):
    """Training on questions."""

    def collate(self, items: list[QuestionItem]) -> dict[str, Any]:
        """Examples as a batch."""
        return collate_questions(items)

    def tokens(self, batch: Mapping[str, Any]) -> int:
        """Tokens of contexts, prompts and answers that the method is given."""
        return sum(map(len, batch["contexts"])) + int(batch["valid"].sum())

    def forward(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The method's losses on questions."""
        return self.reader.question_loss(contexts, ids, valid, labels)


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
    kind = make_dataclass("Recipe", [("model", settings)], bases=(BaselineRecipe,), frozen=True)
    recipe: BaselineRecipe = load_recipe(kind, path, overrides)
    return recipe


def train_baseline(recipe: BaselineRecipe) -> Path:
    """Run a recipe to its end, from its last whole checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder holds a run with other settings.
    """
    output = claim_output(recipe.run, recipe)
    set_seed(recipe.optimization.seed)
    if reader_class(recipe.method).has_selection_budget:
        # It stands on what is here.
        from sedem.training.rag import train_rag

        return train_rag(recipe, output)
    reader = open_reader(recipe)
    _refuse_picking(recipe)
    if recipe.text is not None:
        windows, held_out = open_windows(
            recipe.text,
            reader.backbone,
            recipe.text.context,
            recipe.optimization.seed,
            data_root=Path(recipe.data_root),
            cache=Path(recipe.cache),
        )
        stage: Training = TextTraining(reader)
        return fit(
            stage,
            reader,
            recipe.optimization,
            recipe.run,
            output,
            windows,
            held_out,
            recipe,
            best=True,
        )
    questions, training = _open_questions(reader, recipe)
    followed = range(len(training), len(questions))
    return fit(
        QuestionTraining(reader),
        reader,
        recipe.optimization,
        recipe.run,
        output,
        training,
        Subset(questions, followed) if followed else None,
        recipe,
        {"left_out": dict(questions.dropped), **questions.cut},
        best=True,
    )


def open_reader(recipe: BaselineRecipe) -> TrainedReader:
    """A baseline to train: fresh on the recipe's backbone, or a checkpoint's.

    Raises:
        ConfigError: the checkpoint has other settings than the recipe, or another backbone.
    """
    kind = reader_class(recipe.method)
    dtype = getattr(torch, recipe.optimization.backbone_dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = recipe.model
    if recipe.start_from is None:
        backbone = open_named(
            config.backbone, config.backbone_revision, None, dtype=dtype, device=device
        )
        return kind(config, backbone)
    reader = kind.from_pretrained(recipe.start_from, dtype=dtype, device=device)
    for name, value in asdict(config).items():
        may_differ = name == "backbone" or name in config.free
        if not may_differ and value != getattr(reader.config, name):
            raise ConfigError(
                f"model.{name} is {value} in the recipe, checkpoint '{recipe.start_from}' has "
                f"{getattr(reader.config, name)}"
            )
    if config.backbone != reader.config.backbone:
        # It may have moved, but it must be the one that the parts were trained for.
        named = open_named(config.backbone, config.backbone_revision, None, dtype=dtype)
        if named.digest != reader.backbone.digest:
            raise ConfigError(
                f"model.backbone is '{config.backbone}' in the recipe, checkpoint "
                f"'{recipe.start_from}' was trained on other weights"
            )
    reader.config = config
    return reader


def _refuse_picking(recipe: BaselineRecipe) -> None:
    """Refuse settings that only a method has that picks paragraphs."""
    if (recipe.data and recipe.data.cache_states) or recipe.losses is not None:
        raise ConfigError(
            f"losses and data.cache_states are for a method that picks paragraphs, "
            f"'{recipe.method}' reads them all; leave them out"
        )


def _open_questions(
    reader: TrainedReader, recipe: BaselineRecipe
) -> tuple[Questions, Subset[QuestionItem]]:
    """All examples, and those to train on, which come first."""
    assert recipe.data is not None
    chosen = recipe.data
    questions = Questions(
        reader,
        chosen.answer_limit,
        chosen.documents,
        chosen.context_limit,
        chosen.max_paragraphs,
        recipe.optimization.seed,
    )
    for source in chosen.training:
        add_source(questions, source, Path(recipe.data_root))
    training = Subset(questions, range(len(questions)))
    for source in chosen.evaluation:
        add_source(questions, source, Path(recipe.data_root))
    if not len(training):
        raise ConfigError(
            f"no question of data.training can be used ({dict(questions.dropped)} were left out)"
        )
    logger.info("contexts: %s", dict(questions.cut))
    return questions, training

"""The two recipes, and running them: open what one names and hand it to the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from torch.utils.data import Dataset, Subset

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.data.hub import HOMES
from sedem.data.question_sets import open_examples
from sedem.data.texts import hub_id
from sedem.data.windows import Tokens, Windows
from sedem.errors import ConfigError
from sedem.inference.checkpoint import open_backbones
from sedem.model import SeDeM
from sedem.training.fit import begin, check_start, fit, placement
from sedem.training.items import Items
from sedem.training.prepare import Collator, Prepared
from sedem.training.recipe import (
    DataSource,
    Mixture,
    Optimization,
    RunSettings,
    TextSource,
)
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.validation import Flag, Settings, WholeAbove0

logger = logging.getLogger(__name__)


class Stage1Recipe(Settings):
    """Everything about a stage-1 run.

    Attributes:
        model: shape of the model.
        text: what it reads.
        optimization: how it learns.
        run: where it is kept.
        losses: weights.
        data_root: folder that data paths are relative to.
        cache: folder for tokenized text.
        start_from: checkpoint to go on from; None means fresh parts.
    """

    model: SedemConfig
    text: TextSource
    optimization: Optimization
    run: RunSettings
    losses: Stage1Losses = Stage1Losses()
    data_root: str = "data"
    cache: str = "runs/cache"
    start_from: str | None = None

    @model_validator(mode="after")
    def _recalled_spans_fit(self) -> Self:
        if self.losses.recall and self.text.continuation > self.model.segment_length:
            raise ValueError(
                f"text.continuation is {self.text.continuation} but a recalled span must fit into "
                f"segment_length {self.model.segment_length}; make it shorter or losses.recall 0"
            )
        return self


def train_stage1(recipe: Stage1Recipe) -> Path:
    """Run a stage-1 recipe to its end, from its last whole checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder holds a run with other settings.
    """
    output = begin(recipe)
    model = open_model(recipe.model, recipe.optimization, recipe.start_from)
    windows, held_out = open_windows(
        recipe.text,
        model.encoder,
        recipe.model.segment_length,
        recipe.optimization.seed,
        data_root=Path(recipe.data_root),
        cache=Path(recipe.cache),
    )
    stage = Stage1(model, recipe.losses, recipe.optimization.seed)
    if recipe.start_from is None:
        sample = [windows[index] for index in range(min(64, len(windows)))]  # type: ignore[arg-type]
        stage.calibrate({n: t.to(model.device) for n, t in stage.collate(sample).items()})
    return fit(stage, model, recipe, output, windows, held_out)


def open_windows(
    source: TextSource, backbone: Backbone, length: int, seed: int, *, data_root: Path, cache: Path
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Windows of text to train on, and those that are held out.

    Args:
        source: the text.
        backbone: whose tokenizer counts.
        length: tokens of a context.
        seed: of their order.
        data_root: folder that the source's path is relative to.
        cache: folder for tokenized text.

    Raises:
        ConfigError: nothing is left to train on.
    """
    corpus = Tokens.of(
        source.path if hub_id(source.path) else data_root / source.path,
        backbone,
        cache,
        source.exclude_titles,
        source.tokens,
    )
    if source.held_out >= len(corpus):
        raise ConfigError(
            f"text.held_out is {source.held_out}, the corpus has {len(corpus)} texts; "
            "some must be left to train on"
        )
    seen = range(len(corpus) - source.held_out)
    windows: Dataset[Any] = Windows(corpus, length, source.continuation, seed, seen)
    if source.windows is not None:
        if source.windows > len(windows):  # type: ignore[arg-type]
            logger.warning(
                "text.windows asks for %d windows, the text that is read has %d; raise text.tokens "
                "or give more text",
                source.windows,
                len(windows),  # type: ignore[arg-type]
            )
        windows = Subset(windows, range(min(source.windows, len(windows))))  # type: ignore[arg-type]
    if not source.held_out:
        return windows, None
    kept = range(len(corpus) - source.held_out, len(corpus))
    all_held = Windows(corpus, length, source.continuation, 0, kept)
    return windows, Subset(all_held, range(min(source.evaluation_windows, len(all_held))))


class Stage2Data(Mixture):
    """Questions that stage 2 learns from.

    Attributes:
        max_blocks: blocks of one example in a training step.
        budgets: K of a batch is drawn from these.
        answer_limit: examples with longer answers are left out, counted.
        cache_states: keep frozen states on disk; needed for speed on a CPU, too big for large sets.
    """

    max_blocks: WholeAbove0 = 16
    budgets: Annotated[tuple[WholeAbove0, ...], Field(min_length=1)] = (2,)
    answer_limit: WholeAbove0 = 64
    cache_states: Flag = False


class Stage2Recipe(Settings):
    """Everything about a stage-2 run.

    Attributes:
        model: shape of the model.
        start_from: the stage-1 checkpoint; None means fresh parts.
        data: what it learns from.
        optimization: how it learns.
        run: where it is kept.
        losses: weights and conditioning.
        data_root: folder that data paths are relative to.
        cache: folder for frozen states.
    """

    model: SedemConfig
    data: Stage2Data
    optimization: Optimization
    run: RunSettings
    start_from: str | None = None
    losses: Stage2Losses = Stage2Losses()
    data_root: str = "data"
    cache: str = "runs/cache"


def train_stage2(recipe: Stage2Recipe) -> Path:
    """Run a stage-2 recipe to its end, from its last whole checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder holds a run with other settings.
    """
    output = begin(recipe)
    model = open_model(recipe.model, recipe.optimization, recipe.start_from)
    if recipe.model.lora_rank and not model.decoder.has_lora:
        model.decoder.add_lora(recipe.model.lora_rank, recipe.model.lora_alpha)
    prepared = Prepared(model, recipe.data.answer_limit)
    training, evaluation = read_mixture(prepared, recipe.data, Path(recipe.data_root))
    collator = Collator(
        prepared,
        max_blocks=recipe.data.max_blocks,
        budgets=recipe.data.budgets,
        seed=recipe.optimization.seed,
        cache=Path(recipe.cache) if recipe.data.cache_states else None,
    )
    stage = Stage2(model, recipe.losses, collator)
    return fit(stage, model, recipe, output, training, evaluation)


def read_mixture(
    items: Items[Any], data: Mixture, data_root: Path
) -> tuple[Subset[Any], Subset[Any] | None]:
    """Read the sources of a mixture into a set of items.

    Args:
        items: the set, which is filled.
        data: the mixture.
        data_root: folder that paths are relative to.

    Returns:
        The items to train on, and the items to evaluate; None without `data.evaluation`.
    """
    for source in data.training:
        add_source(items, source, data_root)
    training = Subset(items, range(len(items)))
    for source in data.evaluation:
        add_source(items, source, data_root)
    followed = range(len(training), len(items))
    return training, Subset(items, followed) if followed else None


def add_source(prepared: Items[Any], source: DataSource, data_root: Path) -> None:
    """Read a source of a mixture and say what it gave."""
    place: str | Path = data_root / source.path
    options = dict(source.options)
    if not Path(place).exists() and source.path in HOMES:
        place = source.path
        options.setdefault("split", "train")
    examples = open_examples(place, source.set, records=source.records, **options)
    before, dropped = len(prepared), prepared.dropped.copy()
    prepared.add(examples, source.label, source.repeat)
    logger.info(
        "%s: %d examples (%d in an epoch); left out: %s",
        examples.name,
        len(examples.examples),
        len(prepared) - before,
        dict(examples.dropped + (prepared.dropped - dropped)) or "none",
    )


def open_model(config: SedemConfig, optimization: Optimization, start_from: str | None) -> SeDeM:
    """A model to train: fresh parts on the recipe's backbones, or a checkpoint's.

    Raises:
        ConfigError: the checkpoint has another shape than the recipe, or stands on other backbones.
    """
    place = placement(optimization)
    if start_from is None:
        model = SeDeM(config, *open_backbones(config, **place))
        model.parts().to(place["device"])
        return model
    model = SeDeM.from_pretrained(start_from, engine="eager", **place)
    free = {"encoder", "decoder", "k", "block_order"}
    if not model.decoder.has_lora:
        free |= {"lora_rank", "lora_alpha"}
    check_start(config, model.config, free, start_from)
    named = config.encoder, config.decoder
    if named != (model.config.encoder, model.config.decoder):
        # A backbone may have moved, but it must be the one that the parts were trained for.
        opened = [backbone.digest for backbone in open_backbones(config, dtype=place["dtype"])]
        if opened != [model.encoder.digest, model.decoder.digest]:
            raise ConfigError(
                f"model.encoder and model.decoder are {named} in the recipe, checkpoint "
                f"'{start_from}' was trained on other weights"
            )
    model.config = config
    return model


STAGES: dict[str, tuple[type[Stage1Recipe | Stage2Recipe], Callable[[Any], Path]]] = {
    "stage1": (Stage1Recipe, train_stage1),
    "stage2": (Stage2Recipe, train_stage2),
}
"""What `sedem train` can run: the kind of recipe, and what runs it."""

"""Baselines: their recipes, and training on text or on questions with SeDeM's trainer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from pydantic import SerializeAsAny, create_model, model_validator
from torch import Tensor, nn

from sedem.checkpoint.folder import open_named, portable_name
from sedem.config import Flag, WholeAbove0
from sedem.errors import ConfigError
from sedem.method.selector import SelectorStart, resolve_budget
from sedem_lab.baselines.rag import RAG
from sedem_lab.baselines.registry import reader_class
from sedem_lab.baselines.settings import ReaderConfig
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.data.windows import collate_windows, window_tokens
from sedem_lab.training.block_batch import (
    BlockBatch,
    BlockCollator,
    frozen_states,
    real_tokens,
    rows_at,
)
from sedem_lab.training.block_dataset import BlockDataset, BlockItem, BlockModel
from sedem_lab.training.fit import Trainable, fit
from sedem_lab.training.question_dataset import QuestionDataset, collate_questions
from sedem_lab.training.recipe import (
    Mixture,
    Optimization,
    Recipe,
    RunSettings,
    TextSource,
    load_recipe,
    what_trains,
)
from sedem_lab.training.run_setup import backbone_options, check_start, start_run
from sedem_lab.training.selection_losses import (
    ConditionedLosses,
    choose_blocks,
    evidence_recall,
)
from sedem_lab.training.sources import open_windows, read_mixture

logger = logging.getLogger(__name__)


class WindowSource(TextSource):
    """Text that a baseline learns from.

    Attributes:
        context: tokens of a window before its continuation.
    """

    context: WholeAbove0 = 512


class QuestionData(Mixture):
    """Questions that a baseline learns from.

    Attributes:
        answer_limit: examples with more answer tokens are left out and counted.
        documents: "all" takes every document of an example in order, "gold" only those with
            evidence.
        context_limit: maximum tokens of a context; None means as many as the method takes.
        max_paragraphs: maximum paragraphs of one example in a training step, or "all". Those with
            evidence are kept, others are sampled: once for a method that reads them all, in every
            step for a method that picks among them.
        cache_states: cache frozen states on disk, for a method that picks; too large for big sets.
    """

    answer_limit: WholeAbove0 = 64
    documents: Literal["all", "gold"] = "all"
    context_limit: WholeAbove0 | None = None
    max_paragraphs: WholeAbove0 | Literal["all"] = "all"
    cache_states: Flag = False


class BaselineRecipe(Recipe):
    """All settings of a run of a trained baseline.

    Attributes:
        text: the text to train on; give either `text` or `data`.
        losses: selection losses of a method that picks paragraphs; None means the defaults.
        new_selector: how the selector of such a method starts, as in `Stage2Recipe`.
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
    new_selector: SelectorStart | None = None

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        if (self.text is None) == (self.data is None):
            given = "both" if self.text else "neither"
            raise ValueError(
                f"the recipe has {given} of text and data; a run learns from exactly one"
            )
        for name in ("logits_at_once", "compile", "shard_backbone"):
            if value := getattr(self.optimization, name):
                raise ValueError(
                    f"optimization.{name} is {value}, which only stage1 and stage2 of SeDeM can "
                    "do; leave it out"
                )
        return self


def load_baseline_recipe(path: Path, overrides: Sequence[str] = ()) -> BaselineRecipe:
    """Read the recipe of a trained baseline and check `model` against the method's settings.

    Raises:
        ConfigError: the recipe names no method that is trained, or is invalid.
    """
    settings = reader_class(what_trains(path, overrides)).Config
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


class BaselineTraining(Trainable):
    """Adapter from a baseline to the trainer; only its parameter groups are trained."""

    def __init__(self, reader: TrainedReader) -> None:
        super().__init__()
        self.reader = reader
        self.freeze_others()

    @property
    def progress(self) -> float:
        """Share of the training that is done; the reader's losses may depend on it."""
        return self.reader.progress

    @progress.setter
    def progress(self, value: float) -> None:
        """Set by the trainer before every step."""
        self.reader.progress = value

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate."""
        return self.reader.parameter_groups()


class TextTraining(BaselineTraining):
    """Training on windows of text, whose tokens are the budget of every method alike."""

    collate = staticmethod(collate_windows)
    tokens = staticmethod(window_tokens)

    def forward(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """The method's losses on text."""
        return self.reader.text_loss(context, continuation)


class QuestionTraining(BaselineTraining):
    """Training on questions."""

    collate = staticmethod(collate_questions)

    def tokens(self, batch: Mapping[str, Any]) -> int:
        """Number of tokens of contexts, prompts and answers."""
        return sum(map(len, batch["contexts"])) + int(batch["valid"].sum())

    def forward(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The method's losses on questions."""
        return self.reader.question_loss(contexts, ids, valid, labels)


class RAGTraining(BaselineTraining):
    """Trains selector and adapters; each loss has gradients for only one of the two.

    Args:
        context_limit: maximum tokens of the picked paragraphs; None means what the backbone takes.
    """

    reader: RAG

    def __init__(
        self,
        reader: RAG,
        losses: ConditionedLosses,
        collator: BlockCollator,
        context_limit: int | None = None,
    ) -> None:
        super().__init__(reader)
        self.losses = losses
        self.collator = collator
        self.context_limit = context_limit

    def collate(self, items: list[BlockItem]) -> dict[str, Any]:
        """Collate examples into the arguments of `forward`."""
        return self.collator(items, self.epoch)

    tokens = staticmethod(real_tokens)

    def forward(self, **batch: Unpack[BlockBatch]) -> dict[str, Tensor]:
        """Losses of a batch of examples; a block is a paragraph and a slot a token.

        Returns:
            `loss`, its parts `answer` and `select`, and `recall`: among the examples with evidence,
            the share that have some among the selector's K best paragraphs.
        """
        layers = (self.reader.config.extract_layer,)
        states, question_states = frozen_states(batch, self.reader.backbone, layers)
        real_BNJ = batch["slot_tokens"] > 0
        longest = int(real_BNJ.sum(-1).max())
        index_BNJ, real_BNJ = batch["slot_index"][..., :longest], real_BNJ[..., :longest]
        scores_BN = self.reader.selector(
            question_states[0].float(),
            batch["question_mask"],
            rows_at(states[0].float().flatten(0, 1), index_BNJ),
            real_BNJ,
        )
        progress = self.progress if self.training else 1.0
        chosen_BK = choose_blocks(scores_BN, batch, self.losses.conditioning, progress)
        tokens_BNJ = rows_at(batch["segment_ids"].flatten(), index_BNJ)
        contexts = []
        for row, chosen_K in enumerate(chosen_BK.sort(1).values.tolist()):
            own = [tokens_BNJ[row, n][real_BNJ[row, n]] for n in chosen_K]
            room = self.reader.backbone.max_positions - int(batch["valid"][row].sum())
            joined = self.reader.join([ids for ids in own if len(ids)])
            contexts.append(joined[: min(room, self.context_limit or room)])
        answer = self.reader.question_loss(contexts, batch["ids"], batch["valid"], batch["labels"])[
            "loss"
        ]
        select = self.losses.compute(scores_BN, batch)
        return {
            "loss": answer + self.losses.select * select,
            "answer": answer,
            "select": select,
            "recall": evidence_recall(scores_BN, batch),
        }


def blocks_of(reader: RAG) -> BlockModel:
    """Describe the paragraphs of a reader as blocks."""
    return BlockModel(reader.backbone, reader.backbone, reader.config.blocks)


def train_baseline(recipe: BaselineRecipe) -> Path:
    """Run a recipe to its end, from its last complete checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder contains a run with other settings, or the method cannot
            learn from what the recipe gives.
    """
    start_run(recipe)
    chosen, optimization = recipe.data, recipe.optimization
    cache, data_root = Path(recipe.cache), Path(recipe.data_root)
    picks = reader_class(recipe.method).has_selection_budget
    if picks and (chosen is None or chosen.documents != "all"):
        raise ConfigError(
            "rag learns to pick among all documents; give questions (data) with documents: all"
        )
    reader = open_reader(recipe)
    of_data = chosen and (chosen.cache_states or chosen.evidence_only)
    if not picks and (of_data or recipe.losses is not None or recipe.new_selector):
        raise ConfigError(
            "losses, new_selector, data.cache_states and data.evidence_only apply only to methods "
            f"that pick paragraphs, but '{recipe.method}' reads all of them; remove these settings"
        )
    if recipe.text is not None:
        length = recipe.text.context
        windows, held_out = open_windows(recipe.text, recipe, reader.backbone, length)
        return fit(TextTraining(reader), reader, recipe, windows, held_out, best=True)
    assert chosen is not None
    stage: BaselineTraining
    if isinstance(reader, RAG):
        if recipe.new_selector:
            reader.selector.restart(recipe.new_selector, optimization.seed)
        losses = recipe.losses or ConditionedLosses()
        blocks = BlockDataset(blocks_of(reader), chosen.answer_limit, cache=cache)
        training, evaluation = read_mixture(blocks, chosen, data_root, selects=losses.select > 0)
        collator = BlockCollator(
            blocks,
            max_blocks=resolve_budget(chosen.max_paragraphs, blocks.most_blocks),
            budgets=(resolve_budget(reader.config.k, sys.maxsize),),
            seed=optimization.seed,
            cache=cache if chosen.cache_states else None,
        )
        summary: dict[str, Any] = {"left_out": dict(blocks.dropped)}
        stage = RAGTraining(reader, losses, collator, chosen.context_limit)
    else:
        dataset = QuestionDataset(
            reader,
            chosen.answer_limit,
            chosen.documents,
            chosen.context_limit,
            chosen.max_paragraphs,
            optimization.seed,
            cache=cache,
        )
        training, evaluation = read_mixture(dataset, chosen, data_root)
        if not len(training):
            raise ConfigError(
                f"no question of data.training can be used (left out: {dict(dataset.dropped)})"
            )
        logger.info("contexts: %s", dict(dataset.cut))
        summary = {"left_out": dict(dataset.dropped), **dataset.cut}
        stage = QuestionTraining(reader)
    return fit(stage, reader, recipe, training, evaluation, data_summary=summary, best=True)

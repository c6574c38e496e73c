"""Baselines: their recipes, and training on text or on questions with SeDeM's trainer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import SerializeAsAny, create_model, model_validator
from torch import Tensor, nn
from torch.utils.data import Subset

from sedem.backbone.decoder import Backbone
from sedem.baselines.rag import RAG
from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.trained import TrainedReader
from sedem.checkpoint.folder import open_named
from sedem.checkpoint.portable import portable_name
from sedem.config import SedemConfig
from sedem.data.windows import collate_windows
from sedem.errors import ConfigError
from sedem.method.selector import resolve_budget
from sedem.training.block_batch import BlockBatch, BlockCollator, frozen_states, rows_at
from sedem.training.block_dataset import BlockDataset, BlockItem
from sedem.training.fit import fit
from sedem.training.question_dataset import QuestionDataset, QuestionItem, collate_questions
from sedem.training.recipe import (
    Mixture,
    Optimization,
    RunSettings,
    TextSource,
    check_evaluation,
    load_recipe,
    read_entries,
)
from sedem.training.run_setup import backbone_options, check_start, start_run
from sedem.training.selection_losses import (
    CONDITIONING,
    ConditionedLosses,
    choose_blocks,
    evidence_recall,
)
from sedem.training.sources import open_windows, read_mixture
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


class BaselineTraining(nn.Module):
    """Adapter from a baseline to the trainer; only its parameter groups are trained."""

    def __init__(self, reader: TrainedReader) -> None:
        super().__init__()
        self.reader = reader
        self.epoch = 0
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
        """Set by the trainer before every step."""
        self.reader.progress = value

    def train(self, mode: bool = True) -> Self:
        """Set training mode; the reader decides which of its parts follow."""
        super().train(mode)
        return self

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate."""
        return self.reader.parameter_groups()


class TextTraining(BaselineTraining):
    """Training on windows of text."""

    def collate(self, windows: list[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
        """Collate windows into a batch."""
        return collate_windows(windows)

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens of contexts and continuations, which is the training budget.

        All tokens count, even if the method's loss does not use them all, so that the budgets of
        methods are comparable.
        """
        return batch["context"].numel() + batch["continuation"].numel()

    def forward(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """The method's losses on text."""
        return self.reader.text_loss(context, continuation)


class QuestionTraining(BaselineTraining):
    """Training on questions."""

    def collate(self, items: list[QuestionItem]) -> dict[str, Any]:
        """Collate examples into a batch."""
        return collate_questions(items)

    def tokens(self, batch: Mapping[str, Any]) -> int:
        """Number of tokens of contexts, prompts and answers."""
        return sum(map(len, batch["contexts"])) + int(batch["valid"].sum())

    def forward(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The method's losses on questions."""
        return self.reader.question_loss(contexts, ids, valid, labels)


@dataclass(frozen=True)
class RAGBlocks:
    """A reader's paragraphs described as blocks; a `BlockModel`."""

    encoder: Backbone
    decoder: Backbone
    config: SedemConfig

    @classmethod
    def of(cls, reader: RAG) -> RAGBlocks:
        """Describe the paragraphs of a reader."""
        return cls(reader.backbone, reader.backbone, reader.config.blocks)


class RAGTraining(BaselineTraining):
    """Trains selector and adapters; each loss has gradients for only one of the two.

    Args:
        losses: weights of the losses, and the conditioning.
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

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens of paragraphs, questions (selector), prompts and answers."""
        return int(sum(batch[name].sum() for name in ("segment_mask", "question_mask", "valid")))

    def forward(self, **batch: Unpack[BlockBatch]) -> dict[str, Tensor]:
        """Losses of a batch of examples; a block is a paragraph and a slot a token.

        Returns:
            `loss`, its parts `answer` and `select`, and `recall`: among the examples with evidence,
            the share that have some among the selector's K best paragraphs.
        """
        layers = (self.reader.config.extract_layer,)
        states, question_states = frozen_states(batch, self.reader.backbone, layers)
        evidence_BN, valid_BP = batch["evidence"], batch["valid"]
        question_mask_BQ = batch["question_mask"]
        real_BNJ = batch["slot_tokens"] > 0
        longest = int(real_BNJ.sum(-1).max())
        index_BNJ, real_BNJ = batch["slot_index"][..., :longest], real_BNJ[..., :longest]
        scores_BN = self.reader.selector(
            question_states[0].float(),
            question_mask_BQ,
            rows_at(states[0].float().flatten(0, 1), index_BNJ),
            real_BNJ,
        )
        share = CONDITIONING[self.losses.conditioning](self.progress if self.training else 1.0)
        detached_BN = scores_BN.detach()
        chosen_BK = choose_blocks(detached_BN, evidence_BN, batch["coins"], share, batch["budget"])
        chosen_BK = chosen_BK.sort(1).values
        tokens_BNJ = rows_at(batch["segment_ids"].flatten(), index_BNJ)
        contexts = [
            self._context(tokens_BNJ[b], real_BNJ[b], chosen_BK[b], valid_BP[b])
            for b in range(len(chosen_BK))
        ]
        answer = self.reader.question_loss(contexts, batch["ids"], valid_BP, batch["labels"])[
            "loss"
        ]
        select = self.losses.compute(scores_BN, evidence_BN, batch["blocks"], question_mask_BQ)
        return {
            "loss": answer + self.losses.select * select,
            "answer": answer,
            "select": select,
            "recall": evidence_recall(detached_BN, evidence_BN, batch["budget"]),
        }

    def _context(
        self, tokens_NJ: Tensor, real_NJ: Tensor, chosen_K: Tensor, valid_P: Tensor
    ) -> Tensor:
        """Tokens of an example's chosen paragraphs, truncated to the free positions."""
        rows = [tokens_NJ[n][real_NJ[n]] for n in chosen_K.tolist() if bool(real_NJ[n].any())]
        room = self.reader.backbone.max_positions - int(valid_P.sum())
        return self.reader.join(rows)[: min(room, self.context_limit or room)]


def train_rag(recipe: BaselineRecipe, output: Path) -> Path:
    """Train raw-text RAG on the questions of a recipe.

    Args:
        recipe: a recipe of `rag`.
        output: output folder, claimed by `start_run`.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the recipe has no questions, or uses only documents with evidence.
    """
    chosen = recipe.data
    if chosen is None or chosen.documents != "all":
        raise ConfigError(
            "rag learns to pick among all documents; give questions (data) with documents: all"
        )
    reader = open_reader(recipe)
    assert isinstance(reader, RAG)
    losses = recipe.losses or ConditionedLosses()
    dataset = BlockDataset(RAGBlocks.of(reader), chosen.answer_limit, cache=Path(recipe.cache))
    training, evaluation = read_mixture(
        dataset, chosen, Path(recipe.data_root), selects=losses.select > 0
    )
    collator = BlockCollator(
        dataset,
        max_blocks=chosen.max_paragraphs or dataset.most_blocks,
        budgets=(resolve_budget(reader.config.k, sys.maxsize),),
        seed=recipe.optimization.seed,
        cache=Path(recipe.cache) if chosen.cache_states else None,
    )
    stage = RAGTraining(reader, losses, collator, chosen.context_limit)
    return fit(
        stage,
        reader,
        recipe,
        output,
        training,
        evaluation,
        data_summary={"left_out": dict(dataset.dropped)},
        best=True,
    )


logger = logging.getLogger(__name__)


def train_baseline(recipe: BaselineRecipe) -> Path:
    """Run a recipe to its end, from its last complete checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder contains a run with other settings.
    """
    output = start_run(recipe)
    if reader_class(recipe.method).has_selection_budget:
        return train_rag(recipe, output)
    reader = open_reader(recipe)
    _refuse_selection_settings(recipe)
    if recipe.text is not None:
        windows, held_out = open_windows(
            recipe.text,
            reader.backbone,
            recipe.text.context,
            recipe.optimization.seed,
            data_root=Path(recipe.data_root),
            cache=Path(recipe.cache),
        )
        stage = TextTraining(reader)
        return fit(stage, reader, recipe, output, windows, held_out, best=True)
    dataset, training, evaluation = _open_questions(reader, recipe)
    return fit(
        QuestionTraining(reader),
        reader,
        recipe,
        output,
        training,
        evaluation,
        data_summary={"left_out": dict(dataset.dropped), **dataset.cut},
        best=True,
    )


def _refuse_selection_settings(recipe: BaselineRecipe) -> None:
    """Refuse settings that apply only to a method that picks paragraphs."""
    if (recipe.data and recipe.data.cache_states) or recipe.losses is not None:
        raise ConfigError(
            f"losses and data.cache_states apply only to methods that pick paragraphs, but "
            f"'{recipe.method}' reads all of them; remove these settings"
        )


def _open_questions(
    reader: TrainedReader, recipe: BaselineRecipe
) -> tuple[QuestionDataset, Subset[QuestionItem], Subset[QuestionItem] | None]:
    """All examples, those to train on, and those to evaluate on."""
    assert recipe.data is not None
    chosen = recipe.data
    dataset = QuestionDataset(
        reader,
        chosen.answer_limit,
        chosen.documents,
        chosen.context_limit,
        chosen.max_paragraphs,
        recipe.optimization.seed,
        cache=Path(recipe.cache),
    )
    training, evaluation = read_mixture(dataset, chosen, Path(recipe.data_root))
    if not len(training):
        raise ConfigError(
            f"no question of data.training can be used (left out: {dict(dataset.dropped)})"
        )
    logger.info("contexts: %s", dict(dataset.cut))
    return dataset, training, evaluation

"""The steps of a training run: its FLOPs, and the memory of its longest batch.

A step of each recipe runs without numbers (`sedem.backbone.meta`), on backbones of the recipe's
shapes and a batch of the given lengths, without padding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from sedem.backbone.meta import META, backbone_of
from sedem.checkpoint.folder import embedded
from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.method.selector import resolve_budget
from sedem_lab.baselines.registry import reader_class
from sedem_lab.data.hub import HOMES
from sedem_lab.data.question_sets import parse_records
from sedem_lab.evaluation.cost import PRESETS, Workload, backbone_shape, model_of, shape_file
from sedem_lab.training.baseline import (
    BaselineRecipe,
    QuestionTraining,
    RAGTraining,
    TextTraining,
    WindowSource,
)
from sedem_lab.training.memory import Step, checkpoint_layers, measure_step
from sedem_lab.training.recipe import DataSource, TextSource
from sedem_lab.training.selection_losses import ConditionedLosses
from sedem_lab.training.stage1 import Stage1
from sedem_lab.training.stage2 import Stage2
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe
from sedem_lab.training.targets import targets

AnyRecipe = Stage1Recipe | Stage2Recipe | BaselineRecipe
WORDS = 1000
"""Drawn tokens are below this; every vocabulary is larger."""


def shape_of(name: str) -> PretrainedConfig:
    """The configuration of a recipe's backbone; those of the paper are part of the package."""
    short = name.rpartition("/")[2].lower()
    if name.startswith("meta-llama/") and short in PRESETS:
        return shape_file(short)
    return backbone_shape(str(embedded(name) or name))


FEW = 2, 3
"""Layers that a step is measured with, where it would take long with all."""


def measure(
    recipe: AnyRecipe,
    question: Workload,
    rows: int | None = None,
    *,
    checkpointing: bool = False,
    whole: bool = False,
) -> Step:
    """What a batch takes in a recipe's training.

    Args:
        question: tokens of every question; K and windows of text are the recipe's.
        rows: examples of the batch; None means the recipe's.
        whole: run every layer. By default, a baseline runs with few: its layers are alike, and some
            methods read a context in a hundred passes.
    """
    if whole or not isinstance(recipe, BaselineRecipe) or recipe.method == "rag":
        return _measured(recipe, question, rows, checkpointing)
    less, more = (_measured(recipe, question, rows, checkpointing, layers) for layers in FEW)
    others = shape_of(recipe.model.backbone).num_hidden_layers - FEW[1]
    return Step(
        more.flops + others * (more.flops - less.flops),
        more.peak_bytes + others * (more.peak_bytes - less.peak_bytes),
    )


def _measured(
    recipe: AnyRecipe,
    question: Workload,
    rows: int | None,
    checkpointing: bool,
    layers: int | None = None,
) -> Step:
    stage = stage_of(recipe, layers)
    checkpoint_layers(stage, checkpointing)
    tokens = question.context + question.question + question.answer
    rows = rows or recipe.optimization.rows(tokens)
    if isinstance(recipe, Stage2Recipe):
        batch = _block_batch(recipe.model, recipe.data, question, rows)
    elif isinstance(stage, RAGTraining):
        batch = _block_batch(stage.reader.config.blocks, recipe.data, question, rows)
    elif isinstance(stage, QuestionTraining):
        batch = _question_batch(stage.reader, recipe.data, question, rows)
    else:
        text: Any = recipe.text
        context = text.context if isinstance(text, WindowSource) else recipe.model.segment_length
        batch = {
            "context": _tokens(rows, context),
            "continuation": _tokens(rows, text.continuation),
        }
    return measure_step(stage.train(), batch, mixed=recipe.optimization.bf16)


def stage_of(recipe: AnyRecipe, layers: int | None = None) -> Any:
    """What a recipe trains, on backbones without weights; a baseline's may have fewer layers."""
    config, own = recipe.model, recipe.optimization
    dtype = getattr(torch, own.backbone_dtype)
    if isinstance(recipe, BaselineRecipe):
        shape = shape_of(config.backbone)
        shape.num_hidden_layers = layers or shape.num_hidden_layers
        with META:
            reader = reader_class(recipe.method)(config, backbone_of(shape, dtype))
        reader.progress = 1.0
        if recipe.text is not None:
            return TextTraining(reader)
        if reader.has_selection_budget:
            return RAGTraining(reader, recipe.losses or ConditionedLosses(), None)
        return QuestionTraining(reader)
    shapes = shape_of(config.encoder), shape_of(config.decoder or config.encoder)
    model = model_of(config, *shapes, dtype=dtype)
    stage: Stage1 | Stage2
    if isinstance(recipe, Stage1Recipe):
        stage = Stage1(model, recipe.losses, own.seed, own.logits_at_once)
        stage.progress = 1.0
        return stage
    with META:
        if config.lora_rank:
            model.decoder.add_lora(config.lora_rank, config.lora_alpha)
    return Stage2(model, recipe.losses, None, own.logits_at_once)


def _tokens(rows: int, length: int) -> Tensor:
    return torch.randint(2, WORDS, (rows, length), generator=torch.Generator().manual_seed(0))


def _question_batch(reader: Any, data: Any, asked: Workload, rows: int) -> dict[str, Any]:
    prompt = 1 + asked.question
    used = reader.context_tokens_used(asked.context, prompt, asked.answer)
    used = min(used, data.context_limit or used)
    pairs = [([0] * prompt, [0] * asked.answer)] * rows
    return {"contexts": list(_tokens(rows, used)), **targets(pairs)}


def _block_batch(config: SedemConfig, data: Any, asked: Workload, rows: int) -> dict[str, Any]:
    width = config.slots_per_block * config.compression
    most = getattr(data, "max_blocks", None) or data.max_paragraphs
    blocks = resolve_budget(most, -(-asked.context // width))
    budgets = [resolve_budget(k, blocks) for k in getattr(data, "budgets", (config.k,))]
    segments, per = rows * -(-blocks * width // config.segment_length), config.slots_per_block
    labels = torch.zeros(rows, blocks, dtype=torch.bool)
    labels[:, 0] = True
    question = _tokens(rows, asked.question)
    conditions = getattr(data, "conditions", {"memory": 1.0})
    return {
        "segment_ids": _tokens(segments, config.segment_length),
        "segment_mask": torch.ones(segments, config.segment_length, dtype=torch.bool),
        "slot_index": torch.arange(rows * blocks * per).view(rows, blocks, per),
        "slot_tokens": torch.full((rows, blocks, per), config.compression),
        "blocks": torch.ones_like(labels),
        "evidence": labels,
        "question_ids": question,
        "question_mask": torch.ones_like(question).bool(),
        "coins": torch.ones(rows),
        "budget": max(budgets),
        "condition": max(conditions, key=["memory", "both", "text"].index),
        "texts": [["x" * width] * blocks] * rows,
        **targets([([0] * (1 + asked.question), [0] * asked.answer)] * rows),
    }


def examples_of_run(recipe: AnyRecipe, of_epoch: int | None = None) -> int:
    """The examples in a run's steps; `of_epoch` is how many an epoch has if the recipe is silent.

    Raises:
        ConfigError: the length of an epoch is needed and unknown.
    """
    optimization, count = recipe.optimization, of_epoch or _examples(recipe)
    if optimization.steps is not None:
        return optimization.steps * optimization.batch_size * optimization.accumulation
    if count is None or optimization.epochs is None:
        raise ConfigError("the recipe counts epochs; say in it how many examples an epoch has")
    return math.ceil(optimization.epochs * count)


def _examples(recipe: AnyRecipe) -> int | None:
    """Examples of an epoch; None if the recipe does not say."""
    text: TextSource | None = getattr(recipe, "text", None)
    if text is not None:
        length = text.context if isinstance(text, WindowSource) else 0
        if isinstance(recipe, Stage1Recipe):
            length = recipe.model.segment_length
        # An upper bound: windows never span two texts.
        read = text.tokens and text.tokens // (length + text.continuation)
        return min((n for n in (text.windows, read) if n is not None), default=None)
    assert not isinstance(recipe, Stage1Recipe) and recipe.data is not None
    sizes = [_questions(source) for source in recipe.data.training]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _questions(source: DataSource) -> int | None:
    """Questions that a public set gives to an epoch; None for a file."""
    home = HOMES.get(source.path)
    if home is None or not home.records:
        return None
    chosen = len(range(home.records)[parse_records(source.records)])
    return round(home.questions * chosen / home.records) * source.repeat

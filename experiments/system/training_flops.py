"""FLOPs of a training run of SeDeM, from its recipe and the shapes of its backbones.

FLOPs are counted as in `sedem.evaluation.cost`, of one example: the backward pass of a frozen layer
has only the gradient of its input, the trained parts have both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from sedem.checkpoint.folder import embedded
from sedem.config import SedemConfig
from sedem.data.hub import HOMES
from sedem.data.question_sets import parse_records
from sedem.errors import ConfigError
from sedem.evaluation.cost import (
    PRESETS,
    Workload,
    backbone_shape,
    backward_flops,
    count_parameters,
    counted,
    head_flops,
    layer_flops,
    shape_file,
)
from sedem.method.compressor import build_compressor
from sedem.method.decompressor import build_decompressor
from sedem.method.selector import build_selector, resolve_budget
from sedem.training.baseline import BaselineRecipe, WindowSource
from sedem.training.recipe import DataSource, TextSource
from sedem.training.stages import Stage1Recipe, Stage2Recipe


@dataclass(frozen=True)
class Shapes:
    """The shapes of what a recipe trains: its parts, and both backbones."""

    config: SedemConfig
    encoder: PretrainedConfig
    decoder: PretrainedConfig


def shape_of(name: str) -> PretrainedConfig:
    """The configuration of a recipe's backbone; those of the paper are part of the package."""
    short = name.rpartition("/")[2].lower()
    if name.startswith("meta-llama/") and short in PRESETS:
        return shape_file(short)
    return backbone_shape(str(embedded(name) or name))


def run_flops(recipe: Stage1Recipe | Stage2Recipe, workload: Workload) -> int:
    """The FLOPs of a run; the workload is that of a question."""
    config, seen = recipe.model, examples_of_run(recipe)
    encoder = shape_of(config.encoder)
    shapes = Shapes(config, encoder, shape_of(config.decoder) if config.decoder else encoder)
    if isinstance(recipe, Stage1Recipe):
        return seen * stage1_flops(recipe, shapes)
    # A step keeps no more blocks than `max_blocks`.
    width = config.slots_per_block * config.compression
    blocks = resolve_budget(recipe.data.max_blocks, -(-workload.context // width))
    workload = replace(workload, context=min(workload.context, blocks * width))
    flops = seen * stage2_flops(recipe, shapes, workload)
    if recipe.data.cache_states:
        # At most: examples that share a document share its states.
        cached = _examples(recipe) or seen
        flops += cached * encoding_flops(shapes, workload)
    return flops


def stage1_flops(recipe: Stage1Recipe, shapes: Shapes) -> int:
    """The FLOPs of one window, averaged over training if it starts with the regression."""
    config, losses, decoder = shapes.config, recipe.losses, shapes.decoder
    context, after = config.segment_length, recipe.text.continuation
    depth, inject = decoder.num_hidden_layers, config.inject_layer
    taught, regressed = depth if losses.distill else inject, inject
    frozen = 0
    if config.cross_model:
        frozen = config.extract_layer * layer_flops(shapes.encoder, context + 1)
    else:
        taught, regressed = (max(n, config.extract_layer) for n in (taught, regressed))
    first, read = losses.regress_first, after + _states(config, config.slots)
    whole = taught * layer_flops(decoder, context + after) + inject * layer_flops(decoder, after)
    whole += (depth - inject) * (layer_flops(decoder, read) + backward_flops(decoder, read))
    whole += head_flops(decoder) * after * (2 + bool(losses.distill))
    regression = regressed * layer_flops(decoder, context + 1)
    parts = part_flops(shapes, 1, reconstruct=losses.reconstruct > 0)
    return frozen + round(first * regression + (1 - first) * whole) + parts


def stage2_flops(recipe: Stage2Recipe, shapes: Shapes, workload: Workload) -> int:
    """The FLOPs of one question; K is the recipe's, whatever the workload says."""
    config, data, decoder = shapes.config, recipe.data, shapes.decoder
    segments = -(-workload.context // config.segment_length)
    width = config.slots_per_block * config.compression
    budgets = [resolve_budget(k, -(-workload.context // width)) for k in data.budgets]
    k = round(sum(budgets) / len(budgets))
    flops = 0 if data.cache_states else encoding_flops(shapes, workload)
    lower, upper = config.inject_layer, decoder.num_hidden_layers - config.inject_layer
    counts = count_parameters(config, shapes.encoder, decoder)
    lora = counts["lora"] // decoder.num_hidden_layers
    for condition, weight in data.conditions.items():
        texts = {"memory": 0, "both": 1, "text": k}[condition]
        own = workload.question + workload.answer + texts * width
        joined = own + (k - texts) * _states(config, config.slots_per_block)
        # Adapters run forward once, and backward twice.
        step = 6 * lora * (lower * own + upper * joined)
        step += lower * layer_flops(decoder, own) + upper * layer_flops(decoder, joined)
        step += upper * backward_flops(decoder, joined)
        if lora:
            step += lower * backward_flops(decoder, own)
        flops += round(weight / sum(data.conditions.values()) * step)
    flops += 2 * head_flops(decoder) * workload.answer
    reconstruct = recipe.losses.reconstruct > 0
    return flops + part_flops(shapes, segments, k, workload.question, reconstruct=reconstruct)


def encoding_flops(shapes: Shapes, workload: Workload) -> int:
    """The FLOPs of the frozen states of an example's segments and question."""
    segments = -(-workload.context // shapes.config.segment_length)
    run = segments * layer_flops(shapes.encoder, shapes.config.segment_length + 1)
    return shapes.config.extract_layer * (run + layer_flops(shapes.encoder, workload.question + 1))


def part_flops(
    shapes: Shapes, segments: int, k: int | None = None, question: int = 0, *, reconstruct: bool
) -> int:
    """The FLOPs of the trained parts, forward and backward.

    Args:
        segments: segments of an example.
        k: blocks that are decompressed; None decompresses every slot once.
        question: tokens that the selector scores blocks for; 0 for none.
        reconstruct: whether a loss restores every state, and projects it without pooling.
    """
    config = shapes.config
    widths = shapes.encoder.hidden_size, shapes.decoder.hidden_size

    def run() -> None:
        compressor = build_compressor(config, *widths)
        decompressor = build_decompressor(config, widths[1])
        hidden_STE = torch.empty(segments, config.segment_length, widths[0])
        memory_SMD = compressor(hidden_STE, torch.ones(hidden_STE.shape[:2], dtype=torch.bool))
        total = memory_SMD.sum()
        if reconstruct:
            compressor.target(hidden_STE)
        if reconstruct or k is None:
            total = total + decompressor(memory_SMD).sum()
        if k is not None:
            slots_JD = memory_SMD.flatten(0, 1)[: k * config.slots_per_block]
            total = total + decompressor(slots_JD).sum()
        if question:
            selector = build_selector(config, *widths)
            query_QRH = selector.queries(torch.empty(question, widths[0]))
            keys_JRH = selector.keys(memory_SMD.flatten(0, 1))
            total = total + torch.einsum("qrh,jrh->rqj", query_QRH, keys_JRH).sum()
        total.backward()

    with torch.device("meta"):
        return counted(run)


def _states(config: SedemConfig, slots: int) -> int:
    """The number of states that enter the decoder for `slots` slots."""
    # Without a decompressor a slot is one soft token.
    return slots if config.decompressor == "none" else slots * config.compression


def examples_of_run(
    recipe: Stage1Recipe | Stage2Recipe | BaselineRecipe, of_epoch: int | None = None
) -> int:
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


def _examples(recipe: Stage1Recipe | Stage2Recipe | BaselineRecipe) -> int | None:
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

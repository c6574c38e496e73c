"""Estimates what a training run needs: steps, tokens, FLOPs, memory and hours.

It reads a recipe and configurations of backbones. It opens no weights and no data. FLOPs are
counted as in `sedem.evaluation.cost`, of one example: the backward pass of a frozen layer has only
the gradient of its input, the trained parts have both.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from sedem.evaluation.storage import BFLOAT16, head_width
from sedem.method.compressor import build_compressor
from sedem.method.decompressor import build_decompressor
from sedem.method.selector import build_selector, resolve_budget
from sedem.training.baseline import BaselineRecipe, WindowSource
from sedem.training.recipe import DataSource, Optimization, TextSource, load_recipe
from sedem.training.shipped_recipes import what_trains
from sedem.training.stages import STAGES, Stage1Recipe, Stage2Recipe

AnyRecipe = Stage1Recipe | Stage2Recipe | BaselineRecipe
FLOAT32 = 4
TRAINED_BYTES = 4 * FLOAT32
"""Numbers kept per trained parameter: itself, its gradient and the two moments of AdamW."""
TFLOPS = 400.0
"""TFLOP/s that a GPU sustains: about 40 % of an H100's 989 in bfloat16, by its data sheet."""


@dataclass(frozen=True)
class Assumed:
    """Assumptions that a recipe does not state.

    Attributes:
        tflops: TFLOP/s that one GPU sustains.
        gpus: number of GPUs.
        examples: examples of an epoch; None means what the recipe or the public sets state.
        workload: tokens of a question's documents, of the question and of its answer.
    """

    tflops: float = TFLOPS
    gpus: int = 1
    examples: int | None = None
    workload: Workload = field(default_factory=Workload)


@dataclass(frozen=True)
class Shapes:
    """The shapes of what a recipe trains: its parts, and both backbones."""

    config: SedemConfig
    encoder: PretrainedConfig
    decoder: PretrainedConfig


@dataclass(frozen=True)
class ExampleCost:
    """The cost of one example.

    Attributes:
        flops: FLOPs by stage.
        frozen_tokens: tokens that layers read without gradient.
        gradient_tokens: positions that the upper layers read with gradient.
        logits: positions whose logits exist at the same time.
        distributions: distributions per such position: 2 with a teacher.
    """

    flops: Counter[str]
    frozen_tokens: int
    gradient_tokens: int
    logits: int
    distributions: int


def training_cost(path: Path, overrides: list[str], assumed: Assumed) -> dict[str, Any]:
    """Estimate what a recipe of SeDeM needs.

    Returns:
        `steps`, `examples_per_step`, `examples`, `tokens`, `flops` (by stage, and `total`), `bytes`
        (memory of each GPU, and the cache on disk), `hours` and `assumptions`.

    Raises:
        ConfigError: it is a recipe of a baseline, or the length of an epoch is unknown.
    """
    stage = what_trains(path)
    if stage not in STAGES:
        raise ConfigError(
            f"'{path}' trains the baseline '{stage}'; the cost of training is counted for stage1 "
            "and stage2 of SeDeM, that of a baseline's answers by 'sedem cost BACKBONE --method "
            f"{stage}'"
        )
    recipe = load_recipe(STAGES[stage][0], path, overrides)
    config, optimization = recipe.model, recipe.optimization
    encoder = shape_of(config.encoder)
    shapes = Shapes(config, encoder, shape_of(config.decoder) if config.decoder else encoder)
    count = _examples(recipe, assumed)
    steps, seen = _steps(optimization, count)
    workload, of_questions = assumed.workload, {}
    disk = encoding = 0
    if isinstance(recipe, Stage1Recipe):
        example = stage1_cost(recipe, shapes)
    else:
        # A step keeps no more blocks than `max_blocks`.
        width = config.slots_per_block * config.compression
        blocks = resolve_budget(recipe.data.max_blocks, -(-workload.context // width))
        context = min(workload.context, blocks * width)
        workload = Workload(context, workload.question, workload.answer)
        example = stage2_cost(recipe, shapes, workload)
        disk, encoding = _cache(recipe, shapes, workload, count or seen)
        of_questions = workload.assumptions()
    flops = {name: value * seen for name, value in example.flops.items()}
    if encoding:
        flops["cache"] = encoding
    total = sum(flops.values())
    return {
        "recipe": str(path),
        "steps": steps,
        "examples_per_step": optimization.batch_size * optimization.accumulation,
        "examples": seen,
        "tokens": {
            "frozen": example.frozen_tokens * seen,
            "with_gradient": example.gradient_tokens * seen,
        },
        "flops": {**flops, "total": total},
        "bytes": {**_memory(recipe, shapes, example, assumed.gpus), "cache_on_disk": disk},
        "hours": total / (assumed.tflops * 1e12 * assumed.gpus) / 3600,
        "assumptions": {"tflops": assumed.tflops, "gpus": assumed.gpus, **of_questions},
    }


# FLOPs of an example


def stage1_cost(recipe: Stage1Recipe, shapes: Shapes) -> ExampleCost:
    """The cost of one window, averaged over training if it starts with the regression."""
    config, losses, decoder = shapes.config, recipe.losses, shapes.decoder
    context, after = config.segment_length, recipe.text.continuation
    depth, inject = decoder.num_hidden_layers, config.inject_layer
    taught, regressed = depth if losses.distill else inject, inject
    flops: Counter[str] = Counter()
    if config.cross_model:
        flops["frozen"] = config.extract_layer * layer_flops(shapes.encoder, context + 1)
    else:
        taught, regressed = (max(n, config.extract_layer) for n in (taught, regressed))
    first = losses.regress_first
    whole, read = 1 - first, after + _states(config, config.slots)
    flops["frozen"] += round(first * regressed * layer_flops(decoder, context + 1))
    flops["frozen"] += round(whole * taught * layer_flops(decoder, context + after))
    flops["frozen"] += round(whole * inject * layer_flops(decoder, after))
    flops["forward"] = round(whole * (depth - inject) * layer_flops(decoder, read))
    flops["backward"] = round(whole * (depth - inject) * backward_flops(decoder, read))
    flops["head"] = round(whole * head_flops(decoder) * after * (2 + bool(losses.distill)))
    flops["parts"] = part_flops(shapes, 1, reconstruct=losses.reconstruct > 0)
    frozen = context + 2 * after + (context + 1) * config.cross_model
    return ExampleCost(flops, frozen, read, after, 1 + bool(losses.distill))


def stage2_cost(recipe: Stage2Recipe, shapes: Shapes, workload: Workload) -> ExampleCost:
    """The cost of one question; K is the recipe's, whatever the workload says."""
    config, data, decoder = shapes.config, recipe.data, shapes.decoder
    segments = -(-workload.context // config.segment_length)
    width = config.slots_per_block * config.compression
    blocks = -(-workload.context // width)
    budgets = [resolve_budget(k, blocks) for k in data.budgets]
    k, read, frozen = round(sum(budgets) / len(budgets)), 0, 0
    flops: Counter[str] = Counter()
    if not data.cache_states:
        flops["frozen"] = encoding_flops(shapes, segments, workload.question)
        frozen = segments * (config.segment_length + 1)
    lower, upper = config.inject_layer, decoder.num_hidden_layers - config.inject_layer
    counts = count_parameters(config, shapes.encoder, decoder)
    lora = counts["lora"] // decoder.num_hidden_layers
    for condition, weight in data.conditions.items():
        texts = {"memory": 0, "both": 1, "text": k}[condition]
        share = weight / sum(data.conditions.values())
        own = workload.question + workload.answer + texts * width
        joined = own + (k - texts) * _states(config, config.slots_per_block)
        adapters = 2 * lora * (lower * own + upper * joined)
        forward = lower * layer_flops(decoder, own) + upper * layer_flops(decoder, joined)
        backward = upper * backward_flops(decoder, joined) + 2 * adapters
        if lora:
            backward += lower * backward_flops(decoder, own)
        flops["forward"] += round(share * (forward + adapters))
        flops["backward"] += round(share * backward)
        read += round(share * joined)
    flops["head"] = 2 * head_flops(decoder) * workload.answer
    flops["parts"] = part_flops(
        shapes, segments, k, workload.question, reconstruct=recipe.losses.reconstruct > 0
    )
    return ExampleCost(flops, frozen, read, workload.answer, 1)


def encoding_flops(shapes: Shapes, segments: int, question: int) -> int:
    """The FLOPs of the frozen states of an example's segments and question."""
    run = segments * layer_flops(shapes.encoder, shapes.config.segment_length + 1)
    return shapes.config.extract_layer * (run + layer_flops(shapes.encoder, question + 1))


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


# Examples, steps and bytes


def shape_of(name: str) -> PretrainedConfig:
    """The configuration of a recipe's backbone; those of the paper are part of the package."""
    short = name.rpartition("/")[2].lower()
    if name.startswith("meta-llama/") and short in PRESETS:
        return shape_file(short)
    return backbone_shape(str(embedded(name) or name))


def examples_of_run(recipe: AnyRecipe, assumed: Assumed) -> tuple[int, int]:
    """Optimizer steps of a run, and the examples in them.

    Raises:
        ConfigError: the length of an epoch is needed and unknown.
    """
    return _steps(recipe.optimization, _examples(recipe, assumed))


def _examples(recipe: AnyRecipe, assumed: Assumed) -> int | None:
    """Examples of an epoch; None if the recipe counts steps and the number is unknown."""
    if assumed.examples is not None:
        return assumed.examples
    text: TextSource | None = getattr(recipe, "text", None)
    if text is not None:
        length = text.context if isinstance(text, WindowSource) else 0
        if isinstance(recipe, Stage1Recipe):
            length = recipe.model.segment_length
        width = length + text.continuation
        # An upper bound: windows never span two texts.
        read = text.tokens and text.tokens // width
        known = [number for number in (text.windows, read) if number is not None]
        count = min(known, default=None)
    else:
        assert not isinstance(recipe, Stage1Recipe) and recipe.data is not None
        sizes = [_questions(source) for source in recipe.data.training]
        count = None if None in sizes else sum(size or 0 for size in sizes)
    if count is None and recipe.optimization.steps is None:
        raise ConfigError(
            "the recipe counts epochs, and nothing in it says how many examples an epoch has; give "
            "--examples N"
        )
    return count


def _questions(source: DataSource) -> int | None:
    """Questions that a public set gives to an epoch; None for a file."""
    home = HOMES.get(source.path)
    if home is None or not home.records:
        return None
    chosen = len(range(home.records)[parse_records(source.records)])
    return round(home.questions * chosen / home.records) * source.repeat


def _steps(optimization: Optimization, count: int | None) -> tuple[int, int]:
    """Optimizer steps, and the total number of examples in them."""
    of_step = optimization.batch_size * optimization.accumulation
    if optimization.steps is not None:
        return optimization.steps, optimization.steps * of_step
    assert count is not None and optimization.epochs is not None
    steps = math.ceil(optimization.epochs * -(-count // of_step))
    return steps, math.ceil(optimization.epochs * count)


def _memory(
    recipe: Stage1Recipe | Stage2Recipe, shapes: Shapes, example: ExampleCost, gpus: int
) -> dict[str, int]:
    """Bytes on one GPU; activations and logits are estimates."""
    config, optimization = shapes.config, recipe.optimization
    width = FLOAT32 if optimization.backbone_dtype == "float32" else BFLOAT16
    counts = count_parameters(config, shapes.encoder, shapes.decoder)
    shared = gpus if optimization.shard_backbone else 1
    weights = _kept(counts["backbone"], shapes.decoder, shared)
    if config.cross_model:
        size = count_parameters(config, shapes.encoder, shapes.encoder)["backbone"]
        weights += _kept(size, shapes.encoder, shared)
    names = ["compressor", "decompressor"]
    names += ["selector", "lora"] if isinstance(recipe, Stage2Recipe) else []
    trained = sum(counts[name] for name in names)
    layers = shapes.decoder.num_hidden_layers
    if isinstance(recipe, Stage1Recipe) or not config.lora_rank:
        layers -= config.inject_layer
    activations = example.gradient_tokens * layers * _layer_bytes(shapes.decoder, width)
    positions = example.logits * optimization.batch_size
    if optimization.logits_at_once is not None:
        positions = min(positions, optimization.logits_at_once)
    # Per logit: itself, and in the loss's float32 its log-probability and both gradients.
    of_logit = example.distributions * (width + 3 * FLOAT32)
    parts = {
        "weights": weights * width,
        "trained": trained * TRAINED_BYTES,
        "activations": activations * optimization.batch_size,
        "logits": positions * shapes.decoder.vocab_size * of_logit,
    }
    return {**parts, "memory": sum(parts.values())}


def _kept(size: int, shape: PretrainedConfig, gpus: int) -> int:
    """Parameters of a backbone on one GPU: its share of the layers, and the layer that runs."""
    if gpus == 1:
        return size
    layers = size - shape.vocab_size * shape.hidden_size * (1 + (not shape.tie_word_embeddings))
    return size - layers + -(-layers // gpus) + layers // shape.num_hidden_layers


def _layer_bytes(shape: PretrainedConfig, width: int) -> int:
    """Bytes that one layer keeps per position for its backward pass.

    Frozen matrices keep no input. Both norms keep theirs in float32. Attention keeps queries, keys,
    values and its result. The MLP keeps both inputs of its product and that of its activation.
    """
    heads = shape.num_attention_heads + shape.num_key_value_heads
    kept = 2 * heads * head_width(shape) + 3 * shape.intermediate_size
    return 2 * FLOAT32 * shape.hidden_size + width * kept


def _cache(recipe: Stage2Recipe, shapes: Shapes, workload: Workload, count: int) -> tuple[int, int]:
    """Bytes on disk of the frozen states of all examples, and the FLOPs to compute them.

    This is an upper bound: examples that share a document share its states.
    """
    if not recipe.data.cache_states:
        return 0, 0
    layers = len(shapes.config.extract_layers)
    tokens = count * (workload.context + workload.question)
    segments = -(-workload.context // shapes.config.segment_length)
    flops = count * encoding_flops(shapes, segments, workload.question)
    return tokens * layers * shapes.encoder.hidden_size * BFLOAT16, flops

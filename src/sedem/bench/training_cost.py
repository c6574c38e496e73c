"""Estimates what a training run needs: steps, tokens, FLOPs, memory and hours.

It reads a recipe and configurations of backbones. It opens no weights and no data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from sedem.bench.training_flops import Shapes, Work, encoding_flops, stage1_work, stage2_work
from sedem.checkpoint.folder import embedded
from sedem.data.hub import HOMES
from sedem.data.question_sets import parse_records
from sedem.errors import ConfigError
from sedem.evaluation.cost import (
    PRESETS,
    Workload,
    backbone_shape,
    count_parameters,
    head_widths,
    shape_file,
)
from sedem.evaluation.storage import BFLOAT16
from sedem.method.selector import resolve_budget
from sedem.training.recipe import DataSource, Optimization, load_recipe
from sedem.training.shipped_recipes import what_trains
from sedem.training.stages import STAGES, Stage1Recipe, Stage2Recipe

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


def training_cost(path: Path, overrides: list[str], assumed: Assumed) -> dict[str, Any]:
    """Estimate what a recipe of SeDeM needs.

    Args:
        path: file of the recipe.
        overrides: as in `load_recipe`.
        assumed: what the recipe does not state.

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
    encoder = _shape(config.encoder)
    decoder = _shape(config.decoder) if config.decoder else encoder
    shapes = Shapes(config, encoder, decoder)
    count = _examples(recipe, assumed)
    steps, seen = _steps(optimization, count)
    workload = _workload(recipe, assumed)
    if isinstance(recipe, Stage1Recipe):
        work, disk, encoding = stage1_work(recipe, shapes), 0, 0
    else:
        work = stage2_work(recipe, shapes, workload)
        disk, encoding = _cache(recipe, shapes, workload, count or seen)
    flops = {name: value * seen for name, value in work.flops.items()}
    if encoding:
        flops["cache"] = encoding
    total = sum(flops.values())
    return {
        "recipe": str(path),
        "steps": steps,
        "examples_per_step": optimization.batch_size * optimization.accumulation,
        "examples": seen,
        "tokens": {
            "frozen": work.frozen_tokens * seen,
            "with_gradient": work.gradient_tokens * seen,
        },
        "flops": {**flops, "total": total},
        "bytes": {**_memory(recipe, shapes, work, assumed.gpus), "cache_on_disk": disk},
        "hours": total / (assumed.tflops * 1e12 * assumed.gpus) / 3600,
        "assumptions": {
            "tflops": assumed.tflops,
            "gpus": assumed.gpus,
            **(
                {
                    "context_tokens": workload.context,
                    "question_tokens": workload.question,
                    "answer_tokens": workload.answer,
                }
                if isinstance(recipe, Stage2Recipe)
                else {}
            ),
        },
    }


def _shape(name: str) -> PretrainedConfig:
    """The configuration of a recipe's backbone; those of the paper are part of the package."""
    short = name.rpartition("/")[2].lower()
    if name.startswith("meta-llama/") and short in PRESETS:
        return shape_file(short)
    return backbone_shape(str(embedded(name) or name))


def _workload(recipe: Stage1Recipe | Stage2Recipe, assumed: Assumed) -> Workload:
    """The tokens of a question; a step keeps no more blocks than `max_blocks`."""
    given = assumed.workload
    if isinstance(recipe, Stage1Recipe):
        return given
    width = recipe.model.slots_per_block * recipe.model.compression
    blocks = resolve_budget(recipe.data.max_blocks, -(-given.context // width))
    return Workload(min(given.context, blocks * width), given.question, given.answer)


def _examples(recipe: Stage1Recipe | Stage2Recipe, assumed: Assumed) -> int | None:
    """Examples of an epoch; None if the recipe counts steps and the number is unknown."""
    if assumed.examples is not None:
        return assumed.examples
    if isinstance(recipe, Stage1Recipe):
        width = recipe.model.segment_length + recipe.text.continuation
        # An upper bound: windows never span two texts.
        read = recipe.text.tokens and recipe.text.tokens // width
        known = [number for number in (recipe.text.windows, read) if number is not None]
        count = min(known, default=None)
    else:
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
    recipe: Stage1Recipe | Stage2Recipe, shapes: Shapes, work: Work, gpus: int
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
    activations = work.gradient_tokens * layers * _layer_bytes(shapes.decoder, width)
    positions = work.logits * optimization.batch_size
    if optimization.logits_at_once is not None:
        positions = min(positions, optimization.logits_at_once)
    # Per logit: itself, and in the loss's float32 its log-probability and both gradients.
    of_logit = work.distributions * (width + 3 * FLOAT32)
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
    queries, keys = head_widths(shape)
    kept = 2 * queries + 2 * keys + 3 * shape.intermediate_size
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

"""The FLOPs and tokens that one training example costs, from the backbones' shapes.

The backward pass of a frozen matrix costs as much as its forward pass, because only its input has a
gradient; attention and trained matrices cost twice as much. The trained parts run on the meta
device, where torch counts them. The rest is `sedem.evaluation.cost`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig

from sedem.config import SedemConfig
from sedem.evaluation.cost import (
    Workload,
    attention_flops,
    head_widths,
    layer_flops,
    projection_flops,
)
from sedem.method.compressor import build_compressor
from sedem.method.decompressor import build_decompressor
from sedem.method.selector import build_selector, resolve_budget
from sedem.training.stages import Stage1Recipe, Stage2Recipe


@dataclass(frozen=True)
class Shapes:
    """The shapes of what a recipe trains.

    Attributes:
        config: shape of the parts.
        encoder: configuration of the backbone that reads.
        decoder: configuration of the backbone that answers.
    """

    config: SedemConfig
    encoder: PretrainedConfig
    decoder: PretrainedConfig


@dataclass(frozen=True)
class Work:
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


def stage1_work(recipe: Stage1Recipe, shapes: Shapes) -> Work:
    """The cost of one window, averaged over training if it starts with the regression."""
    config, losses, decoder = shapes.config, recipe.losses, shapes.decoder
    context, after = config.segment_length, recipe.text.continuation
    regressed = losses.regress_first
    flops: Counter[str] = Counter()
    depth, inject = decoder.num_hidden_layers, config.inject_layer
    taught = depth if losses.distill else inject
    if not config.cross_model:
        taught = max(taught, config.extract_layer)
        flops["frozen"] += _share(
            regressed * max(inject, config.extract_layer) * layer_flops(decoder, context + 1)
        )
    else:
        flops["frozen"] += config.extract_layer * layer_flops(shapes.encoder, context + 1)
        flops["frozen"] += _share(regressed * inject * layer_flops(decoder, context + 1))
    whole = 1 - regressed
    flops["frozen"] += _share(whole * taught * layer_flops(decoder, context + after))
    restored = _states(config, config.slots)
    read = after + restored
    flops["frozen"] += _share(whole * inject * layer_flops(decoder, after))
    upper = depth - inject
    flops["forward"] = _share(whole * upper * layer_flops(decoder, read))
    flops["backward"] = _share(whole * upper * backward_flops(decoder, read))
    head = 2 * decoder.hidden_size * decoder.vocab_size
    flops["head"] = _share(whole * head * after * (2 + bool(losses.distill)))
    flops["parts"] = part_flops(shapes, 1, reconstruct=losses.reconstruct > 0)
    reading = context + 2 * after + (context + 1) * config.cross_model
    return Work(flops, reading, read, after, 1 + bool(losses.distill))


def stage2_work(recipe: Stage2Recipe, shapes: Shapes, workload: Workload) -> Work:
    """The cost of one question.

    Args:
        recipe: the recipe.
        shapes: what it trains.
        workload: tokens of documents, question and answer; K is the recipe's.
    """
    config, losses, decoder = shapes.config, recipe.losses, shapes.decoder
    segments = -(-workload.context // config.segment_length)
    blocks = -(-workload.context // (config.slots_per_block * config.compression))
    budgets = [resolve_budget(k, blocks) for k in recipe.data.budgets]
    k = round(sum(budgets) / len(budgets))
    flops: Counter[str] = Counter()
    if not recipe.data.cache_states:
        flops["frozen"] = encoding_flops(shapes, segments, workload.question)
    weights, read = recipe.data.conditions, 0
    prefix = workload.question + workload.answer
    width = config.slots_per_block * config.compression
    lora = _adapter_size(decoder, config.lora_rank)
    for condition, weight in weights.items():
        texts = {"memory": 0, "both": 1, "text": k}[condition]
        share = weight / sum(weights.values())
        own = prefix + texts * width
        joined = own + (k - texts) * _states(config, config.slots_per_block)
        lower, upper = config.inject_layer, decoder.num_hidden_layers - config.inject_layer
        adapters = 2 * lora * (lower * own + upper * joined)
        forward = lower * layer_flops(decoder, own) + upper * layer_flops(decoder, joined)
        backward = upper * backward_flops(decoder, joined) + 2 * adapters
        if lora:
            backward += lower * backward_flops(decoder, own)
        flops["forward"] += _share(share * (forward + adapters))
        flops["backward"] += _share(share * backward)
        read += _share(share * joined)
    head = 2 * decoder.hidden_size * decoder.vocab_size
    flops["head"] = 2 * head * workload.answer
    flops["parts"] = part_flops(
        shapes, segments, k, workload.question, reconstruct=losses.reconstruct > 0
    )
    frozen = 0 if recipe.data.cache_states else segments * (config.segment_length + 1)
    return Work(flops, frozen, read, workload.answer, 1)


def encoding_flops(shapes: Shapes, segments: int, question: int) -> int:
    """The FLOPs of the frozen states of an example's segments and question."""
    run = segments * layer_flops(shapes.encoder, shapes.config.segment_length + 1)
    return shapes.config.extract_layer * (run + layer_flops(shapes.encoder, question + 1))


def backward_flops(shape: PretrainedConfig, tokens: int) -> int:
    """The FLOPs of the gradient through one frozen layer."""
    return projection_flops(shape, tokens) + 2 * attention_flops(shape, tokens)


def part_flops(
    shapes: Shapes, segments: int, k: int | None = None, question: int = 0, *, reconstruct: bool
) -> int:
    """The FLOPs of the trained parts, forward and backward.

    Args:
        shapes: shape of the parts.
        segments: segments of an example.
        k: blocks that are decompressed; None decompresses every slot once.
        question: tokens that the selector scores blocks for; 0 for none.
        reconstruct: whether a loss restores every state, and projects it without pooling.
    """
    config = shapes.config
    widths = shapes.encoder.hidden_size, shapes.decoder.hidden_size
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
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
    return int(counter.get_total_flops())


def _adapter_size(shape: PretrainedConfig, rank: int) -> int:
    """The parameters of the adapters of one layer: on the four projections of attention."""
    queries, keys = head_widths(shape)
    return 2 * rank * (2 * shape.hidden_size + queries + keys)


def _states(config: SedemConfig, slots: int) -> int:
    """The number of states that enter the decoder for `slots` slots."""
    # Without a decompressor a slot is one soft token.
    return slots if config.decompressor == "none" else slots * config.compression


def _share(flops: float) -> int:
    return round(flops)

"""The computed floor of each measurement: the best that the measured machine could reach.

A stage executes its FLOPs and moves its bytes, so it takes at least the longer of FLOPs / (FLOPs
per second) and bytes / (bytes per second), at the speeds that this process measured. Stages run one
after another, so their floors add up.

These bytes count: the weights of a stage, read once; the keys and values that a decoding step
reads; the bank, which the first question projects to keys; and the keys that every question is
scored against, in the data type of their cache. Activations, launches, tokenization and Python are
free, and adapters count as merged. FLOPs are those of `evaluation.cost`, minus those that a last
layer can omit: before the first answer token nothing reads its states at other positions, so only
its keys and values are needed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig

from experiments.system.peers import PrefixCached
from sedem.backbone.decoder import Backbone, KeyAxis
from sedem.backbone.prompts import question_ids
from sedem.bank.keys import cache_dtype
from sedem.demo import QUESTIONS
from sedem.engine.device import Clock
from sedem.model import SeDeM
from sedem.types import Answer
from sedem_lab.baselines.longllmlingua import LongLLMLingua
from sedem_lab.bench.subjects import Subject
from sedem_lab.evaluation.cost import Workload, count_flops
from sedem_lab.evaluation.meta import META, backbone_of, counted
from sedem_lab.evaluation.readers import BoundSedem
from sedem_lab.evaluation.storage import BFLOAT16, kv_bytes_per_token

TRIES = 20


class Ceilings(NamedTuple):
    """Highest measured speeds: bytes that a copy reads and writes, FLOPs of a square product."""

    bytes_per_s: float
    flops_per_s: float


class Work(NamedTuple):
    """The minimum work of one stage; a multiply-add counts as two FLOPs."""

    flops: float
    bytes: float


Stages = Mapping[str, Sequence[Work]]
"""Work by stage: `read`, `first` (done once, by the first answer), `answer` (up to its first token)
and `token` (one more token)."""


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure copy bandwidth and matrix throughput, on arrays larger than every cache.

    A ceiling is the best of several tries, because a disturbed try is not an upper bound.
    """
    side, size = (8192, 2**31) if device.type == "cuda" else (1024, 2**27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def shortest(work: Callable[[], object]) -> float:
        """The lowest number of seconds of several tries."""
        times = []
        for _ in range(TRIES):
            clock = Clock(device)
            work()
            clock.lap("ms")
            times.append(clock.timings["ms"] / 1e3)
        return min(times)

    copying, multiplying = shortest(lambda: target.copy_(source)), shortest(lambda: left @ right)
    return Ceilings(2 * size / copying, 2 * side**3 / multiplying)


def floors_of(
    subject: Subject, answer: Answer, ceilings: Ceilings
) -> dict[str, float | None] | None:
    """Floors of the times of an answer; None if the method's stages are not known."""
    reader, question = subject.reader, QUESTIONS[0]
    if isinstance(reader, BoundSedem):
        work = sedem_work(reader.model, answer, question)
    elif subject.backbone is None or not subject.reads_text or isinstance(reader, LongLLMLingua):
        # LongLLMLingua reads the context several times to prune it, then reads the rest.
        return None
    else:
        cached = isinstance(reader, PrefixCached)
        work = text_work(subject.backbone, answer, question, cached=cached)
    return floors(work, answer.context_tokens or 0, ceilings)


def floors(work: Stages, tokens: int, ceilings: Ceilings) -> dict[str, float | None]:
    """Floors by measurement name, for a context of `tokens`; of a rate, the highest value."""
    read, first, answer, token = (
        sum(max(w.flops / ceilings.flops_per_s, w.bytes / ceilings.bytes_per_s) for w in work[name])
        for name in ("read", "first", "answer", "token")
    )
    return {
        "online_ttft_ms": 1e3 * (read + first + answer),
        "prebuilt_ttft_ms": 1e3 * answer,
        "decode_tok_s": 1 / token,
        "build_tok_s": tokens / read if read else None,
    }


def sedem_work(model: SeDeM, answer: Answer, question: str) -> Stages:
    """Work of SeDeM for an answer."""
    config, encoder, decoder = model.config, model.encoder, model.decoder
    assert answer.context_tokens is not None and answer.stored_bytes is not None
    shape, depth, lower = decoder.model.config, decoder.depth, config.inject_layer
    prefix, length = len(question_ids(decoder, question)), config.segment_length
    states, context = answer.k * length, answer.context_tokens

    def flops(question_tokens: int) -> dict[str, int]:
        workload = Workload(context, question_tokens, 1, answer.k)
        return count_flops(config, encoder.model.config, shape, workload)

    own = flops(len(encoder.token_ids(question)))
    reading = _layer_bytes(encoder, config.extract_layer)
    answering = _layer_bytes(decoder, depth) + _bytes(decoder.model.get_output_embeddings())
    if config.block_context == "joint":
        prefill = flops(prefix - 1)["prefill"] - _omitted(decoder, states + prefix - 1)
    else:
        # The prefix alone attends to the states of blocks above injection. Each block is run alone
        # through the layers above injection for its keys and values.
        prefill = lower * layer_flops(shape, prefix)
        prefill += (depth - lower) * layer_flops(shape, prefix, states)
        prefill += head_flops(shape) - _omitted(decoder, prefix - 1, states)
        block = (depth - lower) * layer_flops(shape, length) - _omitted(decoder, length)
        prefill += answer.k * block
    to_keys = model.selector.w_key
    slots = -(-context // length) * config.slots
    project = 2 * slots * to_keys.weight.numel()
    key_bytes = slots * to_keys.out_features * cache_dtype(to_keys.weight.device).itemsize
    asking = _bytes(model.selector) - _bytes(to_keys) + (0 if config.read_once else reading)
    cached = depth * prefix + (depth - lower) * states
    return {
        "read": [Work(own["read"], reading + _bytes(model.compressor))],
        "first": [Work(project, _bytes(to_keys) + answer.stored_bytes)],
        "answer": [
            Work(own["select"] - project, asking + key_bytes),
            Work(own["restore"], _bytes(model.decompressor)),
            Work(prefill, answering),
        ],
        "token": [_token(decoder, cached, answering)],
    }


def text_work(backbone: Backbone, answer: Answer, question: str, *, cached: bool) -> Stages:
    """Work of a method whose decoder reads text, for an answer that it gave.

    `cached` says that the context's keys and values are cached when it is read.
    """
    assert answer.conditioning is not None
    shape, depth, seen = backbone.model.config, backbone.depth, answer.conditioning
    layers, head = _layer_bytes(backbone, depth), _bytes(backbone.model.get_output_embeddings())
    before = seen - (len(question_ids(backbone, question)) - 1) if cached else 0
    reading = depth * layer_flops(shape, before) - _omitted(backbone, before)
    asked = depth * layer_flops(shape, seen - before, before) + head_flops(shape)
    asked -= _omitted(backbone, seen - before - 1, before)
    return {
        "read": [Work(reading, layers)] if cached else [],
        "first": [],
        "answer": [Work(asked, layers + head + before * _position_bytes(backbone))],
        "token": [_token(backbone, depth * seen, layers + head)],
    }


def _token(decoder: Backbone, cached: int, weights: float) -> Work:
    """Work of a decoding step that reads all weights and `cached` (layer, position) pairs."""
    shape = decoder.model.config
    flops = decoder.depth * layer_flops(shape, 1) + head_flops(shape)
    return Work(flops, weights + cached * _position_bytes(decoder) / decoder.depth)


@torch.no_grad()
def layer_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """FLOPs of one decoder layer over new tokens, after cached ones."""
    if not tokens:
        return 0
    single = deepcopy(shape)
    single.update({"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    backbone, cache = backbone_of(single), DynamicCache()
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    known = torch.empty(1, shape.num_key_value_heads, before, head, device=META).bfloat16()
    cache.update(known, known, 0)
    columns = torch.arange(before + tokens)[None]
    keys = KeyAxis(columns, torch.ones_like(columns).bool(), False, before + tokens)
    hidden = torch.empty(1, tokens, shape.hidden_size, device=META).bfloat16()
    given = columns[:, before:], torch.ones_like(columns[:, before:]).bool(), keys, cache
    return counted(lambda: backbone.run(hidden, 0, 1, *given))


def head_flops(shape: PretrainedConfig) -> int:
    """FLOPs of the logits of one token."""
    return 2 * shape.hidden_size * shape.vocab_size


def _omitted(decoder: Backbone, tokens: int, before: int = 0) -> int:
    """FLOPs that the last layer can omit at positions where only keys and values are needed."""
    shape = decoder.model.config
    kv_width = kv_bytes_per_token(shape) // BFLOAT16 // decoder.depth
    return layer_flops(shape, tokens, before) - 2 * tokens * decoder.width * kv_width


def _position_bytes(backbone: Backbone) -> int:
    """Bytes of the keys and values of one position in all layers, in the backbone's data type."""
    return kv_bytes_per_token(backbone.model.config) // BFLOAT16 * backbone.dtype.itemsize


def _layer_bytes(backbone: Backbone, layers: int) -> int:
    return sum(_bytes(layer) for layer in backbone.model.get_decoder().layers[:layers])


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for n, p in module.named_parameters() if "lora_" not in n)

"""The computed floor beside each figure: what the measured machine could do at best.

A stage must do its FLOPs and must move its bytes, so it takes at least the longer of
FLOPs / (FLOPs a second) and bytes / (bytes a second), with both speeds as this process measured
them. Stages follow one another, so floors add up. Counted bytes are weights that a stage needs,
read once, keys and values that a decoding step reads, the bank that a first question projects to
keys, and the keys that every question is held against, in the type in which they are held;
activations, launches, tokenizers and Python are free. Adapters count as merged. FLOPs are those of
`evaluation.cost`, less what a last layer can spare: before the first answer token, nothing looks at
its states of other positions, so of these it needs keys and values alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sedem.backbone.decoder import Backbone
from sedem.bank.key_index import cache_dtype
from sedem.bench.ceilings import Ceilings
from sedem.evaluation.cost import Workload, count_flops, layer_flops
from sedem.evaluation.storage import BFLOAT16, kv_bytes_per_token
from sedem.inference.prompts import question_ids
from sedem.model import SeDeM
from sedem.types import Answer


@dataclass(frozen=True)
class Work:
    """What one stage cannot do without.

    Attributes:
        flops: two a multiply-add.
        bytes: moved.
    """

    flops: float
    bytes: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The least time it takes."""
        return max(self.flops / ceilings.flops_per_s, self.bytes / ceilings.bytes_per_s)


Stages = Mapping[str, Sequence[Work]]
"""Work of `read`, `first` (what a first answer needs that others find done), `answer` (up to the
first token) and `token` (one more), by stage."""


def sedem_work(model: SeDeM, answer: Answer, question: str) -> Stages:
    """Work of SeDeM for one answer that it gave."""
    config, encoder, decoder = model.config, model.encoder, model.decoder
    assert answer.context_tokens is not None and answer.stored_bytes is not None
    prefix, states = len(question_ids(decoder, question)), answer.k * config.segment_length
    shapes = encoder.model.config, decoder.model.config

    def flops(question_tokens: int) -> dict[str, int]:
        workload = Workload(answer.context_tokens or 0, question_tokens, 1, answer.k)
        return count_flops(config, *shapes, workload)

    own, prompt = flops(len(encoder.token_ids(question))), flops(prefix - 1)
    reading = _layer_bytes(encoder, config.extract_layer)
    answering = _layer_bytes(decoder, decoder.depth) + _head_bytes(decoder)
    upper = decoder.depth - config.inject_layer
    kept = decoder.depth * prefix + upper * states
    prefill = prompt["prefill"] - _spared(decoder, states + prefix - 1)
    to_keys = model.selector.w_key
    slots = -(-answer.context_tokens // config.segment_length) * config.slots
    project = 2 * slots * to_keys.weight.numel()
    held = slots * to_keys.out_features * cache_dtype(to_keys.weight.device).itemsize
    asking = _bytes(model.selector) - _bytes(to_keys)
    return {
        "read": [Work(own["read"], reading + _bytes(model.compressor))],
        "first": [Work(project, _bytes(to_keys) + answer.stored_bytes)],
        "answer": [
            Work(own["select"] - project, reading + asking + held),
            Work(own["restore"], _bytes(model.decompressor)),
            Work(prefill, answering),
        ],
        "token": [_token(decoder, kept, answering)],
    }


def text_work(backbone: Backbone, answer: Answer, question: str, *, kept: bool) -> Stages:
    """Work of a method whose decoder reads text.

    Args:
        backbone: the decoder.
        answer: that it gave; says how many positions it saw.
        question: what was asked.
        kept: whether the context's keys and values were computed when it was read.
    """
    assert answer.conditioning is not None
    shape, depth = backbone.model.config, backbone.depth
    seen = answer.conditioning
    weights = _layer_bytes(backbone, depth)
    head = 2 * backbone.width * shape.vocab_size
    before = seen - (len(question_ids(backbone, question)) - 1) if kept else 0
    reading = depth * layer_flops(shape, before) - _spared(backbone, before)
    read = [Work(reading, weights)] if kept else []
    asked = depth * layer_flops(shape, seen - before, before) + head
    asked -= _spared(backbone, seen - before - 1, before)
    moved = weights + _head_bytes(backbone) + before * _position_bytes(backbone)
    return {
        "read": read,
        "first": [],
        "answer": [Work(asked, moved)],
        "token": [_token(backbone, depth * seen, weights + _head_bytes(backbone))],
    }


def floors(work: Stages, tokens: int, ceilings: Ceilings) -> dict[str, float | None]:
    """Floors by the names of figures; of a rate it is the most that is possible.

    Args:
        work: of one method.
        tokens: of the context.
        ceilings: of this machine.
    """
    read, first, answer, token = (
        sum(part.seconds(ceilings) for part in work[name])
        for name in ("read", "first", "answer", "token")
    )
    return {
        "online_ttft_ms": 1e3 * (read + first + answer),
        "prebuilt_ttft_ms": 1e3 * answer,
        "decode_tok_s": 1 / token,
        "build_tok_s": tokens / read if read else None,
    }


def _token(decoder: Backbone, kept: int, weights: float) -> Work:
    """One decoding step: all weights, and the keys and values of `kept` (layer, position) pairs."""
    shape = decoder.model.config
    flops = decoder.depth * layer_flops(shape, 1) + 2 * decoder.width * shape.vocab_size
    return Work(flops, weights + kept * _position_bytes(decoder) / decoder.depth)


def _spared(decoder: Backbone, tokens: int, before: int = 0) -> int:
    """FLOPs of the last layer over tokens of which only its keys and values are wanted.

    Args:
        decoder: whose layer.
        tokens: whose states nothing looks at.
        before: tokens that these follow.
    """
    shape = decoder.model.config
    kept = kv_bytes_per_token(shape) // BFLOAT16 // decoder.depth
    return layer_flops(shape, tokens, before) - 2 * tokens * decoder.width * kept


def _position_bytes(backbone: Backbone) -> int:
    """Keys and values of one position in every layer, in the backbone's own type."""
    return kv_bytes_per_token(backbone.model.config) // BFLOAT16 * backbone.dtype.itemsize


def _layer_bytes(backbone: Backbone, layers: int) -> int:
    return sum(_bytes(layer) for layer in backbone.model.get_decoder().layers[:layers])


def _head_bytes(backbone: Backbone) -> int:
    return _bytes(backbone.model.get_output_embeddings())


def _bytes(module: nn.Module) -> int:
    return sum(
        p.numel() * p.element_size() for n, p in module.named_parameters() if "lora_" not in n
    )

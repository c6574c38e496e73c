"""What the paper prints a query to cost, and the counting that gives its numbers.

The paper states 2,048 context, 30 query and 16 answer tokens, and neither K nor the layers. What
gives both numbers for SeDeM on both backbones, to the digit, was found by trying: every token
looks at every other, only the head of each answer token is counted, and neither the decompressor
nor the encoding of the question is. docs/deviations.md says what else was tried.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Convention:
    """What the paper's numbers seem to assume.

    Attributes:
        context: tokens that are encoded: three segments of 512, not the 2,048 of the text.
        layers: of the encoder, on both backbones.
        compression: tokens of a slot.
        states: positions of memory that all layers of the decoder run on: one block of 128 tokens,
            or four of 32 slots.
        question: query tokens.
        answer: answer tokens, each of them run through the decoder and its head.
    """

    context: int = 1536
    layers: int = 14
    compression: int = 4
    states: int = 128
    question: int = 30
    answer: int = 16


def convention_flops(shape: PretrainedConfig, assumed: Convention | None = None) -> dict[str, int]:
    """FLOPs of one query as the paper seems to count them.

    Returns:
        `encode` (layers, W_in and keys of each slot, queries of the question), `decode`, `total`.
    """
    assumed = assumed or Convention()
    projections = 2 * (assumed.context // assumed.compression) + assumed.question
    encode = assumed.layers * all_pairs_flops(shape, assumed.context)
    encode += 2 * projections * shape.hidden_size**2
    decode = generation_flops(shape, assumed.states + assumed.question, assumed.answer)
    return {"encode": encode, "decode": decode, "total": encode + decode}


def generation_flops(shape: PretrainedConfig, prefix: int, answer: int) -> int:
    """FLOPs of a prefix and answer tokens after it through every layer, heads for the answer."""
    one = all_pairs_flops(shape, prefix)
    one += sum(all_pairs_flops(shape, 1, prefix + at) for at in range(answer))
    return shape.num_hidden_layers * one + 2 * answer * shape.hidden_size * shape.vocab_size


def all_pairs_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """FLOPs of one layer whose new tokens look at everything, what follows them included."""
    width, inner = shape.hidden_size, shape.intermediate_size
    head = getattr(shape, "head_dim", None) or width // shape.num_attention_heads
    queries, keys = head * shape.num_attention_heads, head * shape.num_key_value_heads
    weights = 2 * width * queries + 2 * width * keys + 3 * width * inner
    return 2 * tokens * weights + 4 * tokens * (before + tokens) * queries


def beside_paper(
    name: str, parameters: dict[str, Any], flops: dict[str, Any], decoder: PretrainedConfig
) -> dict[str, Any] | None:
    """The paper's numbers for a preset beside ours; None for what the paper does not have.

    Args:
        name: of the preset.
        parameters: as `cost.count_parameters` returns them.
        flops: as `cost.count_flops` returns them.
        decoder: the shape of the backbone.

    Returns:
        `parameters` in millions, as printed, and `flops`: by stage what is printed (GFLOPs), what
        the convention gives and what we count, and a sentence about the convention.
    """
    printed = _printed().get(name)
    if not isinstance(printed, dict):
        return None
    convention, assumed = convention_flops(decoder), Convention()
    encode, decode = flops["read"] + flops["select"], flops["restore"] + flops["prefill"]
    ours = {"encode": encode, "decode": decode + flops["decode"], "total": flops["total"]}
    in_millions = printed["parameters_millions"]
    return {
        "parameters": in_millions,
        "parameters_difference": {
            part: round(parameters[part] / 1e6 - value, 2) for part, value in in_millions.items()
        },
        "flops": {
            "stages": {
                stage: {
                    "printed": value,
                    "convention": convention[stage],
                    "ours": ours[stage],
                    "difference": round(ours[stage] / 1e9 - value, 1),
                }
                for stage, value in printed["gflops"].items()
            },
            "note": (
                f"The paper's numbers come out when {assumed.context:,} tokens run through "
                f"{assumed.layers} layers and {assumed.states} states through every decoder layer, "
                "all pairs of tokens counted and no decompressor; it states 2,048 context tokens "
                "and no layers or K."
            ),
        },
    }


def printed_of_baseline(method: str, backbone: str) -> dict[str, Any] | None:
    """What the paper prints for a baseline: `parameters` (millions) and `flops` (GFLOPs).

    Args:
        method: a trained baseline.
        backbone: of it.

    Returns:
        None for what the paper does not have.
    """
    preset = _printed().get(backbone.lower())
    if not isinstance(preset, dict) or method not in preset["baselines"]:
        return None
    printed = preset["baselines"][method]
    return {
        "parameters": {"without_lora": printed["without_lora_millions"]},
        "flops": printed["gflops"],
    }


@cache
def _printed() -> dict[str, Any]:
    text = (files("sedem") / "shapes" / "paper-costs.json").read_text(encoding="utf-8")
    return dict(json.loads(text))

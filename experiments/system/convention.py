"""Parameters and FLOPs of methods, and the counting that reproduces the FLOPs of the paper.

The paper states 2,048 context, 30 question and 16 answer tokens. It states neither K nor the
layers. This counting was found by trial. It gives both numbers of SeDeM on both backbones to the
digit: every token attends to every other, only the answer tokens have a head, and neither the
decompressor nor the encoding of the question is counted. docs/deviations.md lists what else was
tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.evaluation import cost as counting


def cost(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Parameters and FLOPs, counted on the meta device."""
    if cell.method in TRAINED:
        return counting.cost(cell.backbone, method=cell.method)
    result = counting.cost(cell.backbone)
    parameters = result["parameters"]
    memory = parameters["total"] - parameters["lora"]
    parameters["without_lora"] = memory
    parameters["percent_without_lora"] = 100 * memory / parameters["backbone"]
    return {**result, "paper": counted_as_paper(cell.backbone, result["flops"])}


CONTEXT, QUESTION, ANSWER = 1536, 30, 16
"""Tokens: three segments of 512 are encoded, not the 2,048 of the text. Each answer token runs
through the decoder and its head."""
LAYERS = 14
"""Layers of the encoder, on both backbones."""
COMPRESSION = 4
"""Tokens per slot."""
STATES = 128
"""Memory positions in every layer of the decoder: one block of 128 tokens, or four of 32 slots."""


def convention_flops(shape: PretrainedConfig) -> dict[str, int]:
    """FLOPs of one query as the paper seems to count them.

    Returns:
        `encode` (layers, W_in and keys of each slot, queries of the question), `decode`, `total`.
    """
    projections = 2 * (CONTEXT // COMPRESSION) + QUESTION
    encode = LAYERS * all_pairs_flops(shape, CONTEXT)
    encode += 2 * projections * shape.hidden_size**2
    decode = generation_flops(shape, STATES + QUESTION, ANSWER)
    return {"encode": encode, "decode": decode, "total": encode + decode}


def generation_flops(shape: PretrainedConfig, prefix: int, answer: int) -> int:
    """FLOPs of a prefix and the answer tokens after it in every layer, with the answer's heads."""
    one = all_pairs_flops(shape, prefix)
    one += sum(all_pairs_flops(shape, 1, prefix + at) for at in range(answer))
    return shape.num_hidden_layers * one + 2 * answer * shape.hidden_size * shape.vocab_size


def all_pairs_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """FLOPs of one layer in which new tokens attend to all tokens, later ones included."""
    width, inner = shape.hidden_size, shape.intermediate_size
    head = getattr(shape, "head_dim", None) or width // shape.num_attention_heads
    queries, keys = head * shape.num_attention_heads, head * shape.num_key_value_heads
    weights = 2 * width * queries + 2 * width * keys + 3 * width * inner
    return 2 * tokens * weights + 4 * tokens * (before + tokens) * queries


def counted_as_paper(backbone: str, flops: Mapping[str, Any]) -> dict[str, Any]:
    """Our FLOPs of SeDeM in the paper's two stages, and those of its convention.

    `flops` is the result of `sedem_lab.evaluation.cost.count_flops`. By stage (`encode`, `decode`,
    `total`), `ours` and `convention` are under `flops.stages`.
    """
    convention = convention_flops(counting.backbone_shape(backbone))
    ours = {
        "encode": flops["read"] + flops["select"],
        "decode": flops["restore"] + flops["prefill"] + flops["decode"],
        "total": flops["total"],
    }
    stages = {s: {"convention": convention[s], "ours": ours[s]} for s in ours}
    return {"flops": {"stages": stages}}

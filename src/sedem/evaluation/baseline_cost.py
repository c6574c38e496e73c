"""The cost of a trained baseline: parameters and FLOPs of one query, counted as in `cost`.

FLOPs are those that our implementations compute: every row of a batch is padded to the longest, and
prefixes run through every layer even if a method does not need the last one. `docs/deviations.md`
says what a method could save. Adapters count as merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.errors import ConfigError
from sedem.evaluation.cost import (
    Workload,
    answer_flops,
    backbone_shape,
    backbone_size,
    counted,
    layer_flops,
    size_of,
)


def baseline_cost(method: str, backbone: str) -> dict[str, Any]:
    """Parameters and FLOPs of a trained baseline with default settings, which are the paper's.

    Args:
        backbone: a preset with one backbone, a folder or a hub id.

    Raises:
        ConfigError: the method is not in `COUNTED`, or the backbone is unknown.
    """
    flops = baseline_flops(method, backbone)
    return {
        "backbone": backbone,
        "method": method,
        "parameters": baseline_parameters(method, backbone),
        "flops": flops,
    }


def baseline_parameters(
    method: str, backbone: str, config: ReaderConfig | None = None
) -> dict[str, Any]:
    """The parameters that a method trains, and those that the paper's table of overheads counts.

    Returns:
        Trained parameters in `parts` and in `lora`, and their `total`; `without_lora`, which each
        method counts as the paper's table does, and `percent_without_lora` of the `backbone`.
    """
    kind, shape = reader_class(method), backbone_shape(backbone)
    config = config or kind.Config(backbone=backbone)
    with torch.device("meta"):
        parts = size_of(kind.build_parts(config, shape))
    size, lora = backbone_size(shape, config.lora_rank, config.lora_targets)
    overhead = kind.overhead(config, shape)
    return {
        "parts": parts,
        "lora": lora,
        "total": parts + lora,
        "without_lora": overhead,
        "percent_without_lora": 100 * overhead / size,
        "backbone": size,
    }


def baseline_flops(
    method: str,
    backbone: str,
    config: ReaderConfig | None = None,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """The FLOPs of one query, online: to `encode` the context, and to `decode` the answer."""
    if method not in COUNTED:
        raise ConfigError(f"FLOPs of '{method}' are not counted; those of {', '.join(COUNTED)} are")
    count, names = COUNTED[method]
    settings: Any = config or reader_class(method).Config(backbone=backbone)
    workload = workload or Workload()
    encode, decode = count(settings, backbone_shape(backbone), workload)
    assumed = {**workload.assumptions(), **{name: getattr(settings, name) for name in names}}
    if method == "500x":
        assumed["context_tokens_read"] = _read_by_500x(settings, workload)
    return {"encode": encode, "decode": decode, "total": encode + decode, "assumptions": assumed}


def _icae(config: Any, shape: PretrainedConfig, workload: Workload) -> tuple[int, int]:
    """ICAE: segments with a start token and memory tokens; the answer from all slots and FT."""
    segments = -(-workload.context // (config.memory * config.compression))
    row = 1 + -(-workload.context // segments) + config.memory
    encode = shape.num_hidden_layers * segments * layer_flops(shape, row)
    prefix = 1 + segments * config.memory + 1 + workload.question
    return encode, answer_flops(shape, prefix, 0, workload.answer)


def _hmt(config: Any, shape: PretrainedConfig, workload: Workload) -> tuple[int, int]:
    """HMT: full segments, then the rest of the context with the question and the answer."""
    size, memory, layers = config.tokens, config.memory, shape.num_hidden_layers
    segments, rest = divmod(1 + workload.context, size)
    with torch.device("meta"):
        parts = reader_class("hmt").build_parts(config, shape)

    def recall(number: int, tokens: int) -> int:
        """The first half of a segment queries all cached vectors; the first segment has none."""
        if not number:
            return 0
        cached = min(config.recall_context, number * memory)
        query = layers * layer_flops(shape, 2 * memory + min(max(1, size // 2), tokens))

        def recalled() -> None:
            states_MD, memories_UD = (
                torch.empty(rows, shape.hidden_size, device="meta") for rows in (memory, cached)
            )
            scores_MU = parts["recall_query"](states_MD) @ parts["recall_key"](memories_UD).T
            _ = scores_MU @ memories_UD

        return query + counted(recalled)

    def prefix(number: int, tokens: int) -> int:
        return memory + (config.sensory if number else 0) + tokens

    def read(number: int, tokens: int) -> int:
        return recall(number, tokens) + layers * layer_flops(shape, prefix(number, tokens) + memory)

    encode = sum(read(number, size) for number in range(segments))
    decode = 0
    if rest and rest + workload.question > size:
        # The question does not fit next to the rest, which becomes a segment of its own.
        decode += read(segments, rest)
        segments, rest = segments + 1, 0
    last = rest + workload.question
    decode += recall(segments, last)
    return encode, decode + answer_flops(shape, prefix(segments, last), 0, workload.answer)


def _500x(config: Any, shape: PretrainedConfig, workload: Workload) -> tuple[int, int]:
    """500xCompressor: windows of `limit` tokens, padded if there are fewer, and memory tokens."""
    windows = -(-_read_by_500x(config, workload) // config.limit)
    encode = shape.num_hidden_layers * windows * layer_flops(shape, config.limit + config.memory)
    before = windows * config.memory
    return encode, answer_flops(shape, 1 + workload.question, before, workload.answer)


def _read_by_500x(config: Any, workload: Workload) -> int:
    """Tokens of the context that 500xCompressor reads."""
    if config.long_contexts == "windows":
        return workload.context
    return min(int(config.limit), workload.context)


def _beacon(config: Any, shape: PretrainedConfig, workload: Workload) -> tuple[int, int]:
    """Activation Beacon: windows with beacons, each after the cached beacons of earlier windows.

    At a beacon both its own projections and the frozen ones they replace are computed.
    """
    windows, rest = divmod(1 + workload.context, config.window)
    beacons, layers = config.window // config.ratio, shape.num_hidden_layers
    with torch.device("meta"):
        parts = reader_class("beacon").build_parts(config, shape)
        tokens = torch.empty(beacons, shape.hidden_size)
    own = [module for name in "qkv" for module in parts[name].children()]

    def cached(finished: int) -> int:
        return finished * beacons + (config.sink if finished else 0)

    encode = layers * layer_flops(shape, rest, cached(windows))
    for number in range(windows):
        encode += layers * layer_flops(shape, config.window + beacons, cached(number))
        encode += counted(lambda: [module(tokens) for module in own])
    before = cached(windows) + rest
    return encode, answer_flops(shape, workload.question, before, workload.answer)


COUNTED: Mapping[str, tuple[Callable[..., tuple[int, int]], tuple[str, ...]]] = {
    "icae": (_icae, ("memory", "compression")),
    "hmt": (_hmt, ("memory", "sensory", "segment_length", "recall_width", "recall_context")),
    "500x": (_500x, ("memory", "limit")),
    "beacon": (_beacon, ("window", "ratio", "sink")),
}
"""The trained methods of the paper's table: a count of both stages, and the settings behind it."""

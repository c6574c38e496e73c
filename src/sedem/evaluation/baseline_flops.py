"""FLOPs of one query of a trained baseline, counted like SeDeM's in `cost`.

The formulas count what our implementations compute: every row of a batch is padded to the longest,
and prefixes run through every layer even if a method does not need the last one.
`docs/deviations.md` says what a method could save. Adapters count as merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from sedem.baselines.registry import reader_class
from sedem.baselines.settings import ReaderConfig
from sedem.errors import ConfigError
from sedem.evaluation.cost import Workload, answer_flops, backbone_shape, layer_flops


class Work(NamedTuple):
    """The FLOPs of one query, and the settings they depend on.

    Attributes:
        encode: FLOPs to read the context.
        decode: FLOPs to answer the question, including the prefill.
        settings: the settings by name.
    """

    encode: int
    decode: int
    settings: dict[str, int]


def baseline_flops(
    method: str,
    backbone: str,
    config: ReaderConfig | None = None,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """The FLOPs of one query, online.

    Args:
        method: a trained baseline.
        backbone: a preset with one backbone, a folder or a hub id.
        config: its settings; None means the defaults.
        workload: the query; None means the paper's.

    Returns:
        `encode`, `decode`, their `total`, and the `assumptions`.

    Raises:
        ConfigError: the method has no formula, or the backbone is unknown.
    """
    if method not in COUNTED:
        raise ConfigError(f"FLOPs of '{method}' are not counted; those of {', '.join(COUNTED)} are")
    config = config or reader_class(method).Config(backbone=backbone)
    workload = workload or Workload()
    work = COUNTED[method](config, backbone_shape(backbone), workload)
    return {
        "encode": work.encode,
        "decode": work.decode,
        "total": work.encode + work.decode,
        "assumptions": {
            "context_tokens": workload.context,
            "question_tokens": workload.question,
            "answer_tokens": workload.answer,
            **work.settings,
        },
    }


def icae_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """ICAE: segments with a start token and memory tokens; the answer from all slots and FT."""
    segments = -(-workload.context // (config.memory * config.compression))
    longest = -(-workload.context // segments)
    row = 1 + longest + config.memory
    encode = shape.num_hidden_layers * segments * layer_flops(shape, row)
    prefix = 1 + segments * config.memory + 1 + workload.question
    decode = answer_flops(shape, prefix, 0, workload.answer)
    return Work(encode, decode, _settings(config, "memory", "compression"))


def hmt_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """HMT: full segments, then the rest of the context with the question and the answer."""
    size, memory, layers = config.tokens, config.memory, shape.num_hidden_layers
    segments, rest = divmod(1 + workload.context, size)

    def recall(number: int, tokens: int) -> int:
        # The first half of a segment queries all cached memory vectors. The first segment has none.
        if not number:
            return 0
        cached = min(config.recall_context, number * memory)
        query = layers * layer_flops(shape, 2 * memory + min(max(1, size // 2), tokens))
        width, inner = shape.hidden_size, config.recall_width
        projections = 2 * (memory + cached) * width * inner
        return query + projections + 2 * memory * cached * (inner + width)

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
    decode += answer_flops(shape, prefix(segments, last), 0, workload.answer)
    names = ("memory", "sensory", "segment_length", "recall_width", "recall_context")
    return Work(encode, decode, _settings(config, *names))


def compressor_500x_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """500xCompressor: the first `limit` tokens, padded if there are fewer, and memory tokens."""
    encode = shape.num_hidden_layers * layer_flops(shape, config.limit + config.memory)
    decode = answer_flops(shape, 1 + workload.question, config.memory, workload.answer)
    read = min(config.limit, workload.context)
    settings = _settings(config, "memory", "limit")
    return Work(encode, decode, {**settings, "context_tokens_read": read})


def beacon_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """Activation Beacon: windows with beacons, each after the cached beacons of earlier windows.

    At a beacon both its own projections and the frozen ones they replace are computed.
    """
    windows, rest = divmod(1 + workload.context, config.window)
    beacons, layers = config.window // config.ratio, shape.num_hidden_layers
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    outputs = head * (shape.num_attention_heads + 2 * shape.num_key_value_heads)
    projections = 2 * beacons * shape.hidden_size * outputs

    def cached(finished: int) -> int:
        return finished * beacons + (config.sink if finished else 0)

    encode = sum(
        layers * (layer_flops(shape, config.window + beacons, cached(number)) + projections)
        for number in range(windows)
    )
    encode += layers * layer_flops(shape, rest, cached(windows))
    decode = answer_flops(shape, workload.question, cached(windows) + rest, workload.answer)
    return Work(encode, decode, _settings(config, "window", "ratio", "sink"))


def _settings(config: Any, *names: str) -> dict[str, int]:
    return {name: getattr(config, name) for name in names}


COUNTED: Mapping[str, Callable[[Any, PretrainedConfig, Workload], Work]] = {
    "icae": icae_flops,
    "hmt": hmt_flops,
    "500x": compressor_500x_flops,
    "beacon": beacon_flops,
}
"""The trained methods of the paper's table and their formulas."""

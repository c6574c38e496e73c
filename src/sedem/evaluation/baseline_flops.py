"""FLOPs of one query of a trained baseline, from its settings and a shape, counted as SeDeM's are.

What is computed here: rows of a batch as long as its longest, prefixes through every layer, even
where a method needs nothing of the last one. `docs/deviations.md` has what of it a method could
spare. Adapters are taken as merged.
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
    """FLOPs of one query, and the settings that decide them.

    Attributes:
        encode: to read the context.
        decode: to answer the question, prefill included.
        settings: by name.
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
    """FLOPs of one query, online.

    Args:
        method: a trained baseline.
        backbone: a preset of one backbone, a folder or a hub id.
        config: its settings; None means their defaults.
        workload: one query; the paper's if not given.

    Returns:
        `encode`, `decode`, their `total`, and the `assumptions`.

    Raises:
        ConfigError: the method has no formula, or there is no such backbone.
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
    """Segments with start and memory tokens; the answer from all slots and the token FT."""
    segments = -(-workload.context // (config.memory * config.compression))
    longest = -(-workload.context // segments)
    row = 1 + longest + config.memory
    encode = shape.num_hidden_layers * segments * layer_flops(shape, row)
    prefix = 1 + segments * config.memory + 1 + workload.question
    decode = answer_flops(shape, prefix, 0, workload.answer)
    return Work(encode, decode, _settings(config, "memory", "compression"))


def hmt_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """Whole segments; then what is left of the context, with the question and the answer."""
    size, memory, layers = config.tokens, config.memory, shape.num_hidden_layers
    whole, rest = divmod(1 + workload.context, size)

    def given(number: int, own: int) -> int:
        # Half of a segment, asked by it all memory vectors that are kept; the first one recalls
        # nothing.
        if not number:
            return 0
        kept = min(config.recall_context, number * memory)
        asking = layers * layer_flops(shape, 2 * memory + min(max(1, size // 2), own))
        width, inner = shape.hidden_size, config.recall_width
        projected = 2 * (memory + kept) * width * inner
        return asking + projected + 2 * memory * kept * (inner + width)

    def front(number: int, own: int) -> int:
        return memory + (config.sensory if number else 0) + own

    def read(number: int, own: int) -> int:
        return given(number, own) + layers * layer_flops(shape, front(number, own) + memory)

    encode = sum(read(number, size) for number in range(whole))
    decode = 0
    if rest and rest + workload.question > size:
        # The question does not fit beside the rest, which becomes a segment of its own.
        decode += read(whole, rest)
        whole, rest = whole + 1, 0
    last = rest + workload.question
    decode += given(whole, last)
    decode += answer_flops(shape, front(whole, last), 0, workload.answer)
    decisive = ("memory", "sensory", "segment_length", "recall_width", "recall_context")
    return Work(encode, decode, _settings(config, *decisive))


def compressor_500x_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """The first `limit` tokens, filled up to it, and memory tokens; whatever the context has."""
    encode = shape.num_hidden_layers * layer_flops(shape, config.limit + config.memory)
    decode = answer_flops(shape, 1 + workload.question, config.memory, workload.answer)
    read = {"context_tokens_read": min(config.limit, workload.context)}
    return Work(encode, decode, {**_settings(config, "memory", "limit"), **read})


def beacon_flops(config: Any, shape: PretrainedConfig, workload: Workload) -> Work:
    """Windows with beacons above what earlier ones have left; the question above what all have.

    At a beacon both its own projections and the frozen ones that they replace are computed.
    """
    whole, rest = divmod(1 + workload.context, config.window)
    beacons, layers = config.window // config.ratio, shape.num_hidden_layers
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    outputs = head * (shape.num_attention_heads + 2 * shape.num_key_value_heads)
    own = 2 * beacons * shape.hidden_size * outputs

    def held(windows: int) -> int:
        return windows * beacons + (config.sink if windows else 0)

    encode = sum(
        layers * (layer_flops(shape, config.window + beacons, held(n)) + own) for n in range(whole)
    )
    encode += layers * layer_flops(shape, rest, held(whole))
    decode = answer_flops(shape, workload.question, held(whole) + rest, workload.answer)
    return Work(encode, decode, _settings(config, "window", "ratio", "sink"))


def _settings(config: Any, *names: str) -> dict[str, int]:
    return {name: getattr(config, name) for name in names}


COUNTED: Mapping[str, Callable[[Any, PretrainedConfig, Workload], Work]] = {
    "icae": icae_flops,
    "hmt": hmt_flops,
    "500x": compressor_500x_flops,
    "beacon": beacon_flops,
}
"""The trained methods of the paper's table, with their formula."""
